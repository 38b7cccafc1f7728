"""Snapshots on their way to storage, with a strategy, a pool, and a writer in this process."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from moe_ft.engine.background import EventQueue
from moe_ft.engine.clock import Clock
from moe_ft.engine.memory.region_stores import WindowStore
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.engine.persist.client import PersistClient
from moe_ft.engine.persist.requests import PersistRequest, confirmed_path, request_path
from moe_ft.engine.persist.schedule import StorageSchedule
from moe_ft.engine.persist.writer import PersistWorker
from moe_ft.faults import Phase
from moe_ft.files.storage import Storage, iteration_directory, rank_path
from moe_ft.planning.experts import ExpertLayout
from moe_ft.strategies.partial.selection import PartialConfig, RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.strategies.rotating import PlannedRun
from tests.unit.moe_ft.builders import (
    add_units,
    make_identity,
    make_state,
    manifest_of,
    put_in_slot,
    rotating_unit,
)

NUM_EXPERTS = 3
LAYER = "layer.9"


def no_fault(phase: Phase, iteration: int) -> None:
    """Inflict nothing."""


class Rank:
    """One rank whose snapshots hold all experts, of which each checkpoint writes one.

    Attributes:
        request_before: the last one that the writer has served.
    """

    request_before: PersistRequest

    def __init__(self, folder: Path, interval: int = 1, dense_interval: int = 0) -> None:
        self.folder, self.storage = folder, Storage(str(folder / "storage"))
        self.reports = EventQueue()
        experts = ExpertLayout(num_layers=1, num_experts=NUM_EXPERTS, ep_size=1)
        options = PartialConfig(k_snapshot=str(NUM_EXPERTS), k_persist=1)
        run = PlannedRun(interval=1, planned_tokens=1, tokens_per_iteration=1)
        units = [rotating_unit(expert) for expert in range(NUM_EXPERTS)]
        share = RankShare(always_bytes=0, unit_bytes=1)
        self.strategy = PartialStrategy([], units, [LAYER], experts, options, run, share)
        self.pool = UnitPool(folder / "rank", 4 * 33, 3 * NUM_EXPERTS)
        self.pool.open()
        size = len(make_state()[1])
        regions = [Region(folder / "rank", number, size) for number in range(3)]
        for region in regions:
            region.open()
        self.store = WindowStore(regions, self.pool)
        self.client = PersistClient(folder / "persist", 0, self.reports, no_fault, Clock())
        self.worker = PersistWorker(folder / "persist", self.storage, keep=2)
        self.schedule = StorageSchedule(
            interval,
            self.client,
            self.store,
            self.strategy,
            make_identity(),
            0,
            dense_interval=dense_interval,
        )
        self.schedule.start("")

    def complete(self, iteration: int) -> Region:
        """Have all ranks complete a snapshot."""
        region = self.store.take_region()
        index, region.mapping[:] = make_state(iteration=iteration)
        index = msgspec.structs.replace(index, file=region.data_path.name)
        window = self.strategy.plan_window(iteration)
        slots = map(self.pool.slot_at, self.store.take_slots(NUM_EXPERTS))
        units = dict(
            put_in_slot(self.pool, slot, expert, iteration=iteration)
            for expert, slot in enumerate(slots)
        )
        add_units(region, index, units)
        self.store.complete(region, units, {}, None)
        self.strategy.note_complete(window, iteration)
        self.schedule.note_complete(iteration)
        return region

    def request(self) -> PersistRequest:
        """Return what the writer is asked."""
        return msgspec.json.decode(
            request_path(self._directory, 0).read_bytes(), type=PersistRequest
        )

    @property
    def _directory(self) -> Path:
        return self.folder / "persist"

    def serve(self) -> None:
        """Have the writer answer, and all ranks hear of it."""
        path, self.request_before = request_path(self._directory, 0), self.request()
        self.worker._serve(path, path.read_bytes())
        assert self.schedule.poll(can_go_on=True)
        self.schedule.confirm(are_idle=True, can_persist=not self.schedule.has_failed)

    def write(self, iteration: int) -> None:
        """Complete a snapshot and write it."""
        region = self.complete(iteration)
        self.schedule.submit(region)
        self.serve()

    def on_storage(self, iteration: int) -> Sequence[str]:
        """Return the experts that a checkpoint has."""
        units = manifest_of(self.storage, iteration).units
        return sorted(name for name in units if name.startswith(LAYER))


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


ALL = [str(rotating_unit(expert)) for expert in range(NUM_EXPERTS)]


def test_whole_state_comes_before_a_snapshot_that_is_due(tmp_path: Path) -> None:
    rank = Rank(tmp_path, dense_interval=3)
    region = rank.complete(2)
    assert rank.schedule.wants(region, 2)
    assert not rank.schedule.wants(region, 3)
    rank.schedule.note_whole(3)
    assert not rank.schedule.wants(
        region, 4
    )  # not before the whole state is complete, or has failed
    for later in (3, 4):
        assert rank.schedule.wants(rank.complete(later), 5)


def test_time_of_a_write_is_divided_among_the_snapshots_that_it_stands_for(tmp_path: Path) -> None:
    rank = Rank(tmp_path, interval=0, dense_interval=4)
    for iteration in (1, 2, 3):
        rank.complete(iteration)
    rank.schedule.note_whole(4)
    rank.write(4)
    assert rank.schedule.seconds_per_snapshot == rank.client.last_seconds / 4


def test_everything_goes_again_when_the_checkpoint_to_build_on_is_gone(rank: Rank) -> None:
    rank.write(1)
    shutil.rmtree(rank.folder / "storage" / iteration_directory(1))
    rank.write(2)
    assert rank.schedule.has_failed
    rank.write(3)
    assert rank.on_storage(3) == ALL
    rank.write(4)
    assert rank.on_storage(4) == ALL


def test_writer_learns_in_the_next_iteration_what_all_have_read_back_and_not_at_the_end(
    rank: Rank,
) -> None:
    rank.write(1)
    told = confirmed_path(rank.folder / "persist")
    assert not told.exists(), "a writer that is about to end would begin to delete"
    rank.schedule.announcer(is_writable=False, is_whole=False)
    assert told.read_text() == rank_path(1, 0, rank.request_before.tag, "json")


def test_checkpoint_that_another_rank_could_not_write_is_built_on_by_none(rank: Rank) -> None:
    rank.write(1)
    region = rank.complete(2)
    rank.schedule.submit(region)
    assert rank.schedule.poll(can_go_on=False)
    rank.schedule.confirm(are_idle=True, can_persist=False)
    rank.schedule.submit(rank.complete(3))
    assert rank.request().previous.startswith(iteration_directory(1))


def submit_in_vain(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submit a region at a time when no request can be made."""

    def fail(**_: object) -> None:
        raise MemoryError

    region = rank.complete(1)
    with monkeypatch.context() as patch:
        patch.setattr(rank.strategy, "plan_persist", fail)
        with pytest.raises(MemoryError):
            rank.schedule.submit(region)


def test_writer_that_cannot_be_asked_counts_as_one_that_fails(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit_in_vain(rank, monkeypatch)
    assert not rank.schedule.is_idle
    assert rank.schedule.poll(can_go_on=True)
    assert rank.schedule.has_failed
