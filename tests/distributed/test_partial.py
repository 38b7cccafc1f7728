"""Partial checkpoints in the real loop: recoveries lose exactly the tokens that they report."""

import os
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel

import pretrain_gpt_moe
from moe_ft.files.storage import Storage
from tests.demo_model import event_flags
from tests.harness import digests, run_ranks
from tests.jobs import TWO_NODES, CheckpointJob
from tests.partial_runs import PARTIAL, follow, recount, taken
from tests.unit.moe_ft.builders import manifest_of


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
@pytest.mark.parametrize("selection", ["sequential", "load-aware"])
def test_lost_node_gets_its_experts_from_storage_and_the_other_from_memory(
    job: CheckpointJob, selection: str
) -> None:
    # A rank is killed first, so that training may go back to before that recovery.
    job.run_with_faults(
        "kill:0@7:backward",
        "lose-node:1@9:backward",
        flags=(
            *PARTIAL,
            *("--train-iters", "12", "--moe-ft-k-snapshot", "2", "--moe-ft-k-persist", "1"),
            *("--moe-ft-persist-interval", "2", "--moe-ft-replication-factor", "0"),
            *("--moe-ft-selection", selection, "--moe-ft-keep", "9"),
        ),
        storage=True,
        nodes=lambda start: TWO_NODES,
    )
    first, second = job.events("recovery")
    counted = recount(job, 2, is_load_aware=selection == "load-aware")
    counted.read(0, 0)
    until = first["restored_iteration"]
    for at in sorted({*taken(job.events_dir, 2, 0, until), until}):
        counted.snapshot(at)
        if at in job.stored():
            counted.persist()
    assert first["lost_per_expert"] == counted.recover(first["restored_iteration"])
    assert first["total_lost_tokens"] == counted.total
    counted.read(1, first["restored_iteration"])
    for at in taken(job.events_dir, 2, 1, 9):
        counted.snapshot(at)
        if at in job.stored() and at <= second["restored_iteration"]:
            counted.persist()
    assert set(job.events("recovery", 1)[1]["sources"]) == {"storage"}
    assert "memory" in second["sources"]
    lost = counted.recover(second["restored_iteration"], frozenset({1}))
    assert second["lost_per_expert"] == lost
    assert second["total_lost_tokens"] == counted.total


@pytest.mark.rest
def test_last_checkpoint_holds_every_expert_of_the_trained_model(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    flags = (*PARTIAL, "--moe-ft-k-snapshot", "1")
    job.run(*flags, storage=True).check()
    assert job.digests() == expected  # nothing failed, nothing changed
    # Continues from storage alone: nothing is left to train, and the state is the last one.
    job.resume(*flags, storage=True)
    assert job.recovered() == [(6, 6)]
    (recovery,) = job.events("recovery")
    assert recovery["lost_tokens"] == 0
    assert set(recovery["sources"]) == {"storage"}
    assert job.digests() == expected


@pytest.mark.rest
def test_other_first_weights_than_those_of_the_run_are_not_taken_for_them(
    job: CheckpointJob,
) -> None:
    job.run(*PARTIAL, "--moe-ft-k-snapshot", "1", "--moe-ft-inject-fault", "kill:1@5:backward")
    result = job.run(
        *PARTIAL,
        "--moe-ft-k-snapshot",
        "1",
        "--init-method-std",
        "0.05",
        "--moe-ft-on-missing",
        "fail",
    )
    assert "no intact layer.0.expert" in result.output(0)


def train_with_frozen_parts(flags: list[str]) -> None:
    """Train a model whose embedding, all experts in layer 1 and two in layer 2 stay as they are."""
    original = GPTModel.__init__

    def init(model: GPTModel, *args: Any, **kwargs: Any) -> None:
        original(model, *args, **kwargs)
        for name, parameter in model.named_parameters():
            is_frozen = name.startswith("embedding.") or "layers.1.mlp.experts." in name
            if "layers.2.mlp.experts." in name and os.environ["RANK"] == "0":
                is_frozen = True
            if is_frozen:
                parameter.requires_grad_(False)

    GPTModel.__init__ = init
    pretrain_gpt_moe.main(flags)


@pytest.mark.rest
def test_frozen_parts_are_never_saved_and_stay_what_they_were(job: CheckpointJob) -> None:
    reference = job.folder / "frozen"
    run_ranks(
        train_with_frozen_parts, 2, [*job.base, *event_flags(reference)], log_dir=reference
    ).check()
    flags = job.flags("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "4", storage=True)
    flags += ["--moe-ft-inject-fault", "kill:1@4:backward"]
    for _ in range(2):
        run_ranks(train_with_frozen_parts, 2, flags, log_dir=job.folder / "run")
    ((restored, _),) = job.recovered()
    assert restored in range(1, 5)
    recovery = job.events("recovery")[0]
    assert set(recovery["lost_per_expert"]) == {"layer.0", "layer.2", "layer.3"}
    units = manifest_of(Storage(str(job.storage)), 6).units
    assert {"layer.0.expert.0", "layer.2.expert.2"} <= set(units)
    frozen = ("embedding", "layer.1.expert.", "layer.2.expert.0", "layer.2.expert.1")
    assert not any(name.startswith(frozen) for name in units)
    assert job.digests() == digests(reference, 2)


@pytest.mark.rest
def test_fine_tuning_goes_back_to_the_loaded_weights_where_nothing_was_saved(
    job: CheckpointJob,
) -> None:
    pretrained = job.folder / "pretrained"
    save = ("--moe-ft-strategy", "none", "--save", str(pretrained), "--save-interval", "6")
    job.run(*save).check()
    job.events_dir = job.folder / "finetuned"
    tuning = ("--load", str(pretrained), "--finetune", "--moe-ft-k-snapshot", "1")
    job.run_with_faults("kill:1@5:backward", flags=(*PARTIAL, *tuning))
    (recovery,) = job.events("recovery")
    counted = recount(job, 1)
    follow(counted, 0, 0, recovery["restored_iteration"])
    assert recovery["lost_per_expert"] == counted.recover(recovery["restored_iteration"])
