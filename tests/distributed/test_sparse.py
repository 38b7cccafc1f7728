"""Sparse windows in the training loop: the cases that the covering array does not have."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

import pretrain_gpt_moe
from moe_ft.engine.snapshots.profile import SnapshotProfile
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.recovery.checkpointing import Checkpointing
from tests.harness import events, run_training
from tests.jobs import NUM_RANKS, CheckpointJob, refusal
from tests.watched_replays import replays_of, train_watched

SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window")
Digests = list[tuple[str, str]]


@pytest.mark.usefixtures("settled")
def test_window_is_recovered_bitwise_and_the_next_one_follows_it(
    job: CheckpointJob, expected: Digests
) -> None:
    job.train = partial(train_watched, str(job.folder), False)
    job.run_with_faults("kill:1@5:backward", flags=[*SPARSE, "2"])
    assert job.recovered() == [(3, 4)]
    assert job.digests() == expected
    # The order was made again once the first tokens were known; the recovered window has that order.
    assert job.events("window")[1]["reordered"]
    for rank in range(NUM_RANKS):
        (replay,) = replays_of(job.folder, rank)
        check_gradients(replay)
        experts = [each for each in replay if each["kind"] == "expert"]
        assert 0 < sum(each["is_trained"] for each in experts) < len(experts)


def check_gradients(replay: Sequence[dict[str, Any]]) -> None:
    """Check that all parameters but the frozen ones and experts without a token have a gradient."""
    for each in replay:
        if not each["is_trained"]:
            assert each["is_to_come"] and not each["has_gradient"], each
        elif each["kind"] != "expert":
            assert each["has_gradient"], each
        if each["is_to_come"] and each["kind"] not in ("embedding", "expert"):
            assert not each["is_trained"], each
    assert any(each["is_trained"] and each["has_gradient"] for each in replay)


@pytest.mark.rest
def test_training_that_ends_leaves_everything_at_once_on_storage(job: CheckpointJob) -> None:
    job.run(*SPARSE, "2", storage=True).check()
    last = job.stored()[-1]
    assert last == 6
    paths = (job.storage / f"iter_{last:07d}").glob("rank_*.json")
    indexes = [decode(path.read_bytes(), Index, str(path)) for path in paths]
    assert {index.window for index in indexes} == {1}
    assert {unit.iteration for index in indexes for unit in index.units.values()} == {6}


@pytest.mark.rest
@pytest.mark.parametrize(("first", "second"), [("dense", "sparse"), ("sparse", "dense")])
def test_other_strategy_goes_on_from_what_one_left(
    first: str, second: str, job: CheckpointJob, expected: Digests
) -> None:
    flags = {"sparse": (*SPARSE, "2"), "dense": ("--moe-ft-strategy", "dense")}
    fault = ("--moe-ft-inject-fault", "kill:1@4:backward")
    job.run(*flags[first], *fault)
    job.resume(*flags[second], *fault)
    assert len(job.recovered()) == 1
    assert job.digests() == expected


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_length_and_rules_of_order_may_change_with_a_start(
    job: CheckpointJob, expected: Digests
) -> None:
    faults = ("kill:1@3:backward", "kill:0@5:backward")
    flags = [word for fault in faults for word in ("--moe-ft-inject-fault", fault)]
    job.run(*SPARSE, "2", *flags)
    job.train = partial(train_watched, str(job.folder), True)
    job.run(*SPARSE, "2", *flags)  # reads a window with single experts
    job.resume(*SPARSE, "1", *flags)  # reads a window with whole modules
    assert job.recovered() == [(1, 2), (3, 4)]
    assert job.digests() == expected
    for rank in range(NUM_RANKS):
        (replay,) = replays_of(job.folder, rank)
        check_gradients(replay)
        modules: dict[str, set[bool]] = {}
        for each in replay:
            if each["kind"] == "expert":
                modules.setdefault(each["layer"], set()).add(each["is_trained"])
        assert {True} in modules.values() and {False} in modules.values()
        assert {True, False} not in modules.values()


def train_and_die_at_the_end(flags: list[str]) -> None:
    """Train to the end, and die before the memory of the job is removed."""
    finish = Checkpointing.finish

    def finish_and_die(*args: Any, **kwargs: Any) -> None:
        finish(*args, **kwargs)
        dist.barrier()  # the other rank is settled, too
        os._exit(1)

    Checkpointing.finish = finish_and_die  # type: ignore[assignment,method-assign]
    pretrain_gpt_moe.main(flags)


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_replay_behind_the_last_iteration_happens_before_training_ends(
    job: CheckpointJob, expected: Digests
) -> None:
    job.train = train_and_die_at_the_end
    job.run(*SPARSE, "2")
    job.train = None
    job.resume(*SPARSE, "2")
    assert job.recovered() == [(5, 6)]
    assert job.digests() == expected


def train_with_budgets(budgets: Sequence[tuple[int, float]], flags: list[str]) -> None:
    """Train where snapshots of at most ``bytes`` cost no time from ``iteration`` on.

    Nothing has been measured before the first of these ``(iteration, bytes)``.
    """
    num_iterations = 0
    note_iteration = SnapshotProfile.note_iteration

    def count(profile: SnapshotProfile, seconds: float) -> None:
        nonlocal num_iterations
        num_iterations += 1
        note_iteration(profile, seconds)

    def allowed(profile: SnapshotProfile) -> float | None:
        sizes = [size for start, size in budgets if start <= num_iterations]
        return sizes[-1] if sizes else None

    SnapshotProfile.note_iteration = count  # type: ignore[method-assign,assignment]
    SnapshotProfile.copied_bytes = property(allowed)  # type: ignore[assignment]
    SnapshotProfile.flow_bytes = property(allowed)  # type: ignore[assignment]
    pretrain_gpt_moe.main(flags)


@pytest.mark.rest
def test_automatic_window_takes_the_length_that_the_budget_allows(job: CheckpointJob) -> None:
    total = whole_bytes(job)
    # Enough for a little more than half of a full snapshot, later for all of it.
    job.train = partial(train_with_budgets, [(2, 0.55 * total), (9, 3.0 * total)])
    job.run(*SPARSE, "auto", "--moe-ft-max-window", "4", "--train-iters", "14").check()
    lengths = [line["length"] for line in job.events("window")]
    assert lengths[0] == 4  # nothing has been measured yet
    assert lengths[-1] == 1
    assert 2 in lengths or 3 in lengths
    assert lengths == sorted(lengths, reverse=True)


def whole_bytes(job: CheckpointJob) -> int:
    """Return the bytes of a full snapshot of the heavier rank."""
    log = job.folder / "dense_events"
    flags = job.flags("--moe-ft-event-log", str(log), "--train-iters", "2")
    run_training(flags, NUM_RANKS, log_dir=job.folder / "dense").check()
    sizes: list[int] = [events(log, rank, "snapshot")[0]["bytes"] for rank in range(NUM_RANKS)]
    return max(sizes)


@pytest.mark.rest
def test_replay_with_other_settings_is_refused_and_nothing_is_lost(
    job: CheckpointJob, expected: Digests
) -> None:
    flags = (*SPARSE, "2", "--moe-ft-inject-fault", "kill:1@4:backward")
    job.run(*flags)
    line = refusal(job.run(*flags, "--clip-grad", "0.5", "--train-iters", "5"))
    assert "--clip-grad: 1.0 there, 0.5 now" in line
    assert "--train-iters: 6 there, 5 now" in line
    assert "--exit-interval" in line
    job.resume(*flags)
    assert job.digests() == expected
