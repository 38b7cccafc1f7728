"""The boundary log keeps what a replay from the newest complete window needs, and in the memory for it."""

from pathlib import Path

import pytest

from moe_ft.engine.boundary.reading import open_log
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.restored import Handover
from tests.unit.moe_ft.engine.boundary.logs import TRAFFIC, sends_of
from tests.unit.moe_ft.engine.engine_job import Job, Rank, Setup

WINDOWS = [(1, 1), (1, 4), (2, 1), (3, 1), (3, 2)]


def train(job: Job, iteration: int) -> None:
    """Run an iteration: the state goes from it to the next one."""
    (rank,) = job.ranks
    assert rank.engine.boundary is not None
    rank.engine.boundary.begin(iteration)
    for each in list(sends_of(iteration))[: TRAFFIC.num_sends(0)]:
        rank.engine.boundary.record(*each)
    job.before_step()
    rank.engine.boundary.end()
    job.end_iteration(iteration + 1)


def logged(rank: Rank) -> set[int]:
    found, problems = open_log(own_directory(rank.node_dir, rank.rank))
    assert not problems
    return set(found)


@pytest.mark.parametrize(("window", "interval"), WINDOWS)
def test_every_iteration_since_the_newest_complete_window_is_in_the_log(
    tmp_path: Path, window: int, interval: int
) -> None:
    job = Job(tmp_path, Setup(window=window, interval=interval, traffic=TRAFFIC))
    (rank,) = job.ranks
    num_complete = 0
    for iteration in range(20):
        train(job, iteration)
        indexes = [each for each in rank.indexes() if each.is_whole]
        # The newest one may not be known to be complete yet; the log reaches back further then.
        for index in indexes[-1:]:
            first = index.iteration - index.num_snapshots + 1
            assert logged(rank) >= set(range(first, iteration + 1))
            num_complete += 1
    assert num_complete > 5
    assert rank.reasons() == []
    job.close()


def test_window_that_stays_incomplete_costs_the_oldest_logs_and_says_so(tmp_path: Path) -> None:
    job = Job(tmp_path, Setup(traffic=TRAFFIC))
    (rank,) = job.ranks
    for iteration in range(3):
        train(job, iteration)
    rank.workers["snapshot"].is_eager = False
    for iteration in range(3, 8):
        train(job, iteration)
    ((part, reason),) = rank.reasons()
    assert part == "boundary-log"
    assert "no window was completed in time: the log of iteration 3 is overwritten" in reason
    assert logged(rank) == {4, 5, 6, 7}
    job.close()


def test_log_of_the_first_iteration_is_no_loss_since_it_has_no_state(tmp_path: Path) -> None:
    job = Job(tmp_path, Setup(traffic=TRAFFIC))
    (rank,) = job.ranks
    rank.workers["snapshot"].is_eager = False
    for iteration in range(5):
        train(job, iteration)
    assert logged(rank) == {1, 2, 3, 4}
    assert rank.reasons() == []
    job.close()


def test_logs_between_a_local_recovery_and_the_next_window_are_no_loss(tmp_path: Path) -> None:
    """There is no room for all of them where the interval is long, and no recovery needs them."""
    setup = Setup(interval=8, traffic=TRAFFIC)
    first = Job(tmp_path, setup)
    for iteration in range(15):
        train(first, iteration)
    (index,) = first.ranks[0].indexes()
    first.close()
    job = Job(tmp_path, setup, is_started=False)
    (rank,) = job.ranks
    given = Handover(
        indexes=frozenset(),
        rotating={},
        persisted_index="",
        family=(index.iteration, -1, index.identity.start),
        replay_from=index.iteration,
        needs_breakpoint=True,
    )
    rank.engine.start(15, given)
    for iteration in range(15, 25):
        train(job, iteration)
        newest = rank.indexes()[-1].iteration
        needed = range(8, 15) if newest == index.iteration else range(newest, iteration + 1)
        assert logged(rank) >= set(needed)
    assert newest == 23
    assert rank.reasons("skipped") == rank.reasons() == []
    job.close()


def test_memory_of_the_log_is_removed_with_the_rest(tmp_path: Path) -> None:
    job = Job(tmp_path, Setup(traffic=TRAFFIC))
    (rank,) = job.ranks
    for iteration in range(4):
        train(job, iteration)
    job.close()
    assert list(own_directory(rank.node_dir, 0).glob("boundary_*"))
    rank.engine.remove_memory()
    assert not rank.node_dir.exists()
