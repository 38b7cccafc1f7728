"""Second look at the state that dead processes have left."""

from pathlib import Path

import pytest

from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from tests.simulation.left import Left, look, states_of_several_iterations
from tests.unit.simulation.small_job import SmallJob, has_trained, small_job


def looked(job: SmallJob) -> Left:
    return look(job.root, job.setup.shape, {*job.nodes})


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_newest_complete_state_is_found() -> None:
    with small_job() as job:
        job.run_until(has_trained(4))
        assert looked(job).newest in (3, 4)


def test_flipped_bit_of_one_rank_makes_its_iteration_unusable() -> None:
    with small_job() as job:
        job.run_until(has_trained(4))
        newest = looked(job).newest
        for path in (job.root / "memory").glob("job/node-0/rank_00001/region_*.json"):
            index = decode(path.read_bytes(), Index, "")
            if index.iteration == newest:
                _, unit = next(index.entries())
                flip(path.parent / index.file, unit.offset)
        left = looked(job)
        assert left.has_any
        assert left.newest != newest


def test_unfinished_window_is_not_usable() -> None:
    with small_job(strategy="sparse", options={"window": "3", "max_window": 4}) as job:
        job.run_until(has_trained(2))
        left = looked(job)
        assert left.newest is None


def test_finished_window_is_usable() -> None:
    with small_job(strategy="sparse", options={"window": "3", "max_window": 4}) as job:
        job.run_until(has_trained(5))
        assert looked(job).newest == 3


def test_checkpoint_on_storage_is_found() -> None:
    with small_job(persist_interval=1) as job:
        job.run_until()
        assert looked(job).newest == job.setup.iterations


@pytest.mark.parametrize(("intervals", "num"), [((1, 0), 1), ((0, 3), 0)])
def test_windows_on_storage_are_told_from_whole_states(
    intervals: tuple[int, int], num: int
) -> None:
    persist_interval, dense_interval = intervals
    with small_job(
        strategy="sparse",
        options={"window": "2", "max_window": 4},
        persist_interval=persist_interval,
        dense_interval=dense_interval,
    ) as job:
        job.run_until()
        assert len(list(job.root.glob("storage/iter_*/manifest.json"))) == 2  # with the end
        assert len(states_of_several_iterations(job.root)) == num
