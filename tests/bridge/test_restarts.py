"""Ranks of jobs under Megatron-Bridge die, all start again, and end with the bits of a job without moe_ft."""

import pytest

from tests.bridge.jobs import EP2, EVALUATION, OVERLAP, PP2, RestartedJob, train_in_context

CHECKED = ("--moe-ft-check-iterations", "1")
DENSE = ("--moe-ft-strategy", "dense", *CHECKED)
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3", *CHECKED)
KILL = "kill:1@5:backward"
JOBS = {
    "dense": (DENSE, EP2, ()),
    "sparse": (SPARSE, EP2, ()),
    "stages": (SPARSE, PP2, ()),
    "virtual_stages": (SPARSE, {**PP2, "vpp": 2}, ()),
    "evaluations": (SPARSE, EP2, EVALUATION),
    "bf16": (SPARSE, EP2, ("mixed_precision=bf16_mixed",)),
    "overlap": (SPARSE, EP2, OVERLAP),
    "overlap_dense": (DENSE, EP2, OVERLAP),
    "batches": (DENSE, EP2, ("dataset.dataloader_type=batch",)),
    "skipped": (SPARSE, EP2, ("train.iterations_to_skip=[4]",)),
}
REST = ("batches", "overlap_dense", "virtual_stages")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.rest] * (name in REST)) for name in JOBS]
)
def test_killed_job_recovers_the_newest_state_and_ends_with_the_bits_of_a_job_without_moe_ft(
    restarted: RestartedJob, name: str
) -> None:
    strategy, layout, overrides = JOBS[name]
    restarted.set_model(2, layout, *overrides)
    results = restarted.run_with_faults(KILL, flags=strategy)
    assert len(results) == 2
    assert restarted.digests() == restarted.reference()


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DENSE, marks=pytest.mark.rest, id="dense"),
        pytest.param(SPARSE, id="sparse"),
    ],
)
def test_newer_state_than_that_which_bridge_has_saved_and_loads_is_recovered(
    restarted: RestartedJob, strategy: tuple[str, ...]
) -> None:
    saved = restarted.folder / "saved"
    restarted.set_model(
        2,
        EP2,
        "checkpoint.save_interval=3",
        *(f"checkpoint.{name}={saved}" for name in ("save", "load")),
    )
    restarted.run_with_faults(KILL, flags=strategy)
    assert (saved / "iter_0000006").is_dir()
    restarted.set_model(2, EP2)
    assert restarted.digests() == restarted.reference()


def test_script_that_protects_itself_ends_with_the_bits_of_one_without_moe_ft(
    restarted: RestartedJob,
) -> None:
    restarted.train = train_in_context
    restarted.run(storage=True).check()
    assert restarted.digests() == restarted.reference()
    # From storage: nothing is left to train.
    restarted.resume(storage=True)
    assert restarted.recovered() == [(8, 8)]


def test_partial_checkpoints_lose_the_tokens_that_they_count(restarted: RestartedJob) -> None:
    restarted.run_with_faults(
        KILL, flags=("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1")
    )
    (recovery,) = restarted.events("recovery")
    assert recovery["total_lost_tokens"] > 0
    assert restarted.digests() != restarted.reference()
