"""Partial experts checkpointing in the real loop: what recoveries lose is what they say."""

import os
from dataclasses import replace
from typing import Any

import pytest
from megatron.core.models.gpt import GPTModel

import pretrain_gpt_moe
from moe_ft.cli import main
from moe_ft.engine.storage import Storage
from moe_ft.planning.model_size import ByteModel, ModelShape, stage_units
from moe_ft.planning.ownership import SavingLayout, Sharding
from moe_ft.strategies.partial.size import SavedModel
from tests.checkpoint_job import TWO_NODES, CheckpointJob, flip_byte
from tests.demo_model import RERUNS, event_flags, layout_flags, model_flags
from tests.harness import digests, run_ranks, run_with_restarts
from tests.recount import Recount
from tests.recoveries import RecoveryWatch
from tests.stalled_training import COUNTS_S, RECORD_S, train_on_slow_copies
from tests.unit.moe_ft.builders import manifest_of

LAYERS = tuple(f"layer.{number}" for number in range(4))
PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-router-log", "--moe-ft-interval", "2")


def recount(job: CheckpointJob, k: int, **rules: object) -> Recount:
    known = {"num_ranks": 2, "layers": LAYERS, "num_experts": 4, "ep_size": 2}
    return Recount(folder=job.events_dir, k_snapshot=k, **{**known, **rules})  # type: ignore[arg-type]


def taken(job: CheckpointJob, incarnation: int, until: int) -> list[int]:
    """Return the iterations of an incarnation's snapshots; a slow machine may skip some."""
    assert not [line for rank in range(2) for line in job.events("degraded", rank)]
    lines = job.events("snapshot")
    found = {line["iteration"] for line in lines if line["incarnation"] == incarnation}
    return sorted(iteration for iteration in found if iteration <= until)


def follow(counted: Recount, job: CheckpointJob, incarnation: int, after: int, until: int) -> None:
    """Let the recount see the snapshots that were complete in an incarnation.

    That of the iteration that was recovered may have left no event any more.
    """
    counted.read(incarnation, after)
    last = {until} if until > after else set()
    for iteration in sorted({*taken(job, incarnation, until), *last}):
        counted.snapshot(iteration)


# The model of tests/demo_model.py, as `plan` describes it.
DEMO = ModelShape(
    num_layers=4,
    hidden_size=64,
    num_experts=4,
    moe_layers=(0, 1, 2, 3),
    ffn_hidden_size=64,
    vocab_size=256,
    num_positions=0,
    has_output_layer=True,
    is_gated=True,
    has_bias=False,
)


def planned_bytes(layout: SavingLayout, num_stages: int = 1, **changes: Any) -> list[list[int]]:
    """Return ``[rank][snapshot]`` what `plan` says that each saves with one expert per layer."""
    shape = replace(DEMO, **changes)
    model = SavedModel(
        shape=shape,
        stages=tuple(stage_units(shape, num_stages)),
        layout=layout,
        byte_model=ByteModel(weights=0),
    )
    return [list(of_rank) for of_rank in zip(*model.plan_workload(1).rotation, strict=True)]


def saved_bytes(job: CheckpointJob, num_ranks: int, until: int) -> list[list[int]]:
    """Return ``[rank][snapshot]`` what each rank saved in the first start until an iteration."""
    return [
        [
            line["bytes"]
            for line in job.events("snapshot", rank)
            if line["incarnation"] == 0 and line["iteration"] <= until
        ]
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("selection", ["sequential", "load-aware"])
def test_killed_ranks_lose_exactly_the_tokens_that_the_routing_log_says(
    job: CheckpointJob, selection: str
) -> None:
    job.run_with_faults(
        "kill:1@7:backward",
        "kill:0@11:forward",
        flags=(
            *PARTIAL,
            *("--train-iters", "14", "--moe-ft-k-snapshot", "1"),
            *("--moe-ft-selection", selection),
        ),
    )
    counted = recount(job, 1, is_load_aware=selection == "load-aware")
    after = 0
    for incarnation, recovery in enumerate(job.events("recovery")):
        iteration = recovery["restored_iteration"]
        assert set(recovery["sources"]) == {"memory"}
        follow(counted, job, incarnation, after, iteration)
        lost = counted.recover(iteration)
        assert recovery["lost_per_expert"] == lost
        assert recovery["lost_tokens"] == sum(map(sum, lost.values())) > 0
        assert recovery["repeated_tokens"] == 0
        assert recovery["total_lost_tokens"] == counted.total
        planned = 14 * 16 * 32 * 2
        assert recovery["plt"] == pytest.approx(recovery["lost_tokens"] / 4 / planned)
        after = iteration
    assert 0 < after <= 10
    assert (
        job.events("recovery", 1)[0]["lost_per_expert"]
        == job.events("recovery", 0)[0]["lost_per_expert"]
    )


@pytest.mark.parametrize("selection", ["sequential", "load-aware"])
def test_lost_node_gets_its_experts_from_storage_and_the_other_from_memory(
    job: CheckpointJob, selection: str
) -> None:
    # After a killed rank, so that training may go back to before that recovery.
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
    for at in sorted({*taken(job, 0, first["restored_iteration"]), first["restored_iteration"]}):
        counted.snapshot(at)
        if at in job.stored():
            counted.persist()
    assert first["lost_per_expert"] == counted.recover(first["restored_iteration"])
    assert first["total_lost_tokens"] == counted.total
    counted.read(1, first["restored_iteration"])
    for at in taken(job, 1, 9):
        counted.snapshot(at)
        if at in job.stored() and at <= second["restored_iteration"]:
            counted.persist()
    assert set(job.events("recovery", 1)[1]["sources"]) == {"storage"}
    assert "memory" in second["sources"]
    lost = counted.recover(second["restored_iteration"], frozenset({1}))
    assert second["lost_per_expert"] == lost
    assert second["total_lost_tokens"] == counted.total


def test_all_experts_in_every_snapshot_lose_nothing_and_recover_bitwise(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    job.run_with_faults(
        "kill:1@4:backward",
        flags=("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "4"),
    )
    (recovery,) = job.events("recovery")
    assert recovery["lost_tokens"] == 0
    assert job.digests() == expected


def test_last_checkpoint_holds_every_expert_of_the_trained_model(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    flags = (*PARTIAL, "--moe-ft-k-snapshot", "1")
    job.run(*flags, storage=True).check()
    assert job.digests() == expected  # nothing failed, nothing changed
    # Goes on from storage alone: nothing is left to train, and the state is that of the end.
    job.resume(*flags, storage=True)
    assert job.recovered() == [(6, 6)]
    (recovery,) = job.events("recovery")
    assert recovery["lost_tokens"] == 0
    assert set(recovery["sources"]) == {"storage"}
    assert job.digests() == expected


@pytest.mark.parametrize("sharding", ["none", "equal", "adaptive"])
def test_replicated_state_is_saved_and_recovered_however_it_is_divided(
    dataset_flags: list[str], job: CheckpointJob, sharding: str
) -> None:
    job.base = [flag for flag in job.base if flag != "--use-distributed-optimizer"]
    job.run_with_faults(
        "kill:1@7:backward",
        flags=(
            *PARTIAL,
            *("--train-iters", "8", "--moe-ft-k-snapshot", "1", "--moe-ft-sharding", sharding),
            *(
                "--num-layers",
                "3",
                "--moe-ft-persist-interval",
                "1",
            ),  # odd: one rank has more experts
        ),
        storage=True,
    )
    assert job.stored()[-1] == 8
    (recovery,) = job.events("recovery")
    counted = recount(job, 1, layers=LAYERS[:3])
    follow(counted, job, 0, 0, recovery["restored_iteration"])
    assert recovery["lost_per_expert"] == counted.recover(recovery["restored_iteration"])
    layout = SavingLayout(dp=2, ep=2, sharding=Sharding(sharding), is_optimizer_distributed=False)
    planned = planned_bytes(layout, num_layers=3, moe_layers=(0, 1, 2))
    assert saved_bytes(job, 2, 6) == [of_rank[:3] for of_rank in planned]


def test_peers_keep_experts_that_were_saved_long_ago(job: CheckpointJob) -> None:
    job.run_with_faults(
        "lose-node:1@9:backward",
        flags=(*PARTIAL, "--train-iters", "10", "--moe-ft-k-snapshot", "1"),
        storage=True,
        nodes=lambda start: TWO_NODES,
    )
    (recovery,) = job.events("recovery", 1)
    iteration = recovery["restored_iteration"]
    assert set(recovery["sources"]) == {"peer"}
    assert not [line for rank in range(2) for line in job.events("degraded", rank)]
    counted = recount(job, 1)
    follow(counted, job, 0, 0, iteration)
    assert recovery["lost_per_expert"] == counted.recover(iteration)


def test_dynamic_k_doubles_after_recoveries_and_survives_them(job: CheckpointJob) -> None:
    job.run_with_faults(
        "kill:1@5:backward",
        "kill:0@9:backward",
        flags=(
            *PARTIAL,
            *("--train-iters", "12", "--moe-ft-k-snapshot", "1", "--moe-ft-dynamic-k"),
            *("--moe-ft-plt-limit", "0.33"),  # of so short a run, one failure is a large part
        ),
    )
    assert [line["k_snapshot"] for line in job.events("recovery")] == [2, 4]
    assert [line["k_persist"] for line in job.events("recovery")] == [2, 4]


def test_copies_that_training_waits_for_are_counted_as_stalls(job: CheckpointJob) -> None:
    flags = job.flags(*PARTIAL, "--train-iters", "2")  # a snapshot of the second
    train_on_slow_copies(flags, 2, log_dir=job.folder / "slow").check()
    stalls = [line["stall_s"] for line in job.events("iteration")]
    assert stalls == [COUNTS_S, COUNTS_S + RECORD_S]


def killed_with_storage(job: CheckpointJob, keep: int) -> None:
    """Leave what a killed job leaves: memory, and checkpoints whose experts are in several of them."""
    job.run(
        *PARTIAL,
        *("--train-iters", "12", "--moe-ft-k-snapshot", "2", "--moe-ft-keep", str(keep)),
        *("--moe-ft-persist-interval", "1", "--moe-ft-inject-fault", "kill:1@11:backward"),
        storage=True,
    )


def test_commands_show_versions_of_experts_and_check_older_files(
    job: CheckpointJob, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_with_storage(job, keep=1)
    storage = str(job.storage)
    assert main(["inspect", storage]) == 0
    text = capsys.readouterr().out
    assert "recoveries so far have lost 0 tokens, PLT 0.000 %; one from here loses" in text
    assert main(["verify", storage]) == 0
    assert main(["verify", str(job.memory_dir / "test")]) == 0
    # One checkpoint is kept; what it needs of older ones is there, and checked.
    (newest,) = job.stored()
    older = [
        path
        for path in job.storage.glob("iter_*/rank_*.safetensors")
        if path.parent.name != f"iter_{newest:07d}"
    ]
    assert older
    flip_byte(older[0], -100)
    capsys.readouterr()
    assert main(["verify", storage]) == 1
    assert "does not match its checksum" in capsys.readouterr().out


def test_report_shows_each_recovery_with_its_losses(
    job: CheckpointJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job.run_with_faults("kill:1@5:backward", flags=(*PARTIAL, "--moe-ft-k-snapshot", "1"))
    (recovery,) = job.events("recovery")
    assert main(["report", str(job.events_dir)]) == 0
    text = capsys.readouterr().out
    assert "lost tokens" in text
    assert f"{100 * recovery['plt']:.3f}" in text
    assert "loss of 5 before" in text


def test_damaged_expert_falls_back_to_its_older_version_and_the_loss_says_so(
    job: CheckpointJob,
) -> None:
    killed_with_storage(job, keep=9)
    stored = job.stored()
    for pool in job.memory_dir.rglob("rank_00000/pool_*.safetensors"):
        content = pool.read_bytes()
        pool.write_bytes(content[:4096] + bytes(len(content) - 4096))
    job.resume(*PARTIAL, "--train-iters", "12", "--moe-ft-k-snapshot", "2", storage=True)
    (recovery,) = job.events("recovery")
    assert set(recovery["sources"]) == {"memory", "storage"}
    assert any("does not match its checksum" in problem for problem in recovery["problems"])
    counted = recount(job, 2)
    counted.read(0, 0)
    until = recovery["restored_iteration"]
    for at in sorted({*taken(job, 0, until), until}):
        counted.snapshot(at)
        if at in stored:
            counted.persist()
    lost = counted.recover(recovery["restored_iteration"], frozenset({0}))
    assert recovery["lost_per_expert"] == lost


def test_experts_that_were_never_saved_keep_the_weights_that_the_run_began_with(
    job: CheckpointJob,
) -> None:
    # Two snapshots hold two experts of four in each layer; the others were not saved yet.
    job.run_with_faults(
        "kill:1@5:backward",
        flags=(*PARTIAL, "--moe-ft-k-snapshot", "1", "--moe-ft-state-digest-interval", "1"),
    )
    (recovery,) = job.events("recovery")
    counted = recount(job, 1)
    follow(counted, job, 0, 0, recovery["restored_iteration"])
    assert recovery["lost_per_expert"] == counted.recover(recovery["restored_iteration"])


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


def test_router_load_counts_each_processed_token_once(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    def counts(name: str, *flags: str) -> list[dict[str, list[int]]]:
        job.events_dir = job.folder / name
        job.run("--moe-ft-strategy", "none", "--moe-ft-router-log", "--train-iters", "2", *flags)
        return [line["tokens"] for rank in range(2) for line in job.events("router_load", rank)]

    plain = counts("plain")
    assert len(plain) == 4
    for tokens in plain:
        assert [sum(tokens[layer]) for layer in LAYERS] == [16 // 2 * 32 * 2] * 4
    # Layers compute forward twice, and Megatron runs all iterations but the first one twice.
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    repeated = counts("repeated", *recompute, "--recompute-num-layers", "1", *RERUNS)
    assert repeated == plain
    capacity = ("--moe-expert-capacity-factor", "0.5")
    dropped = counts("dropped", *capacity)
    assert all(sum(tokens["layer.0"]) < 16 // 2 * 32 * 2 for tokens in dropped)
    padded = counts("padded", *capacity, "--moe-pad-expert-input-to-capacity")
    assert padded[0] == dropped[0]


@pytest.mark.parametrize(
    ("layout", "is_sharded"),
    [
        ({"pp": 2, "ep": 2}, True),
        ({"ep": 2}, True),
        ({"ep": 2}, False),  # two ranks hold each expert and share its parts
        ({"tp": 2, "ep": 2}, True),
    ],
)
def test_layouts_count_the_tokens_of_each_stage(
    dataset_flags: list[str], job: CheckpointJob, layout: dict[str, int], is_sharded: bool
) -> None:
    num_ranks = 4
    extra = ["--sequence-parallel"] if "tp" in layout else []
    optimizer = {} if is_sharded else {"use_distributed_optimizer": False}
    # Without stages an odd number, so that ranks which share an expert do not save as much of each.
    num_layers = 4 if "pp" in layout else 3
    layers = LAYERS[:num_layers]
    base = [
        *model_flags(train_iters=8, hidden_dropout=0.1, num_layers=num_layers, **optimizer),
        *layout_flags(layout),
        *extra,
        *dataset_flags,
    ]
    flags = [*job.flags(*PARTIAL, "--moe-ft-k-snapshot", "1")[len(job.base) :], *base]
    at = 7 if is_sharded else 5  # when some experts were never saved yet
    flags += ["--moe-ft-inject-fault", f"kill:3@{at}:backward", "--moe-ft-sharding", "adaptive"]
    watch = RecoveryWatch(job.events_dir, num_ranks, job.memory_dir / "test")
    results = run_with_restarts(
        flags, num_ranks, log_dir=job.folder, max_restarts=2, between=watch.look
    )
    results[-1].check()
    watch.check(len(results))
    warning = "--moe-ft-sharding=adaptive changes nothing with --use-distributed-optimizer"
    assert (warning in results[0].output(0)) == is_sharded
    (recovery,) = job.events("recovery")
    stages = [layers[:2], layers[2:]] if "pp" in layout else [layers]
    lost: dict[str, list[int]] = {}
    for of_stage in stages:
        counted = recount(job, 1, num_ranks=num_ranks, layers=of_stage)
        follow(counted, job, 0, 0, recovery["restored_iteration"])
        lost.update(counted.recover(recovery["restored_iteration"]))
    assert recovery["lost_per_expert"] == lost
    assert recovery["lost_tokens"] == sum(map(sum, lost.values())) > 0
    if "tp" not in layout:
        num_stages = layout.get("pp", 1)
        saving = SavingLayout(
            dp=4 // num_stages,
            ep=2,
            sharding=Sharding.ADAPTIVE,
            is_optimizer_distributed=is_sharded,
        )
        planned = planned_bytes(
            saving, num_stages, num_layers=num_layers, moe_layers=tuple(range(num_layers))
        )
        assert saved_bytes(job, num_ranks, 4) == [of_rank[:2] for of_rank in planned]


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
    follow(counted, job, 0, 0, recovery["restored_iteration"])
    assert recovery["lost_per_expert"] == counted.recover(recovery["restored_iteration"])


@pytest.mark.parametrize(
    "covers",
    [
        ("--moe-ft-partial-covers", "weights"),
        ("--moe-ft-partial-covers", "optimizer"),
        ("--moe-ft-master-always-full",),
    ],
)
def test_part_of_an_expert_that_is_always_saved_does_not_rotate(
    job: CheckpointJob, covers: tuple[str, ...]
) -> None:
    job.run_with_faults(
        "kill:1@5:backward",
        flags=(*PARTIAL, *covers, "--moe-ft-k-snapshot", "1"),
        storage=True,
    )
    (recovery,) = job.events("recovery")
    counted = recount(job, 1)
    follow(counted, job, 0, 0, recovery["restored_iteration"])
    assert recovery["lost_per_expert"] == counted.recover(recovery["restored_iteration"])
    units = manifest_of(Storage(str(job.storage)), 6).units
    assert {"layer.0.expert.0.weights", "layer.0.expert.0.moments"} <= set(units)


def test_automatic_k_takes_as_many_experts_as_forward_and_backward_hide(
    job: CheckpointJob,
) -> None:
    job.run_with_faults(
        "kill:1@38:backward",
        flags=("--moe-ft-strategy", "partial", "--train-iters", "40"),
    )
    changes = job.events("strategy")
    assert changes[0]["k_snapshot"] > 1  # this model is copied in no time
    assert all(1 <= line["k_snapshot"] <= 4 for line in changes)
    assert job.events("recovery")[0]["k_snapshot"] == changes[0]["k_snapshot"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--moe-ft-strategy", "dense"),
            "--moe-ft-strategy=dense cannot continue from",
        ),
        (
            (*PARTIAL, "--moe-ft-k-snapshot", "1", "--moe-ft-partial-covers", "optimizer"),
            "holds experts that are divided otherwise: '--moe-ft-partial-covers both' there",
        ),
    ],
)
def test_start_that_cannot_use_what_partial_snapshots_left_says_so(
    job: CheckpointJob, flags: tuple[str, ...], message: str
) -> None:
    job.run(*PARTIAL, "--moe-ft-k-snapshot", "1", "--moe-ft-inject-fault", "kill:1@5:backward")
    result = job.run(*flags)
    assert result.exit_codes[0] == 2
    assert message in " ".join(result.output(0).split())
    # Nothing was touched: with the flags of the run it goes on.
    job.resume(*PARTIAL, "--moe-ft-k-snapshot", "1")


def test_crashes_before_the_first_new_snapshot_lose_nothing_more(job: CheckpointJob) -> None:
    # Rank 1 dies while it takes a snapshot that rank 0 completes; then both die again and again.
    job.run_with_faults(
        "kill:1@8:snapshot",
        "kill:0@7:backward",
        "kill:1@6:backward",
        flags=(*PARTIAL, "--train-iters", "10", "--moe-ft-k-snapshot", "1"),
    )
    recoveries = job.events("recovery")
    assert len(recoveries) == 3
    assert len(set(job.recovered())) == 1
    counted = recount(job, 1)
    follow(counted, job, 0, 0, recoveries[0]["restored_iteration"])
    most = sum(map(sum, counted.recover(recoveries[0]["restored_iteration"]).values()))
    assert all(line["total_lost_tokens"] <= most for line in recoveries)
    assert recoveries[0]["total_lost_tokens"] == recoveries[2]["total_lost_tokens"]


def test_cuda_graphs_that_run_no_router_hooks_are_refused(job: CheckpointJob) -> None:
    result = job.run("--moe-ft-strategy", "partial", "--cuda-graph-impl", "local")
    assert result.exit_codes[0] == 2
    assert "--cuda-graph-impl=local is not supported with --moe-ft-strategy=partial" in (
        result.output(0)
    )
