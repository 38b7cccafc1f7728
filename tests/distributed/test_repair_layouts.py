"""Repair in place in other layouts, precisions and models, and with flags of which replacements must know."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.demo_model import DEEPSEEK, NO_EXPERTS, RERUNS
from tests.jobs import DENSE, NUM_REPAIRED, PP_EP, SPARSE, RepairedJob

SEQUENCE: Mapping[str, Any] = {"sequence_parallel": True}
VIRTUAL: Mapping[str, Any] = {"num_layers_per_virtual_pipeline_stage": 1}
OVERLAP: Mapping[str, Any] = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 20000,
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A job of some layout, and the rank of it that dies."""

    layout: Mapping[str, int]
    num_ranks: int
    dead: int
    changes: Mapping[str, Any] = field(default_factory=dict)


def check_variant(
    repaired: RepairedJob, variant: Variant, phase: str, strategy: tuple[str, ...]
) -> None:
    repaired.run(
        f"kill:{variant.dead}@4:{phase}",
        strategy=strategy,
        layout=variant.layout,
        num_ranks=variant.num_ranks,
        changes=variant.changes,
    )
    repaired.check([variant.dead], [4], [{3, 4} if strategy is DENSE else {3}])


@pytest.mark.rest
def test_rank_that_reads_no_data_is_replaced_among_virtual_stages_that_overlap(
    repaired: RepairedJob,
) -> None:
    variant = Variant(
        layout={"tp": 2, "pp": 2}, num_ranks=4, dead=3, changes={**SEQUENCE, **VIRTUAL, **OVERLAP}
    )
    check_variant(repaired, variant, "backward", DENSE)


VARIANTS = {
    **{
        f"tensor rank {rank}": Variant(layout={"tp": 2}, num_ranks=2, dead=rank, changes=NO_EXPERTS)
        for rank in range(2)
    },
    **{
        f"tensor and data rank {rank}": Variant(
            layout={"tp": 2, "ep": 2}, num_ranks=4, dead=rank, changes=SEQUENCE
        )
        for rank in range(4)
    },
    "middle stage": Variant(layout={"pp": 4}, num_ranks=4, dead=1),
    **{
        f"virtual stages of rank {rank}": Variant(
            layout=PP_EP, num_ranks=4, dead=rank, changes=VIRTUAL
        )
        for rank in (1, 2)
    },
    **{
        f"overlap in data rank {rank}": Variant(layout={}, num_ranks=2, dead=rank, changes=OVERLAP)
        for rank in range(2)
    },
    "overlap of gradients": Variant(
        layout={},
        num_ranks=2,
        dead=0,
        changes={"overlap_grad_reduce": True, "use_distributed_optimizer": False},
    ),
    **{
        f"overlap in virtual stages of rank {rank}": Variant(
            layout=PP_EP, num_ranks=4, dead=rank, changes={**VIRTUAL, **OVERLAP}
        )
        for rank in (0, 3)
    },
    "eight ranks": Variant(layout={"pp": 2, "ep": 4}, num_ranks=8, dead=5),
}


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [DENSE, SPARSE], ids=lambda strategy: str(strategy[0]))
@pytest.mark.parametrize("phase", ["forward", "backward", "in-step"])
@pytest.mark.parametrize("name", VARIANTS)
def test_rank_is_replaced_in_every_layout(
    repaired: RepairedJob, name: str, phase: str, strategy: tuple[str, ...]
) -> None:
    check_variant(repaired, VARIANTS[name], phase, strategy)


# The scale grows after two iterations and overflows now and then.
FP16 = {
    "bf16": False,
    "fp16": True,
    "initial_loss_scale": 2**16,
    "loss_scale_window": 2,
    "min_loss_scale": 1,
    "hysteresis": 1,
}
MODELS: dict[str, Mapping[str, Any]] = {
    "fp16": FP16,
    "fp16 that overlaps": {**FP16, **OVERLAP},
    "fp32": {"bf16": False},
    "tokens": {"calculate_per_token_loss": True},
    "deepseek": DEEPSEEK,
    "cyclic": {"dataloader_type": "cyclic", "no_data_sharding": True},
    "timeout": {"distributed_timeout_seconds_after_init": 50},
    "hashes": {"check_weight_hash_across_dp_replicas_interval": 2},
    "recomputation": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "growing batches": {
        "calculate_per_token_loss": True,
        "global_batch_size": False,
        "step_batch_size_schedule": (f"0:8 {3 * 8 * 32}:16",),
    },
}


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [DENSE, SPARSE], ids=lambda strategy: str(strategy[0]))
@pytest.mark.parametrize("dead", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_rank_is_replaced_whatever_is_trained(
    repaired: RepairedJob, name: str, dead: int, strategy: tuple[str, ...]
) -> None:
    variant = Variant(layout=PP_EP, num_ranks=4, dead=dead, changes=MODELS[name])
    check_variant(repaired, variant, "backward", strategy)


@pytest.mark.rest
@pytest.mark.parametrize(
    "flags",
    [
        ("--rerun-mode", "disabled"),
        ("--rerun-mode", "validate_results", *RERUNS),
    ],
    ids=lambda flags: str(flags[1]),
)
def test_rank_is_replaced_in_every_mode_of_reruns(
    repaired: RepairedJob, flags: tuple[str, ...]
) -> None:
    repaired.run("kill:3@4:backward", extra=flags)
    repaired.check([3], [4], [{3, 4}])
    rejected = {line["iteration"]: line["exit_code"] for line in repaired.events("rejected", 3)}
    assert set(rejected.values()) <= {0}  # no reason to end
    assert set(rejected) == ({*range(1, NUM_REPAIRED)} if flags[2:] else set())


@pytest.mark.rest
def test_batch_that_is_skipped_is_skipped_again(repaired: RepairedJob) -> None:
    # The iteration from state 3 to 4 only reads its batch, and logs nothing.
    repaired.run("kill:3@4:backward", strategy=SPARSE, changes={"iterations_to_skip": 4})
    repaired.check([3], [4], [{3}], logged=[1, 2, 3, 5, 6, 7, 8])


@pytest.mark.rest
@pytest.mark.parametrize("draws", [False, True], ids=["calm", "drawing"])
def test_evaluation_before_the_broken_iteration_is_left_out_or_ends_the_repair(
    repaired: RepairedJob, draws: bool
) -> None:
    result = repaired.run(
        "kill:3@5:backward",
        strategy=("dense", "--moe-ft-interval", "3"),
        changes={
            "eval_interval": 4,
            "eval_iters": 1,
            "moe_input_jitter_eps": 0.01 if draws else False,
        },
        max_restarts=1,
    )
    assert result.num_restarts == draws
    assert ("evaluations draw random numbers" in result.log.read_text()) == draws
    assert repaired.digests() == repaired.reference()
    if not draws:
        repaired.check([3], [5], [{3}])


@pytest.mark.rest
def test_log_lines_of_several_iterations_come_once(repaired: RepairedJob) -> None:
    repaired.run("kill:3@4:backward", changes={"log_interval": 2})
    repaired.check([3], [4], [{3, 4}], logged=[1, 2, 4, 6, 8])


@pytest.mark.rest
def test_ranks_of_two_nodes_are_replaced_where_they_were(repaired: RepairedJob) -> None:
    repaired.run_under_torchrun("kill:0@4:backward", "kill:3@6:forward", num_nodes=2)
    repaired.check([0, 3], [4, 6], [{3, 4}, {5, 6}])
    text = (repaired.folder / "log").read_text()
    assert text.count("ranks are forked from process") == 2, "one a node, which also replaces them"
