"""The engine of one rank and of several: seams, memory after them, storage, and the end of training."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from moe_ft.engine.ending import LastState
from moe_ft.engine.memory.regions import Role
from moe_ft.engine.snapshots.windows import FENCE_DEADLINE_S
from moe_ft.errors import DegradedError
from moe_ft.faults import Phase
from moe_ft.files.patience import excused_until_s
from tests.unit.moe_ft.engine.engine_job import RECORD_S, MakeJob, Rank
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations


def fail_at(phase: Phase, iteration: int) -> Callable[[Phase, int], None]:
    def hook(at: Phase, current: int) -> None:
        if (at, current) == (phase, iteration):
            raise RuntimeError("it breaks here")

    return hook


def take_a_while(rank: Rank, phase: Phase, iteration: int) -> None:
    rank.clock.now += 0.5 + rank.rank


# Snapshots that are due


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_snapshots_are_taken_at_the_interval_on_all_ranks(
    make_job: MakeJob, num_ranks: int, interval: int
) -> None:
    job = make_job(num_ranks=num_ranks, interval=interval)
    job.run(range(1, 8))
    for rank in job.ranks:
        taken = [each.iteration for each in rank.events("snapshot")]
        assert taken == list(range(interval, 8, interval))
        assert rank.reasons() == []


def test_regions_hold_the_newest_two_states_bit_for_bit(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2)
    job.run(range(1, 6))
    for rank in job.ranks:
        assert [index.iteration for index in rank.indexes()] == [4, 5]


def test_index_has_the_record_of_its_state(make_job: MakeJob) -> None:
    job = make_job()
    job.run(range(1, 4))
    (rank,) = job.ranks
    (record,) = rank.indexes()[-1].records
    assert (record.iteration, record.scheduler) == (3, {"num_steps": 3})
    assert rank.completed == [1, 2, 3]


def test_state_changes_only_after_the_fence(make_job: MakeJob) -> None:
    job = make_job()
    (rank,) = job.ranks
    rank.workers["snapshot"].is_eager = False
    job.run([1])
    rank.workers["snapshot"].work()
    job.run([2])
    assert [index.iteration for index in rank.indexes()] == [1]


def test_time_of_the_record_and_of_the_fence_is_the_stall(make_job: MakeJob) -> None:
    job = make_job(interval=2)
    (rank,) = job.ranks
    job.before_step()
    assert job.end_iteration(1) == [0.0]
    rank.workers["snapshot"].is_eager = False
    job.before_step()
    assert job.end_iteration(2) == [RECORD_S]
    job.before_step()  # in vain
    assert job.end_iteration(3) == [FENCE_DEADLINE_S]


def test_automatic_interval_begins_with_iterations_without_snapshots(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, interval=None)
    for rank in job.ranks:
        rank.hook = partial(take_a_while, rank)
    job.run(range(1, 12))
    for rank in job.ranks:
        assert rank.events("snapshot")[0].iteration == 5
    intervals = [[each.fields for each in rank.events("interval")] for rank in job.ranks]
    assert intervals[0]
    assert intervals[0] == intervals[1]


# The fence and snapshots that are late


def test_fence_does_not_wait_for_a_snapshot_that_was_copied(make_job: MakeJob) -> None:
    job = make_job()
    (rank,) = job.ranks
    job.run([1])
    now = rank.clock.now
    job.before_step()
    assert rank.clock.now == now


def test_fence_excuses_the_thread_that_waits_at_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    (rank,) = job.ranks
    rank.workers["snapshot"].is_eager = False
    job.run([1])
    excused: list[bool] = []

    def wait(event: threading.Event, timeout_s: float) -> bool:
        end_s = excused_until_s(threading.get_ident())
        excused.append(end_s > time.monotonic() + FENCE_DEADLINE_S / 2)
        return False

    monkeypatch.setattr(rank.clock, "wait", wait)
    job.before_step()
    assert excused == [True]


def test_snapshot_whose_copy_outlasts_the_fence_is_never_committed(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2)
    job.run([1])
    slow = job.ranks[0]
    slow.workers["snapshot"].is_eager = False
    job.run([2, 3])
    assert slow.reasons("skipped")[-1] == ("snapshot", "the last one is not complete")
    slow.workers["snapshot"].work()
    assert [index.iteration for index in slow.indexes()] == [1]
    slow.workers["snapshot"].is_eager = True
    job.run([4, 5])
    assert slow.reasons() == [
        ("snapshot", "SnapshotError: the copy took longer than the fence waits")
    ]
    assert job.ranks[1].reasons() == [("snapshot", "another rank has none")]
    for rank in job.ranks:
        assert rank.indexes()[-1].iteration == 5


def test_snapshot_that_is_due_before_the_last_is_complete_is_skipped_on_all_ranks(
    make_job: MakeJob,
) -> None:
    job = make_job(num_ranks=2, has_peers=True)
    sender = job.ranks[1].workers["replicate"]
    sender.is_eager = False
    job.run([1, 2])
    sender.work()
    job.run([3])
    for rank in job.ranks:
        assert rank.reasons("skipped") == [("snapshot", "the last one is not complete")]
        assert [each.iteration for each in rank.events("snapshot")] == [1, 3]


# Snapshots that fail


def test_copy_that_fails_on_one_rank_fails_on_all_and_the_state_before_stays(
    make_job: MakeJob,
) -> None:
    job = make_job(num_ranks=3)
    job.ranks[1].hook = fail_at(Phase.SNAPSHOT, 3)
    job.run(range(1, 4))
    assert all(2 in [index.iteration for index in rank.indexes()] for rank in job.ranks)
    job.run([4])
    assert job.ranks[1].reasons() == [("snapshot", "RuntimeError: it breaks here")]
    assert job.ranks[0].reasons() == [("snapshot", "another rank has none")]
    job.run([5])
    for rank in job.ranks:
        assert [index.iteration for index in rank.indexes()] == [4, 5]


def test_record_that_cannot_be_taken_fails_the_snapshot_and_training_continues(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job()
    (rank,) = job.ranks
    with monkeypatch.context() as patch:
        patch.setattr(rank, "capture", lambda iteration: 1 // 0)
        job.run([1])
    job.run([2, 3])
    ((part, reason),) = rank.reasons()
    assert (part, reason.split(":")[0]) == ("snapshot", "ZeroDivisionError")
    assert [index.iteration for index in rank.indexes()] == [2, 3]


def test_failure_ends_training_if_the_user_wants_that(make_job: MakeJob) -> None:
    job = make_job(raises=True)
    job.ranks[0].hook = fail_at(Phase.SNAPSHOT, 1)
    job.run([1])
    with pytest.raises(DegradedError, match="iteration 1: snapshot: RuntimeError"):
        job.ranks[0].engine.drain(lambda report: None)


def test_ranks_that_cannot_agree_keep_the_last_complete_state_and_take_no_other(
    make_job: MakeJob,
) -> None:
    job = make_job(num_ranks=2)
    job.run([1, 2])
    job.meeting.end()
    job.run(range(3, 8))
    for rank in job.ranks:
        (part, reason), *_ = rank.reasons()
        assert part == "agreement"
        assert "checkpointing is off until the next start" in reason
        assert [index.iteration for index in rank.indexes()] == [1, 2]
        assert [region.role for region in rank.memory.regions].count(Role.RECOVERY) == 1
    assert [ending.is_agreed for ending in job.finish()] == [False, False]


# Windows of several snapshots


def test_window_takes_a_snapshot_in_every_iteration_and_holds_each_unit(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, window=3, interval=4)
    job.run(range(1, 8))
    for rank in job.ranks:
        assert [each.iteration for each in rank.events("snapshot")] == [4, 5, 6]
        (index,) = rank.indexes()
        assert index.is_whole
        assert [record.iteration for record in index.records] == [4, 5, 6]


def test_windows_follow_each_other_and_one_is_always_whole(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, window=3)
    for iteration in range(1, 20):
        job.run([iteration])
        for rank in job.ranks:
            assert iteration < 4 or any(index.is_whole for index in rank.indexes())


def test_window_fails_with_any_of_its_snapshots_and_the_one_before_stays(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, window=3)
    job.ranks[0].hook = fail_at(Phase.SNAPSHOT, 5)
    job.run(range(1, 7))
    for rank in job.ranks:
        whole = [index.iteration for index in rank.indexes() if index.is_whole]
        assert whole == [3]
    job.run(range(7, 12))
    for rank in job.ranks:
        assert max(index.iteration for index in rank.indexes() if index.is_whole) > 6


def test_window_begins_again_after_an_iteration_that_was_not_trained(make_job: MakeJob) -> None:
    job = make_job(window=3)
    job.run([1, 2, 4])
    (rank,) = job.ranks
    assert rank.reasons() == [
        ("snapshot", "iteration 4 does not follow 2: the window begins again")
    ]
    job.run([5, 6, 7, 8])
    assert [index.iteration for index in rank.indexes() if index.is_whole] == [7]


# Peers


def test_replicas_arrive_at_peers_and_are_those_of_the_sender(make_job: MakeJob) -> None:
    job = make_job(num_ranks=3, has_peers=True)
    job.run([1, 2])
    for rank in job.ranks:
        holder = job.ranks[(rank.rank + 1) % 3]
        regions = holder.memory.replicas[rank.rank].regions
        assert {region.iteration for region in regions} == {1, 2}
        (newest,) = [region for region in regions if region.iteration == 2]
        (own,) = [region for region in rank.memory.regions if region.iteration == 2]
        assert newest.mapping[:] == own.mapping[:]


def test_peer_that_fails_costs_protection_and_no_snapshot(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, has_peers=True)
    job.ranks[0].hook = fail_at(Phase.REPLICATE, 2)
    job.run([1, 2, 3])
    ((part, reason),) = job.ranks[0].reasons()
    assert part == "replicate"
    assert "rank 1 did not take the replica" in reason
    assert [each.iteration for each in job.ranks[0].events("snapshot")] == [1, 2, 3]


# Storage


def test_snapshots_go_to_storage_at_the_interval_and_are_complete_checkpoints(
    make_job: MakeJob,
) -> None:
    job = make_job(num_ranks=2, persist_interval=2)
    for iteration in range(1, 7):
        job.run([iteration])
        job.serve()
    assert set(complete_iterations(job.storage)) == {2, 4}
    for rank in job.ranks:
        assert [each.iteration for each in rank.events("persist")] == [2, 4]
        assert rank.reasons() == []


def test_region_that_is_being_written_is_not_overwritten(make_job: MakeJob) -> None:
    job = make_job(persist_interval=1)
    (rank,) = job.ranks
    job.run(range(1, 7))
    (region,) = [each for each in rank.memory.regions if each.role is Role.PERSIST]
    assert region.iteration == 1
    assert [index.iteration for index in rank.indexes()] == [1, 5, 6]


def test_checkpoint_that_one_rank_cannot_write_fails_on_all(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, persist_interval=1)
    job.run([1, 2])
    (region,) = [each for each in job.ranks[1].memory.regions if each.role is Role.PERSIST]
    region.index_path.unlink()
    job.ranks[1].clock.serve()
    job.run([3, 4])
    assert [part for part, _ in job.ranks[1].reasons()] == ["persist"]
    assert job.ranks[0].reasons() == [("persist", "another rank could not write its part")]
    assert complete_iterations(job.storage) == []


# The end of training


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("interval", [1, 4])
def test_last_state_is_on_storage_when_training_has_ended(
    make_job: MakeJob, num_ranks: int, interval: int
) -> None:
    job = make_job(num_ranks=num_ranks, interval=interval, persist_interval=5)
    job.run(range(1, 7))
    endings = job.finish()
    assert {ending.outcome for ending in endings} == {LastState.SAVED}
    assert all(ending.may_lose_memory(is_complete=False) for ending in endings)
    assert max(complete_iterations(job.storage)) == 6


def test_last_state_of_a_window_goes_to_storage_as_one_snapshot(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, window=3, persist_interval=5)
    job.run(range(1, 6))  # the second window has only begun
    assert {ending.outcome for ending in job.finish()} == {LastState.SAVED}
    assert complete_iterations(job.storage) == [5]


def test_storage_that_never_answers_leaves_the_last_state_in_memory(make_job: MakeJob) -> None:
    job = make_job(persist_interval=5)
    (rank,) = job.ranks
    job.run(range(1, 4))
    rank.clock.serve = lambda: None
    (ending,) = job.finish()
    assert (ending.outcome, ending.newest_in_memory) == (LastState.UNSAVED, 3)
    assert not ending.may_lose_memory(is_complete=True)
    reasons = [each.fields["reason"] for each in rank.reports if each.event == "degraded"]
    assert reasons[0] == "the writer did not finish in time"
    assert reasons[-1] == "the last state is not on storage"


def test_end_of_training_tries_again_until_storage_answers(make_job: MakeJob) -> None:
    job = make_job(persist_interval=5)
    (rank,) = job.ranks
    job.run(range(1, 4))
    serve, in_the_way = rank.clock.serve, Path(job.storage.url)
    in_the_way.write_text("no directory")

    def serve_later() -> None:
        if rank.clock.now > 10.0:
            in_the_way.unlink(missing_ok=True)
            rank.clock.serve = serve
        serve()

    rank.clock.serve = serve_later
    (ending,) = job.finish()
    assert ending.outcome is LastState.SAVED
    assert rank.clock.now > 10.0
    failed = [each for each in rank.reports if each.event == "degraded"]
    assert {each.fields["part"] for each in failed} == {"persist"}
    assert 2 <= len(failed) <= 5  # with pauses that grow
    assert complete_iterations(job.storage) == [3]


def test_training_without_storage_ends_at_once(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2)
    job.run([1, 2])
    for ending in job.finish():
        assert (ending.outcome, ending.newest_in_memory) == (LastState.NO_STORAGE, 1)


@pytest.mark.parametrize("window", [1, 3])
def test_training_that_is_to_continue_without_storage_keeps_its_last_state_in_memory(
    make_job: MakeJob, window: int
) -> None:
    job = make_job(num_ranks=2, window=window, interval=4)
    job.run([1, 2, 3])  # no window has begun
    for ending in job.finish(is_complete=False):
        assert (ending.outcome, ending.newest_in_memory) == (LastState.NO_STORAGE, 3)
    for rank in job.ranks:
        assert [each.iteration for each in rank.indexes() if each.is_whole] == [3]


def test_last_state_that_fits_nowhere_is_said_to_be_lost(make_job: MakeJob) -> None:
    job = make_job(window=3)
    (rank,) = job.ranks
    rank.hook = fail_at(Phase.SNAPSHOT, 2)
    job.run([1, 2])
    (ending,) = job.finish(is_complete=False)
    assert (ending.outcome, ending.newest_in_memory) == (LastState.NO_STORAGE, None)
    assert rank.reasons()[-1] == ("persist", "the last state is not in memory")


def test_start_without_a_single_iteration_has_nothing_to_save(make_job: MakeJob) -> None:
    job = make_job(persist_interval=1)
    (ending,) = job.finish()
    assert ending.outcome is LastState.NOTHING_NEW
    assert complete_iterations(job.storage) == []


def test_engine_that_was_closed_leaves_its_memory_until_it_is_removed(make_job: MakeJob) -> None:
    job = make_job()
    job.run([1, 2])
    (rank,) = job.ranks
    rank.engine.close()
    assert rank.workers["snapshot"].is_closed
    assert any(region.index_path.exists() for region in rank.memory.regions)
    rank.engine.remove_memory()
    assert not rank.node_dir.exists()
