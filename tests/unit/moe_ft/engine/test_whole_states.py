"""The engine with --moe-ft-persist-dense-interval: whole states on storage among windows."""

import pytest

from moe_ft.engine.ending import LastState
from moe_ft.faults import Phase
from moe_ft.units import Level
from tests.unit.moe_ft.builders import WINDOW_UNITS, manifest_of
from tests.unit.moe_ft.engine.engine_job import Job, MakeJob
from tests.unit.moe_ft.engine.persist.checkpoints import complete_iterations


def train(job: Job, num_iterations: int) -> dict[int, int]:
    """Train with writers that keep up; return the windows of the checkpoints, by iteration."""
    found: dict[int, int] = {}
    for iteration in range(1, num_iterations + 1):
        job.run([iteration])
        job.serve()
        for each in complete_iterations(job.storage):
            found[each] = manifest_of(job.storage, each).window
    return found


@pytest.mark.parametrize("window", [1, 3])
def test_whole_states_alone_go_to_storage_at_their_interval(make_job: MakeJob, window: int) -> None:
    job = make_job(num_ranks=2, window=window, dense_interval=4)
    assert train(job, 15) == dict.fromkeys([4, 8, 12], 1)
    for rank in job.ranks:
        assert rank.reasons() == rank.reasons("skipped") == []


def test_windows_and_whole_states_go_to_storage_side_by_side(make_job: MakeJob) -> None:
    found = train(make_job(num_ranks=2, window=3, persist_interval=1, dense_interval=6), 20)
    # The first iterations from 6, 12 and 18 at which a window may begin.
    assert [at for at, length in found.items() if length == 1] == [7, 14, 18]
    assert {3} <= {length for length in found.values()}


def test_interval_of_snapshots_does_not_hold_up_a_whole_state(make_job: MakeJob) -> None:
    assert train(make_job(interval=10, dense_interval=4), 13) == dict.fromkeys([4, 8, 12], 1)


def test_whole_state_waits_for_a_busy_writer_and_is_not_replaced(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, window=2, persist_interval=1, dense_interval=4)
    job.run(range(1, 9))  # the first window is being written all the time
    everything = {Level.FULL.value: len(WINDOW_UNITS)}
    for rank in job.ranks:
        taken = [each.fields["level"] for each in rank.events("snapshot")]
        assert len(taken) == 8 and everything not in taken
    job.serve()
    job.run(range(9, 14))
    job.serve()
    newest = max(complete_iterations(job.storage))
    assert (manifest_of(job.storage, newest).window, newest) == (1, 11)


def test_whole_state_that_fails_costs_one_checkpoint(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, window=2, dense_interval=4)

    def fail(phase: Phase, iteration: int) -> None:
        if (phase, iteration) == (Phase.SNAPSHOT, 5):
            raise RuntimeError("it breaks here")

    job.ranks[1].hook = fail
    assert train(job, 12) == {8: 1}


def test_whole_state_of_the_last_iteration_is_the_end(make_job: MakeJob) -> None:
    job = make_job(num_ranks=2, window=3, dense_interval=4)
    job.run(range(1, 5))
    assert {ending.outcome for ending in job.finish()} == {LastState.SAVED}
    assert complete_iterations(job.storage) == [4]
    for rank in job.ranks:
        assert [each.iteration for each in rank.events("snapshot")] == [1, 2, 3, 4]
