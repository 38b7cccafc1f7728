"""Snapshots of a window, one after the other: what the region and its index hold behind each of them."""

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors
import torch

from moe_ft.engine import snapshot
from moe_ft.engine.background import Reports
from moe_ft.engine.layout import FileLayout, LazyLayout
from moe_ft.engine.peers import Replica
from moe_ft.engine.regions import Region
from moe_ft.engine.snapshot import SnapshotWriter
from moe_ft.engine.snapshot_job import SnapshotJob, SnapshotState
from moe_ft.engine.unit_layouts import UnitLayouts
from moe_ft.faults import Phase
from moe_ft.format.contents import check_units
from moe_ft.format.encoding import decode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level
from tests.unit.moe_ft.builders import (
    WINDOW_UNITS,
    make_identity,
    make_optimizer,
    make_parameter,
    make_record,
    make_window,
    window_position,
)
from tests.waiting import wait_for

RUNNING, FAILED, COMPLETE = SnapshotState.RUNNING, SnapshotState.FAILED, SnapshotState.COMPLETE
FIRST_ITERATION, LENGTH, NUM_ELEMENTS = 5, 3, 9
EXPERTS, EMBEDDING = [str(unit) for unit in WINDOW_UNITS[:3]], str(WINDOW_UNITS[3])
KEYS = {"param": 0.0, "exp_avg": 0.25, "exp_avg_sq": 0.5, "weight": 0.0}
SLACK_BYTES = 16384
DEADLINE_S = 30.0


class Recorder:
    """Takes replicas in the place of peers.

    Attributes:
        replicas: that were taken.
        answer: whether peers have them, or what is raised.
        may_go_on: not set while replicas are to stay under way.
    """

    def __init__(self) -> None:
        self.replicas: list[Replica] = []
        self.answer: bool | Exception = True
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def replicate(self, replica: Replica) -> bool:
        """Take a replica."""
        self.replicas.append(replica)
        assert self.may_go_on.wait(DEADLINE_S)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Trainer:
    """A rank whose state says which iteration it is of, and the thread that takes its snapshots."""

    def __init__(self, directory: Path, recorder: Recorder | None = None) -> None:
        self.parameters: list[LocalParameter] = []
        for unit in WINDOW_UNITS:
            weight, master = (
                torch.zeros(NUM_ELEMENTS, dtype=torch.bfloat16),
                torch.zeros(NUM_ELEMENTS),
            )
            optimizer = make_optimizer(master)
            self.parameters.append(
                make_parameter(unit, parameter=weight, optimizer=optimizer, master=master)
            )
        self.catalog = UnitCatalog(self.parameters, leaves_out_frozen=False)
        self.layouts: dict[int, FileLayout] = {}
        self.reports = Reports()
        self.hook: Callable[[int], None] = lambda iteration: None
        self.recorder = recorder
        size = self.layout(LENGTH).num_bytes + SLACK_BYTES
        self.regions = [Region(directory, number, size) for number in range(2)]
        for region in self.regions:
            region.open()
        self.writer = SnapshotWriter(
            self.parameters,
            make_identity(),
            0,
            "node-a",
            self.reports,
            recorder,
            self._phase_hook,
            lambda record: None,
        )
        self.writer.start()

    def _phase_hook(self, phase: Phase, iteration: int) -> None:
        assert phase is Phase.SNAPSHOT
        self.hook(iteration)

    @staticmethod
    def plan(length: int) -> WindowPlan:
        """Return a window in which each unit is FULL where `window_position` says."""
        levels = [
            {
                unit: Level.FULL if window_position(unit, length) == position else Level.COMPUTE
                for unit in WINDOW_UNITS
                if window_position(unit, length) >= position
            }
            for position in range(length)
        ]
        return WindowPlan(snapshots=tuple(SnapshotPlan(levels=each) for each in levels))

    def layout(self, length: int) -> FileLayout:
        """Return the layout of a window."""
        if length not in self.layouts:
            self.layouts[length] = UnitLayouts(self.catalog, 0).lay_out(self.plan(length))
        return self.layouts[length]

    @staticmethod
    def value(name: str, key: str, iteration: int) -> float:
        """Return what all elements of a tensor are at an iteration."""
        return iteration + KEYS[key] + 32 * list(map(str, WINDOW_UNITS)).index(name)

    def train(self, iteration: int, *, has_moments: bool = True) -> None:
        """Have the state of an iteration."""
        for local in self.parameters:
            name, master = str(local.unit), local.master
            assert master is not None
            local.parameter.data.fill_(self.value(name, "weight", iteration))
            master.fill_(self.value(name, "param", iteration))
            for key in ("exp_avg", "exp_avg_sq") if has_moments else ():
                state = local.optimizer.optimizer.state[master]
                state[key] = torch.full((NUM_ELEMENTS,), self.value(name, key, iteration))

    def job(
        self, position: int, *, first: int = FIRST_ITERATION, length: int = LENGTH, region: int = 0
    ) -> SnapshotJob:
        """Return the job of a window's snapshot, whose state is there."""
        layout = self.layout(length)
        self.train(first + position)
        record: Any = SimpleNamespace(iteration=first + position)
        return SnapshotJob(
            region=self.regions[region],
            window=LazyLayout(lambda: layout),
            position=position,
            iteration=first + position,
            record=record,
            keep_iteration=first - 1,
            plan=self.plan(length).snapshots[position],
        )

    def run(self, job: SnapshotJob) -> SnapshotState:
        """Take a snapshot, wait for its end, and return how it ended."""
        self.writer.submit(job)
        wait_for(lambda: job.state is not RUNNING, f"the snapshot of iteration {job.iteration}")
        return job.state

    def take(self, position: int, **which: Any) -> SnapshotState:
        """Make a job and run it."""
        return self.run(self.job(position, **which))

    def index(self, region: int = 0) -> Index:
        """Return what a region holds."""
        path = self.regions[region].index_path
        return decode(path.read_bytes(), Index, str(path))

    def holds(self, entry: UnitEntry, name: str, region: int = 0) -> bool:
        """Return whether a unit version in a region is that of its iteration."""
        content = memoryview(self.regions[region].mapping)[entry.offset :][: entry.num_bytes]
        for tensor in entry.tensors:
            dtype = torch.bfloat16 if tensor.dtype == "BF16" else torch.float32
            found = torch.frombuffer(content, dtype=dtype, count=NUM_ELEMENTS, offset=tensor.offset)
            value = self.value(name, tensor.key, entry.iteration)
            if not torch.equal(found, torch.full((NUM_ELEMENTS,), value, dtype=dtype)):
                return False
        return True

    def reasons(self) -> list[str]:
        """Return why something failed since the last call."""
        return [each.fields["reason"] for each in self.reports.drain() if each.event == "degraded"]


@pytest.fixture(autouse=True)
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records come from a model and an optimizer of Megatron; here they have their iteration only."""
    monkeypatch.setattr(
        snapshot.records, "encode", lambda captured: make_record(captured.iteration)
    )


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.writer.close(DEADLINE_S)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def sending(tmp_path: Path, recorder: Recorder) -> Iterator[Trainer]:
    trainer = Trainer(tmp_path, recorder)
    yield trainer
    recorder.may_go_on.set()
    trainer.writer.close(DEADLINE_S)


def fail_at(iteration: int) -> Callable[[int], None]:
    def hook(at: int) -> None:
        if at == iteration:
            raise RuntimeError("the copy breaks here")

    return hook


# A window of three snapshots: experts 0 and 1, expert 2, the embedding


def test_index_has_the_snapshots_that_were_taken_so_far(trainer: Trainer) -> None:
    found = []
    for position in range(LENGTH):
        assert trainer.take(position) is COMPLETE
        index = trainer.index()
        found.append((index.iteration, index.num_snapshots, index.window, index.is_whole))
    assert found == [(5, 1, 3, False), (6, 2, 3, False), (7, 3, 3, True)]


def test_index_names_each_unit_at_full_with_the_iteration_of_its_snapshot(trainer: Trainer) -> None:
    expected: dict[str, int] = {}
    for position, names in enumerate([EXPERTS[:2], EXPERTS[2:], [EMBEDDING]]):
        trainer.take(position)
        expected |= dict.fromkeys(names, FIRST_ITERATION + position)
        units = trainer.index().units
        assert {name: unit.iteration for name, unit in units.items()} == expected
        assert {unit.level for unit in units.values()} == {"full"}


def test_index_names_by_snapshot_the_weights_of_units_that_come_later(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        compute = trainer.index().compute
        names = [[EXPERTS[2], EMBEDDING], [EMBEDDING], []][: position + 1]
        assert [sorted(units) for units in compute] == [sorted(each) for each in names]
        for number, units in enumerate(compute):
            assert {unit.level for unit in units.values()} <= {"compute"}
            assert {unit.iteration for unit in units.values()} <= {FIRST_ITERATION + number}


def test_index_has_the_records_of_all_snapshots(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        expected = [make_record(FIRST_ITERATION + each) for each in range(position + 1)]
        assert list(trainer.index().records) == expected


def test_every_version_in_a_window_is_the_state_of_its_iteration(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        entries = list(trainer.index().entries())
        assert len(entries) == [4, 6, 7][position]
        assert all(trainer.holds(entry, name) for name, entry in entries)


def test_region_matches_its_index_behind_every_snapshot(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        check_units(trainer.index(), {"": memoryview(trainer.regions[0].mapping)}, "the region")


def test_region_is_a_valid_file_behind_every_snapshot(trainer: Trainer) -> None:
    trainer.layouts[LENGTH] = full_size(trainer)
    for position in range(LENGTH):
        trainer.take(position)
        found = dict(safetensors.deserialize(bytes(trainer.regions[0].mapping)))
        assert f"{EMBEDDING}/full/{EMBEDDING}.weight[0:9]/param" in found


def full_size(trainer: Trainer) -> FileLayout:
    """Return the layout of a window in a region that is larger than the window."""
    layouts = UnitLayouts(trainer.catalog, 0)
    layouts.region_bytes = trainer.regions[0].num_bytes
    return layouts.lay_out(trainer.plan(LENGTH))


def test_snapshot_writes_nothing_outside_of_its_stretch(trainer: Trainer) -> None:
    trainer.take(0)
    for position in (1, 2):
        job = trainer.job(position)
        start, end = job.stretch
        before = bytes(trainer.regions[0].mapping)
        trainer.run(job)
        after = bytes(trainer.regions[0].mapping)
        assert (after[:start], after[end:]) == (before[:start], before[end:])
        assert after[start:end] != before[start:end]


def test_stretches_of_a_window_are_all_that_is_in_use_of_a_region(trainer: Trainer) -> None:
    stretches = [trainer.job(position).stretch for position in range(LENGTH)]
    assert stretches[0][0] == 0
    assert [start for start, _ in stretches[1:]] == [end for _, end in stretches[:-1]]
    assert tuple(end for _, end in stretches) == trainer.layout(LENGTH).ends


def test_region_says_at_which_iteration_it_is(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
        assert trainer.regions[0].iteration == FIRST_ITERATION + position


def test_snapshot_is_reported_with_its_bytes_and_levels(trainer: Trainer) -> None:
    for position in range(2):
        trainer.take(position)
    first, second = trainer.reports.drain()
    assert (first.event, first.iteration, second.iteration) == ("snapshot", 5, 6)
    assert first.fields["level"] == {"full": 2, "compute": 2}
    assert second.fields["level"] == {"full": 1, "compute": 1}
    assert first.fields["num_units"] == 4
    places = trainer.layout(LENGTH).snapshots[0]
    assert first.fields["bytes"] == sum(place.num_bytes for place in places)


def test_window_of_one_snapshot_is_whole_at_once_and_has_no_weights(trainer: Trainer) -> None:
    trainer.take(0, length=1)
    index = trainer.index()
    assert (index.window, index.num_snapshots, index.compute) == (1, 1, ())
    assert {unit.iteration for unit in index.units.values()} == {FIRST_ITERATION}


def test_moments_that_do_not_exist_yet_are_marked_where_they_would_be(trainer: Trainer) -> None:
    job = trainer.job(0)
    for local in trainer.parameters:
        local.optimizer.optimizer.state.clear()
    trainer.run(job)
    absent = {
        (each.key, each.is_absent)
        for unit in trainer.index().units.values()
        for each in unit.tensors
    }
    assert absent == {("param", False), ("exp_avg", True), ("exp_avg_sq", True)}


def test_moments_that_come_up_in_a_window_are_absent_only_before(trainer: Trainer) -> None:
    job = trainer.job(0)
    for local in trainer.parameters:
        local.optimizer.optimizer.state.clear()
    trainer.run(job)
    trainer.take(1)
    units = trainer.index().units
    assert any(each.is_absent for each in units[EXPERTS[0]].tensors)
    assert not any(each.is_absent for each in units[EXPERTS[2]].tensors)


# Windows one after the other


def test_region_holds_nothing_while_a_window_begins_in_it(trainer: Trainer) -> None:
    for position in range(LENGTH):
        trainer.take(position)
    found = []
    trainer.hook = lambda iteration: found.append(trainer.regions[0].index_path.exists())
    trainer.take(0, first=8)
    assert found == [False]


def test_region_keeps_its_snapshots_while_another_is_added(trainer: Trainer) -> None:
    trainer.take(0)
    found = []
    trainer.hook = lambda iteration: found.append(trainer.index().num_snapshots)
    trainer.take(1)
    assert found == [1]


@pytest.mark.parametrize("region", [0, 1])
def test_second_window_has_nothing_of_the_first(trainer: Trainer, region: int) -> None:
    for position in range(LENGTH):
        trainer.take(position)
    for position in range(LENGTH):
        trainer.take(position, first=8, region=region)
        index = trainer.index(region)
        assert [record.iteration for record in index.records] == [8, 9, 10][: position + 1]
        assert all(trainer.holds(entry, name, region) for name, entry in index.entries())


@pytest.mark.parametrize("length", [1, 2, 4])
def test_window_of_another_length_may_follow_in_the_same_region(
    trainer: Trainer, length: int
) -> None:
    for position in range(LENGTH):
        trainer.take(position)
    for position in range(length):
        assert trainer.take(position, first=8, length=length) is COMPLETE
    index = trainer.index()
    assert index.is_whole
    assert all(trainer.holds(entry, name) for name, entry in index.entries())


def test_window_that_was_not_finished_is_replaced_by_the_next(trainer: Trainer) -> None:
    trainer.take(0)
    trainer.take(1)
    for position in range(LENGTH):
        assert trainer.take(position, first=9) is COMPLETE
    assert [record.iteration for record in trainer.index().records] == [9, 10, 11]


# Snapshots that fail


@pytest.mark.parametrize("position", [0, 1, 2])
def test_snapshot_that_fails_is_reported_and_its_window_is_not_whole(
    trainer: Trainer, position: int
) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + position)
    states = [trainer.take(each) for each in range(position + 1)]
    assert states == [COMPLETE] * position + [FAILED]
    assert trainer.reasons() == ["RuntimeError: the copy breaks here"]
    if position == 0:
        assert not trainer.regions[0].index_path.exists()
    else:
        assert trainer.index().num_snapshots == position


@pytest.mark.parametrize("position", [0, 1])
def test_snapshots_after_one_that_failed_fail_too(trainer: Trainer, position: int) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + position)
    for each in range(position + 1):
        trainer.take(each)
    trainer.reasons()
    for each in range(position + 1, LENGTH):
        assert trainer.take(each) is FAILED
        (reason,) = trainer.reasons()
        assert reason.endswith("the snapshot before it in its window has failed")


def test_what_was_committed_before_a_failure_stays_readable(trainer: Trainer) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + 1)
    for position in range(LENGTH):
        trainer.take(position)
    index = trainer.index()
    check_units(index, {"": memoryview(trainer.regions[0].mapping)}, "the region")
    assert all(trainer.holds(entry, name) for name, entry in index.entries())


@pytest.mark.parametrize("position", [0, 1, 2])
def test_first_snapshot_of_the_next_window_works_after_a_failure(
    trainer: Trainer, position: int
) -> None:
    trainer.hook = fail_at(FIRST_ITERATION + position)
    for each in range(LENGTH):
        trainer.take(each)
    for each in range(LENGTH):
        assert trainer.take(each, first=8) is COMPLETE
    assert trainer.index().is_whole


def test_snapshot_without_the_ones_before_it_fails(trainer: Trainer) -> None:
    assert trainer.take(1) is FAILED
    (reason,) = trainer.reasons()
    assert reason == "SnapshotError: the snapshot before it in its window has failed"


def test_snapshot_that_skips_one_fails(trainer: Trainer) -> None:
    trainer.take(0)
    assert trainer.take(2) is FAILED
    assert trainer.index().num_snapshots == 1


@pytest.mark.parametrize("position", [0, 1])
def test_snapshot_that_took_too_long_is_not_committed(trainer: Trainer, position: int) -> None:
    for each in range(position):
        trainer.take(each)
    job = trainer.job(position)

    def give_up(iteration: int) -> None:
        job.is_abandoned = True

    trainer.hook = give_up
    assert trainer.run(job) is FAILED
    assert trainer.reasons() == ["SnapshotError: the copy took longer than the fence waits"]
    assert trainer.regions[0].index_path.exists() == (position > 0)
    trainer.hook = lambda iteration: None
    assert trainer.take(position + 1) is FAILED


def test_snapshot_that_cannot_be_committed_fails_and_so_do_those_after_it(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.take(0)
    shutil.rmtree(tmp_path)
    assert [trainer.take(1), trainer.take(2)] == [FAILED, FAILED]
    first, second = trainer.reasons()
    assert first.startswith("FileNotFoundError")
    assert second.endswith("the snapshot before it in its window has failed")


def test_window_that_does_not_fit_into_its_region_fails_and_training_goes_on(
    trainer: Trainer,
) -> None:
    layouts = UnitLayouts(trainer.catalog, 0)
    layouts.region_bytes = 4096
    job = trainer.job(0)
    job.window = LazyLayout(lambda: layouts.lay_out(trainer.plan(LENGTH)))
    assert trainer.run(job) is FAILED
    (reason,) = trainer.reasons()
    assert reason.endswith("its region has 4096")
    assert job.copied.is_set()


def test_tensor_of_another_type_than_at_start_fails(trainer: Trainer) -> None:
    job = trainer.job(0)
    local = trainer.parameters[0]
    local.optimizer.optimizer.state[local.master]["exp_avg"] = torch.zeros(
        NUM_ELEMENTS, dtype=torch.float16
    )
    assert trainer.run(job) is FAILED
    (reason,) = trainer.reasons()
    assert f"{local.name}/exp_avg is torch.float16, expected torch.float32" in reason


def test_copy_that_fails_lets_the_optimizer_step(trainer: Trainer) -> None:
    trainer.hook = fail_at(FIRST_ITERATION)
    job = trainer.job(0)
    trainer.run(job)
    assert job.copied.is_set()


# Sending to peers, on a thread of its own


def test_peers_get_what_each_snapshot_adds_in_order(sending: Trainer, recorder: Recorder) -> None:
    for position in range(LENGTH):
        assert sending.take(position) is COMPLETE
    ends = sending.layout(LENGTH).ends
    found = [(each.start_byte, each.end_byte) for each in recorder.replicas]
    assert found == [(0, ends[0]), (ends[0], ends[1]), (ends[1], ends[2])]
    assert [each.index.num_snapshots for each in recorder.replicas] == [1, 2, 3]
    assert [each.keep_iteration for each in recorder.replicas] == [FIRST_ITERATION - 1] * LENGTH


def test_snapshot_is_not_complete_before_peers_have_it(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.may_go_on.clear()
    job = sending.job(0)
    sending.writer.submit(job)
    wait_for(lambda: recorder.replicas, "the replica to be under way")
    assert job.state is RUNNING
    assert sending.index().num_snapshots == 1
    recorder.may_go_on.set()
    wait_for(lambda: job.state is COMPLETE, "the snapshot to be complete")
    assert job.is_protected


def test_next_snapshot_is_committed_while_the_one_before_is_sent(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.may_go_on.clear()
    jobs = []
    for position in range(LENGTH):
        jobs.append(sending.job(position))
        sending.writer.submit(jobs[-1])
        wait_for(lambda: jobs[-1].commit_s, f"snapshot {position} to be committed")
    assert sending.index().is_whole
    assert [job.state for job in jobs] == [RUNNING] * LENGTH
    recorder.may_go_on.set()
    wait_for(lambda: all(job.state is COMPLETE for job in jobs), "all to be complete")
    assert [each.index.iteration for each in recorder.replicas] == [5, 6, 7]


def test_snapshot_that_peers_lack_is_complete_and_not_protected(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.answer = False
    job = sending.job(0)
    assert sending.run(job) is COMPLETE
    assert not job.is_protected


def test_sender_that_fails_is_reported_and_the_next_snapshot_is_sent(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.answer = ValueError("a mistake of ours")
    job = sending.job(0)
    assert sending.run(job) is COMPLETE
    assert not job.is_protected
    assert sending.reasons() == ["ValueError: a mistake of ours"]
    recorder.answer = True
    job = sending.job(1)
    assert sending.run(job) is COMPLETE
    assert job.is_protected


def test_snapshot_that_is_not_for_peers_is_complete_without_them(
    sending: Trainer, recorder: Recorder
) -> None:
    job = sending.job(0)
    job.is_sent_to_peers = False
    assert sending.run(job) is COMPLETE
    assert recorder.replicas == []


def test_snapshot_that_failed_is_not_sent(sending: Trainer, recorder: Recorder) -> None:
    sending.hook = fail_at(FIRST_ITERATION + 1)
    for position in range(LENGTH):
        sending.take(position)
    assert [each.index.iteration for each in recorder.replicas] == [FIRST_ITERATION]


def test_time_of_sending_is_added_to_that_of_the_snapshot(
    sending: Trainer, recorder: Recorder
) -> None:
    job = sending.job(0)
    sending.run(job)
    assert job.complete_s == pytest.approx(job.commit_s + job.replicate_s)


def recovered(sending: Trainer) -> Replica:
    """Return what peers are to get that a recovery has left."""
    window = make_window(first_iteration=FIRST_ITERATION - LENGTH)
    return Replica(
        region=sending.regions[1],
        pool=None,
        index=window.index,
        start_byte=0,
        end_byte=window.layout.ends[-1],
        keep_iteration=None,
    )


def test_what_was_recovered_is_sent_before_the_snapshots_that_follow(
    sending: Trainer, recorder: Recorder
) -> None:
    recorder.may_go_on.clear()
    replica = recovered(sending)
    sending.writer.send(replica)
    job = sending.job(0)
    sending.writer.submit(job)
    wait_for(lambda: job.commit_s, "the snapshot to be committed")
    assert recorder.replicas == [replica]
    assert job.state is RUNNING
    recorder.may_go_on.set()
    wait_for(lambda: job.state is COMPLETE, "the snapshot to be complete")
    assert [each.index.iteration for each in recorder.replicas] == [4, FIRST_ITERATION]


@pytest.mark.parametrize("failure", [False, ValueError("a mistake of ours")], ids=str)
def test_what_was_recovered_is_tried_again_until_peers_have_it(
    failure: bool | Exception,
    sending: Trainer,
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moe_ft.engine.replica_sender._RETRY_S", 0.01)
    recorder.answer = failure
    replica = recovered(sending)
    sending.writer.send(replica)
    wait_for(lambda: len(recorder.replicas) > 2, "it to be tried again")
    recorder.answer = True
    number = len(recorder.replicas)
    wait_for(lambda: len(recorder.replicas) > number, "peers to have it")
    assert sending.take(0) is COMPLETE
    assert recorder.replicas.count(replica) <= number + 1  # never again after that
    assert recorder.replicas[-1].index.iteration == FIRST_ITERATION


def test_what_was_recovered_is_not_tried_again_after_something_newer(
    sending: Trainer, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_ft.engine.replica_sender._RETRY_S", 0.01)
    recorder.answer = False
    sending.writer.send(recovered(sending))
    wait_for(lambda: len(recorder.replicas) > 1, "it to be tried again")
    for position in range(LENGTH):
        sending.take(position)
    assert [each.index.iteration for each in recorder.replicas][-LENGTH:] == [5, 6, 7]


def test_writer_without_peers_sends_nothing(trainer: Trainer) -> None:
    trainer.writer.send(recovered(trainer))
    assert trainer.take(0) is COMPLETE


def test_writer_that_is_closed_sends_what_was_committed_before(
    tmp_path: Path, recorder: Recorder
) -> None:
    trainer = Trainer(tmp_path, recorder)
    jobs = []
    for position in range(LENGTH):
        jobs.append(trainer.job(position))
        trainer.writer.submit(jobs[-1])
        assert jobs[-1].copied.wait(DEADLINE_S)
    trainer.writer.close(DEADLINE_S)
    assert [job.state for job in jobs] == [COMPLETE] * LENGTH
