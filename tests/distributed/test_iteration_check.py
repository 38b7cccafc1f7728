"""Iterations that ranks repeat for each other: nothing changes in a run, and who computes wrongly is named."""

from typing import Any

import pytest

from tests.demo_model import DEEPSEEK, RERUNS
from tests.jobs import CheckpointJob

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


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_iterations_are_all_checked_ends_with_the_same_bits(
    job: CheckpointJob, case: str
) -> None:
    num_ranks, sizes, changes, flags = CASES[case]
    job.set_model(num_ranks, sizes, *flags, **changes)
    job.run("--moe-ft-strategy", "none", *EVERY).check()
    assert job.digests() == job.reference()
    assert not job.events("corruption")
