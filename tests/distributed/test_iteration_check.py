"""Iterations that ranks repeat for each other: a run stays as it is, and who computes wrongly is named."""

from typing import Any

import pytest

from moe_ft.loop.refusing import EXIT_CORRUPTION
from tests.demo_model import DEEPSEEK, RERUNS
from tests.jobs import CheckpointJob, RepairedJob
from tests.shares import share_of

EVERY = ("--moe-ft-check-iterations", "1")
DROPOUT = {"attention_dropout": 0.1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
VIRTUAL = {"num_layers_per_virtual_pipeline_stage": 1}

# (ranks, sizes, changes of the model, further flags)
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any], tuple[str, ...]]] = {
    "dp3": (3, {}, {"global_batch_size": 12, **DROPOUT}, ()),
    "ep2-dp4": (4, {"ep": 2}, {**OVERLAP, **DROPOUT}, ()),
    "pp2-virtual": (4, {"pp": 2}, {**VIRTUAL, **OVERLAP}, ()),
    "tp2-dp2": (4, {"tp": 2}, {"sequence_parallel": True, **DROPOUT}, ()),
    "alone": (2, {"pp": 2}, DROPOUT, ()),
    "deepseek": (2, {}, DEEPSEEK, ()),
    "reruns": (2, {}, DROPOUT, RERUNS),
}


# Runs of the covering array are checked too.
@pytest.mark.parametrize("case", share_of(CASES, "dp3", "pp2-virtual"))
def test_a_run_whose_iterations_are_all_checked_ends_with_the_same_bits(
    job: CheckpointJob, case: str
) -> None:
    num_ranks, sizes, changes, flags = CASES[case]
    job.set_model(num_ranks, sizes, *flags, **changes)
    job.run("--moe-ft-strategy", "none", *EVERY).check()
    assert job.digests() == job.reference()
    assert not job.events("corruption")


# By case: (ranks, sizes, the flip, ranks that are named, whether it is decided)
FLIPS: dict[str, tuple[int, dict[str, int], str, list[int], bool]] = {
    # Computed for another rank, or for itself: three replicas know who is wrong.
    "activation": (3, {}, "flip:1@4:activation", [1], True),
    "gradients": (3, {}, "flip:2@4:gradients", [2], True),
    "weights": (3, {}, "flip:1@4:weights", [1], True),
    # Two computed once more what one of them had computed wrongly once.
    "once": (4, {"pp": 2}, "flip:2@4:activation", [2], True),
    "alone": (2, {"ep": 2}, "flip:1@4:gradients", [1], True),
    "two": (2, {}, "flip:1@4:weights", [0, 1], False),
}


@pytest.mark.parametrize("case", share_of(FLIPS, "activation", "once", "two"))
def test_a_rank_that_computes_wrongly_is_named_before_the_optimizer_steps(
    job: CheckpointJob, case: str
) -> None:
    num_ranks, sizes, flip, suspects, decided = FLIPS[case]
    job.set_model(num_ranks, sizes, global_batch_size=12)
    result = job.run("--moe-ft-check-iterations", "5", "--moe-ft-inject-fault", flip)
    assert EXIT_CORRUPTION in result.exit_codes and 0 not in result.exit_codes, result.output(0)
    for rank in range(num_ranks):
        (found,) = job.events("corruption", rank)
        assert (found["iteration"], found["check"]) == (4, "iteration")
        assert (found["ranks"], found["decided"]) == (suspects, decided), found["where"]
        assert not job.events("breakpoint", rank)
    (verdict,) = (each for rank in range(num_ranks) for each in job.events("verdict", rank))
    assert (verdict["kind"], verdict["ranks"]) == ("corruption", suspects)


# By case: flags of the check, and the flip. The state that a moment has damaged is not recovered.
REPLACED = {
    "computes": ("--moe-ft-check-iterations", "3", "flip:3@8:activation"),
    "holds": ("--moe-ft-check-weights", "1", "flip:3@8:moment"),
}


@pytest.mark.parametrize("case", share_of(REPLACED, "computes"))
def test_the_node_of_a_rank_with_wrong_bits_is_replaced_and_gets_no_ranks_again(
    repaired: RepairedJob, case: str
) -> None:
    *check, flip = REPLACED[case]
    with repaired.kept_nodes(*check, "--moe-ft-inject-fault", flip) as nodes:
        nodes.start("node0", "node1", "node2")
        assert nodes.wait() == dict.fromkeys(("node0", "node1", "node2"), 0), nodes.log("node0")
        log = nodes.log("node0")
    assert "node node1 is lost: rank 3 computes wrongly" in log
    for rank in range(4):
        (repair,) = repaired.events("repair", rank)
        assert repair["taken_over"] == {"node1": "node2"}
        assert repair["recovered_iteration"] == {"computes": 8, "holds": 7}[case]
        assert [each["ranks"] for each in repaired.events("corruption", rank)] == [[3]]
    assert repaired.digests() == repaired.reference()
