"""Models of DeepSeek's kind, and sequences that ranks share: they train and recover as all others."""

import pytest

from tests.checkpoint_job import CheckpointJob
from tests.demo_model import deepseek_flags, layout_flags
from tests.distributed.conftest import Reference
from tests.recount import Recount

PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-router-log", "--moe-ft-interval", "2")
LAYOUTS = {
    "pp": {"pp": 2, "ep": 1},
    "cp": {"cp": 2, "ep": 2},
    "tp": {"tp": 2, "etp": 1},
}


def taken(job: CheckpointJob, until: int) -> list[int]:
    """Return the iterations of the snapshots in the first start."""
    found = {line["iteration"] for line in job.events("snapshot") if line["incarnation"] == 0}
    return sorted(iteration for iteration in found if iteration <= until)


@pytest.mark.parametrize("name", LAYOUTS)
def test_deepseek_model_recovers_bit_for_bit_from_dense_and_from_sparse_snapshots(
    name: str, job: CheckpointJob, dataset_flags: list[str], reference: Reference
) -> None:
    features = ["--sequence-parallel"] if name == "tp" else []
    model = deepseek_flags(train_iters=8, hidden_dropout=0.1)
    job.base = [*model, *layout_flags(LAYOUTS[name]), *features, *dataset_flags]
    job.run("--moe-ft-inject-fault", "kill:1@2:backward")
    sparse = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
    job.run(*sparse, "--moe-ft-inject-fault", "kill:0@7:before-step")
    job.run(*sparse).check()
    for rank in range(2):
        dense, replayed = job.events("recovery", rank)
        assert set(dense["sources"]) == set(replayed["sources"]) == {"memory"}
        assert dense["restored_iteration"] == dense["target_iteration"] in (1, 2)
        assert replayed["replayed_iterations"] == 2
        assert replayed["restored_iteration"] >= 3
    assert job.digests() == reference(job.base, 2)


def test_partial_snapshots_of_a_deepseek_model_lose_what_the_routing_log_says(
    job: CheckpointJob, dataset_flags: list[str]
) -> None:
    layers = ("layer.1", "mtp.0")
    model = deepseek_flags(train_iters=8, hidden_dropout=0.1)
    job.base = [*model, *layout_flags(LAYOUTS["cp"]), *dataset_flags]
    job.run_with_faults("kill:1@7:backward", flags=(*PARTIAL, "--moe-ft-k-snapshot", "1"))
    (recovery,) = job.events("recovery")
    iteration = recovery["restored_iteration"]
    counted = Recount(
        folder=job.events_dir, num_ranks=2, layers=layers, num_experts=4, ep_size=2, k_snapshot=1
    )
    counted.read(0, 0)
    # Each rank routes its half of a sequence.
    for layer in layers:
        for at in range(1, iteration + 1):
            routed = sum(counted.routed[layer, expert][at] for expert in range(4))
            assert routed == 16 * 32 * 2
    for at in sorted({*taken(job, iteration), iteration}):
        counted.snapshot(at)
    lost = counted.recover(iteration)
    assert recovery["lost_per_expert"] == lost
    assert recovery["lost_tokens"] == sum(map(sum, lost.values())) > 0
    assert recovery["plt"] == pytest.approx(recovery["lost_tokens"] / 2 / (8 * 16 * 32 * 2))
