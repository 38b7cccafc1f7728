"""Models like DeepSeek, and sequences that ranks share, train and recover like all others."""

from functools import partial
from typing import Any

import pytest

from tests.demo_model import DEEPSEEK, INDEXER
from tests.jobs import CheckpointJob, refusal
from tests.recount import Recount
from tests.watched_replays import replays_of, train_watched

BATCH, LENGTH, TOP_K, NUM_EXPERTS = 8, 32, 2, 4
PIPELINE = {"pp": 2}
CONTEXT = {"cp": 2, "ep": 2}
TENSOR = {"tp": 2, "etp": 1}
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-router-log", "--moe-ft-interval", "2")


def set_model(job: CheckpointJob, layout: dict[str, int], *features: str, **changes: Any) -> None:
    """Make a job train a model like DeepSeek in a layout of two ranks."""
    if not features:
        features = ("--sequence-parallel",) if "tp" in layout else RECOMPUTE
    model = {**DEEPSEEK, "train_iters": 8, "global_batch_size": BATCH}
    job.set_model(2, layout, *features, **model, **changes)


def check_replay(job: CheckpointJob) -> list[str]:
    """Continue from a sparse window, check the recovery, and return the parameters frozen on rank 1."""
    job.train = partial(train_watched, str(job.folder), False)
    job.run(*SPARSE).check()
    job.train = None
    for rank in range(2):
        recovery = job.events("recovery", rank)[-1]
        assert set(recovery["sources"]) == {"memory"}
        assert recovery["replayed_iterations"] == 2
        assert recovery["target_iteration"] - recovery["restored_iteration"] == 2
        assert recovery["target_iteration"] in (4, 5, 6, 7)
    replays = replays_of(job.folder, 1)
    return [each["name"] for replay in replays for each in replay if not each["is_trained"]]


@pytest.mark.rest
@pytest.mark.parametrize("layout", [PIPELINE, CONTEXT], ids=str)
def test_deepseek_model_recovers_bit_for_bit_from_dense_and_from_sparse_snapshots(
    layout: dict[str, int], job: CheckpointJob
) -> None:
    set_model(job, layout)
    job.run("--moe-ft-inject-fault", "kill:1@2:backward")
    job.run(*SPARSE, "--moe-ft-inject-fault", "kill:0@7:before-step")
    (recovery,) = job.events("recovery", 1)
    assert set(recovery["sources"]) == {"memory"}
    assert recovery["restored_iteration"] == recovery["target_iteration"] in (1, 2)
    frozen = check_replay(job)
    attention = "self_attention.linear_kv_up_proj.weight"
    assert f"decoder.layers.1.{attention}" in frozen
    assert f"mtp.layers.0.mtp_model_layer.{attention}" in frozen
    assert "mtp.layers.0.mtp_model_layer.self_attention.q_layernorm.weight" in frozen
    assert not [
        name for name in frozen if name.startswith("embedding.")
    ]  # because of the copy in MTP
    assert job.digests() == job.reference()


@pytest.mark.rest
def test_indexer_of_sparse_attention_recovers_bit_for_bit_from_dense_and_from_sparse_snapshots(
    job: CheckpointJob,
) -> None:
    set_model(job, PIPELINE, "--calculate-per-token-loss", **INDEXER)
    job.run("--moe-ft-inject-fault", "kill:1@2:backward")
    job.run(*SPARSE, "--moe-ft-inject-fault", "kill:0@7:before-step")
    frozen = check_replay(job)
    assert "mtp.layers.0.mtp_model_layer.self_attention.linear_kv_up_proj.weight" in frozen
    # Tensor-parallel ranks average its gradients, as those of norms.
    assert not [name for name in frozen if "indexer" in name]
    assert job.digests() == job.reference()


@pytest.mark.rest
def test_norms_of_latent_attention_are_not_frozen_where_tensor_parallel_ranks_add_them_up(
    job: CheckpointJob,
) -> None:
    set_model(job, TENSOR)
    job.run(*SPARSE, "--moe-ft-inject-fault", "kill:0@7:before-step")
    frozen = check_replay(job)
    assert "mtp.layers.0.mtp_model_layer.self_attention.linear_q_down_proj.weight" in frozen
    assert not [name for name in frozen if "norm" in name or "router" in name]
    assert job.digests() == job.reference()


@pytest.mark.rest
def test_partial_snapshots_lose_what_the_routing_log_says_also_in_further_token_prediction(
    job: CheckpointJob,
) -> None:
    layers = ("layer.1", "mtp.0")
    set_model(job, CONTEXT)
    job.run_with_faults("kill:1@7:backward", flags=(*PARTIAL, "--moe-ft-k-snapshot", "1"))
    (recovery,) = job.events("recovery")
    iteration = recovery["restored_iteration"]
    counted = Recount(
        folder=job.events_dir,
        num_ranks=2,
        layers=layers,
        num_experts=NUM_EXPERTS,
        ep_size=2,
        k_snapshot=1,
    )
    counted.read(0, 0)
    per_iteration = BATCH * LENGTH * TOP_K  # once, though two ranks share each sequence
    for layer in layers:
        for at in range(1, iteration + 1):
            experts = [counted.routed[layer, expert][at] for expert in range(NUM_EXPERTS)]
            assert sum(experts) == per_iteration
    snapshots = {line["iteration"] for line in job.events("snapshot") if not line["incarnation"]}
    for at in sorted({*(each for each in snapshots if each < iteration), iteration}):
        counted.snapshot(at)
    lost = counted.recover(iteration)
    assert recovery["lost_per_expert"] == lost
    assert recovery["lost_tokens"] == sum(map(sum, lost.values())) > 0
    share = recovery["lost_tokens"] / len(layers) / (8 * per_iteration)
    assert recovery["plt"] == pytest.approx(share)


@pytest.mark.rest
def test_latent_attention_with_wrong_gradients_is_refused(
    job: CheckpointJob,
) -> None:
    set_model(job, TENSOR)
    job.base.remove("--sequence-parallel")
    assert "needs --sequence-parallel: without it Megatron's gradients are wrong" in refusal(
        job.run()
    )
