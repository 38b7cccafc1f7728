"""Jobs that cannot be repaired are refused at the start; the message says why and what to do."""

from argparse import Namespace
from typing import Any

import pytest

from megatron.fault_tolerance.repair.rules import (
    answer_to_lost_nodes,
    checked_heartbeat_s,
    line_on_gloo_groups,
    why_not_in_place,
)
from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.errors import ConfigError
from tests.unit.signed import member_of


def args(**changes: Any) -> Namespace:
    defaults = {
        "dataloader_type": "single",
        "async_save": False,
        "ckpt_assume_constant_structure": False,
        "phase_transition_iterations": None,
        "skip_train": False,
        "qk_clip": False,
        "hybrid_context_parallel": False,
        "world_size": 4,
        "distributed_timeout_minutes": 10,
        "distributed_timeout_seconds_after_init": None,
        "moe_ft_elastic": False,
        "cuda_graph_impl": "none",
        "cuda_graph_modules": [],
        "context_parallel_size": 1,
        "moe_router_load_balancing_type": "aux_loss",
        "nccl_ub": False,
        "use_sharp": False,
        "tp_comm_overlap": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_flex_dispatcher_backend": "deepep",
        "expert_tensor_parallel_size": 1,
        "expert_model_parallel_size": 8,
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_comm_backend": None,
    }
    return Namespace(**{**defaults, **changes})


def check(
    repair: str = "auto",
    *,
    on_gpus: bool = False,
    is_forked: bool = True,
    allowed: str | None = "repair",
    **changes: Any,
) -> str:
    member = member_of() if is_forked else None
    config = MoeFtConfig(
        recovery=RecoveryConfig(repair=repair), strategy=StrategyConfig(allow_untested=allowed)
    )
    return why_not_in_place(config, args(**changes), member, on_gpus=on_gpus)


def test_supported_job_is_repaired() -> None:
    assert not check(on_gpus=True), "a job on GPUs may be tried"
    assert not check(cuda_graph_impl="local"), "no GPU is used"
    assert not check(on_gpus=True, **FLEX), "eight ranks reach each other over NVLink"
    assert not check(on_gpus=True, **GRAPHS), "without a collective in them"
    of_hybridep: dict[str, Any] = {**FLEX, "moe_flex_dispatcher_backend": "hybridep"}
    assert not check(on_gpus=True, **of_hybridep, expert_model_parallel_size=64)
    assert not check("try") and not check("try", on_gpus=True)
    assert check("off") == "--moe-ft-repair=off"


def test_rank_that_nothing_would_replace_is_refused() -> None:
    message = "--moe-ft-repair=auto needs ranks that are forked by `python -m moe_ft launch`"
    with pytest.raises(ConfigError, match=message):
        check(is_forked=False)


def test_job_that_repairs_are_tried_in_runs_without_them_and_knows_why() -> None:
    assert "=try needs ranks that are forked" in check("try", is_forked=False)
    assert "=try does not work with --async-save: all ranks" in check("try", async_save=True)
    on_gpus = check("try", on_gpus=True, allowed=None)
    assert "it has never run on one" in on_gpus and "--moe-ft-allow-untested repair" in on_gpus
    silent_s = RecoveryConfig(repair="try", repair_heartbeat_s=700)
    found = why_not_in_place(MoeFtConfig(recovery=silent_s), args(), member_of(), on_gpus=False)
    assert "--moe-ft-repair-heartbeat-s=700 must be less than 600" in found


FLEX: dict[str, Any] = {"moe_token_dispatcher_type": "flex"}
# As the recipe of DeepSeek-V3 for GB200 has them.
GRAPHS: dict[str, Any] = {
    **FLEX,
    "moe_flex_dispatcher_backend": "hybridep",
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": ["attn", "moe_router", "moe_preprocess"],
    "tensor_model_parallel_size": 1,
}
ON_GPUS_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl: only graphs of layers"),
    ({**GRAPHS, "tensor_model_parallel_size": 2}, "--cuda-graph-impl: .* of tensor-parallel"),
    ({**GRAPHS, "moe_token_dispatcher_type": "alltoall"}, "--cuda-graph-impl: .* expert-parallel"),
    *(
        ({**GRAPHS, "cuda_graph_modules": modules}, "--cuda-graph-impl: .* expert-parallel")
        for modules in ([], ["full"], ["attn", "moe"])
    ),
    (
        {**GRAPHS, "moe_router_load_balancing_type": ["global_aux_loss"]},
        "--cuda-graph-impl: .* data-parallel",
    ),
    ({"nccl_ub": True}, "--use-nccl-ub: its memory is registered"),
    ({"use_sharp": True}, "--use-sharp: its groups have to be the first"),
    ({"tp_comm_overlap": True}, "--tp-comm-overlap: user buffers .* and a replacement is alone"),
    (
        {**FLEX, "expert_tensor_parallel_size": None},  # 2 as that of the rest
        "--moe-flex-dispatcher-backend deepep: with 16 expert-parallel ranks, more than 8, .* NVSHMEM",
    ),
    (
        {**FLEX, "moe_flex_dispatcher_backend": "ncclep"},
        "--moe-flex-dispatcher-backend ncclep: .* borrows the communicator",
    ),
    (
        {"pipeline_model_parallel_comm_backend": "ucc"},
        "--pipeline-model-parallel-comm-backend ucc: only backends of NCCL and gloo",
    ),
]
ANYWHERE = [
    (
        {"dataloader_type": "external"},
        "--dataloader-type external: how to set its position is not known",
    ),
    ({"async_save": True}, "--async-save: all ranks wait"),
    ({"ckpt_assume_constant_structure": True}, "--ckpt-assume-constant-structure: a new"),
    ({"phase_transition_iterations": [3]}, "--phase-transition-iterations: the position"),
    ({"skip_train": True}, "--skip-train: nothing is trained"),
    ({"hybrid_context_parallel": True}, "--hybrid-context-parallel: its iterator"),
    ({"world_size": 1}, "one rank: no rank is left to repair it"),
]


@pytest.mark.parametrize(("changes", "message"), [*ON_GPUS_ONLY, ANYWHERE[1]])
def test_job_on_gpus_that_cannot_be_repaired_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"--moe-ft-repair=auto does not work with {message}"):
        check(on_gpus=True, **changes)


@pytest.mark.parametrize(("changes", "message"), ANYWHERE)
def test_job_that_cannot_be_repaired_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--moe-ft-repair=auto does not work with {message}"):
        check(**changes)


def test_job_whose_connections_gloo_makes_later_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its survivors waited for 170 s, and had to be killed."""
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    with pytest.raises(ConfigError, match=r"=auto does not work with TORCH_GLOO_LAZY_INIT=1: conn"):
        check()
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "0")
    assert not check()


def test_job_whose_groups_of_gloo_take_too_long_is_told_the_flag() -> None:
    def line(size: int, num_ranks: int, *, has_groups: bool = True) -> str:
        given = {"data_parallel_size": size, "world_size": num_ranks}
        return line_on_gloo_groups(Namespace(**given, use_gloo_process_groups=has_groups))

    assert not line(64, 1024) and not line(1024, 16384, has_groups=False)
    assert "16384 ranks read 421 GB of addresses: add --disable-gloo" in line(1024, 16384)


def answer(value: str, *, is_watched: bool = True, **changes: Any) -> str:
    member = member_of(is_watched=is_watched)
    config = MoeFtConfig(recovery=RecoveryConfig(without_spare=value))
    return answer_to_lost_nodes(config, args(**changes), member)


@pytest.mark.parametrize("value", ["wait", "crowd", "share", "shrink"])
def test_answer_to_lost_nodes_is_refused_where_there_is_one_node(value: str) -> None:
    message = f"--moe-ft-without-spare={value} needs several nodes, or a spare one"
    with pytest.raises(ConfigError, match=message):
        answer(value, is_watched=False)


def test_job_of_one_node_ends_with_it_and_one_of_several_crowds() -> None:
    assert [answer("auto", is_watched=each) for each in (False, True)] == ["end", "crowd"]


def test_micro_batches_that_peers_cannot_share_are_refused() -> None:
    message = (
        "--moe-ft-without-spare=share is refused: --dataloader-type=cyclic does not work .* "
        "Or give --moe-ft-without-spare crowd"
    )
    with pytest.raises(ConfigError, match=message):
        answer("share", dataloader_type="cyclic")


def test_silence_is_a_hang_before_the_other_ranks_give_up() -> None:
    args = Namespace(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=None)
    config = MoeFtConfig(recovery=RecoveryConfig(repair="auto", repair_heartbeat_s=59.5))
    assert checked_heartbeat_s(config, args) == 59.5
    for after_init_s in (10, 59):
        args.distributed_timeout_seconds_after_init = after_init_s
        with pytest.raises(ConfigError, match=f"=59.5 must be less than {after_init_s}, .* Lower"):
            checked_heartbeat_s(config, args)
