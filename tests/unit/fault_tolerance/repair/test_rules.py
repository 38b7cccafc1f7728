"""Jobs that cannot be repaired are refused at the start; the message says why and what to do."""

from argparse import Namespace
from typing import Any

import pytest

from megatron.fault_tolerance.repair.rules import (
    answer_to_lost_nodes,
    checked_heartbeat_s,
    checked_member,
)
from moe_ft.cluster.member import Member
from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.errors import ConfigError
from tests.unit.signed import member_of


def args(**changes: Any) -> Namespace:
    defaults = {
        "dataloader_type": "single",
        "async_save": False,
        "ckpt_assume_constant_structure": False,
        "phase_transition_iterations": None,
        "skip_train": False,
        "hybrid_context_parallel": False,
        "world_size": 4,
        "moe_ft_elastic": False,
        "cuda_graph_impl": "none",
        "nccl_ub": False,
        "use_sharp": False,
        "tp_comm_overlap": False,
        "moe_token_dispatcher_type": "alltoall",
        "pipeline_model_parallel_comm_backend": None,
    }
    return Namespace(**{**defaults, **changes})


def check(member: Member | None = None, *, on_gpus: bool = False, **changes: Any) -> Member:
    return checked_member(args(**changes), member or member_of(), on_gpus=on_gpus)


def test_supported_job_is_repaired() -> None:
    member = member_of()
    assert check(member, on_gpus=True) is member, "a job on GPUs may be tried"
    assert check(member, cuda_graph_impl="local") is member, "no GPU is used"


def test_rank_that_nothing_would_replace_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs ranks that are forked by `python -m moe_ft keep`"):
        checked_member(args(), None, on_gpus=False)


ON_GPUS_ONLY = [
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl: captured graphs hold"),
    ({"nccl_ub": True}, "--use-nccl-ub: its memory is registered"),
    ({"use_sharp": True}, "--use-sharp: its groups have to be the first"),
    ({"tp_comm_overlap": True}, "--tp-comm-overlap: its buffers are shared"),
    ({"moe_token_dispatcher_type": "flex"}, "--moe-token-dispatcher-type flex: its buffers"),
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


def answer(value: str, *, is_watched: bool = True, **changes: Any) -> str:
    member = member_of(is_watched=is_watched)
    config = MoeFtConfig(recovery=RecoveryConfig(without_spare=value))
    return answer_to_lost_nodes(config, args(**changes), member)


@pytest.mark.parametrize("value", ["wait", "crowd", "reroute", "shrink"])
def test_answer_to_lost_nodes_is_refused_where_there_is_one_node(value: str) -> None:
    message = f"--moe-ft-without-spare={value} needs several nodes, or a spare one"
    with pytest.raises(ConfigError, match=message):
        answer(value, is_watched=False)


def test_job_of_one_node_ends_with_it_and_one_of_several_crowds() -> None:
    assert [answer("auto", is_watched=each) for each in (False, True)] == ["end", "crowd"]


def test_roles_that_cannot_be_played_are_refused() -> None:
    message = (
        "--moe-ft-without-spare=reroute is refused: no --use-distributed-optimizer does not work .* "
        "Or give --moe-ft-without-spare crowd"
    )
    with pytest.raises(ConfigError, match=message):
        answer("reroute", use_distributed_optimizer=False)


def test_silence_is_a_hang_before_the_other_ranks_give_up() -> None:
    args = Namespace(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=None)
    config = MoeFtConfig(recovery=RecoveryConfig(repair="auto", repair_heartbeat_s=59.5))
    assert checked_heartbeat_s(config, args) == 59.5
    for after_init_s in (10, 59):
        args.distributed_timeout_seconds_after_init = after_init_s
        with pytest.raises(ConfigError, match=f"=59.5 must be less than {after_init_s}, .* Lower"):
            checked_heartbeat_s(config, args)
