"""Multi-token prediction on a stage between the first and the last survives failures bit for bit."""

from pathlib import Path

import pytest

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, events, run_with_restarts
from tests.references import References

NUM_RANKS = 3
LAYOUT = ("--pipeline-model-parallel-layout", "Ett|ttm|L", "--mtp-num-layers", "1")
STRATEGIES = {
    "dense": ["--moe-ft-interval", "2"],
    "sparse": ["--moe-ft-window", "2"],
    "partial": ["--moe-ft-k-snapshot", "4"],  # all experts: nothing is lost
}


@pytest.fixture(scope="module")
def flags(dataset_flags: list[str]) -> list[str]:
    """Return the flags of a job with a copy of the embedding on each of its three stages."""
    model = model_flags(
        untie_embeddings_and_output_weights=False, train_iters=6, hidden_dropout=0.1
    )
    return [*model, *layout_flags({"pp": NUM_RANKS}), *LAYOUT, *dataset_flags]


@pytest.mark.rest
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_mtp_stage_is_recovered(
    strategy: str,
    flags: list[str],
    references: References,
    tmp_path: Path,
    memory_dir: Path,
) -> None:
    job = [
        *flags,
        *event_flags(tmp_path),
        *("--moe-ft-strategy", strategy, *STRATEGIES[strategy]),
        *("--moe-ft-job-id", "test", "--moe-ft-memory-dir", str(memory_dir)),
        *("--moe-ft-inject-fault", "kill:1@5:before-step"),
    ]
    results = run_with_restarts(job, NUM_RANKS, log_dir=tmp_path, max_restarts=1)
    results[-1].check()
    assert events(tmp_path, 1, "recovery")[0]["restored_iteration"] >= 2
    assert digests(tmp_path, NUM_RANKS) == references.digests(flags, NUM_RANKS)
