"""Multi-token prediction on a stage between the first and the last survives failures bit for bit."""

import pytest

from tests.jobs import CheckpointJob

LAYOUT = ("--pipeline-model-parallel-layout", "Ett|ttm|L", "--mtp-num-layers", "1")
STRATEGIES = {
    "dense": ["--moe-ft-interval", "2"],
    "sparse": ["--moe-ft-window", "2"],
    "partial": ["--moe-ft-k-snapshot", "4"],  # all experts: nothing is lost
}


@pytest.mark.rest
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_killed_mtp_stage_is_recovered(strategy: str, job: CheckpointJob) -> None:
    # Each of the three stages has a copy of the embedding.
    job.set_model(3, {"pp": 3}, *LAYOUT, untie_embeddings_and_output_weights=False)
    own = ("--moe-ft-strategy", strategy, *STRATEGIES[strategy])
    job.run_with_faults("kill:1@5:before-step", flags=own)
    assert job.events("recovery", 1)[0]["restored_iteration"] >= 2
    assert job.digests() == job.reference()
