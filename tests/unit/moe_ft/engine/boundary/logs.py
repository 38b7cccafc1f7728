"""A boundary log of two slots, and what its rank sends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from moe_ft.engine.background import EngineEvent, EventQueue
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.engine.boundary.reading import LoggedIteration, NeighbourLog, open_slot
from moe_ft.engine.memory.job_directory import indexes_in
from moe_ft.engine.memory.regions import BoundarySlot
from moe_ft.format.boundary import BoundaryIndex, Direction
from moe_ft.planning.boundary_log import PipelineTraffic, header_bytes
from tests.unit.moe_ft.builders import make_identity
from tests.unit.moe_ft.engine.stand_ins import ManualWorker

RANK, NEXT, PREVIOUS = 1, 2, 0
# The middle one of three stages sends two activations and two gradients.
TRAFFIC = PipelineTraffic(
    num_stages=3, num_chunks=1, num_microbatches=2, shape=(8, 2, 16), element_bytes=2
)
STAGE = 1
RECORD_SETTINGS = {"--lr": 1e-3}
Send = tuple[int, Direction, torch.Tensor]


def open_log(directory: Path) -> tuple[NeighbourLog, list[str]]:
    """Return the log of the rank whose memory is in a directory, by iteration, and what cannot be used.

    The rank must not write to it meanwhile.
    """
    found: dict[int, LoggedIteration] = {}
    problems: list[str] = []
    for path, index in indexes_in(directory, BoundaryIndex) if directory.is_dir() else ():
        try:
            logged = open_slot(path, index)
        except OSError as error:
            problems.append(str(error))
            continue
        known = found.get(logged.index.iteration)
        if known is None or known.index.identity.start < logged.index.identity.start:
            found[logged.index.iteration] = logged
    return found, problems


class SmallLog:
    """A log of rank 1 and its parts.

    Attributes:
        worker: runs what the log has committed when it is told to.
    """

    def __init__(self, directory: Path, *, num_slots: int = 2) -> None:
        self.directory = directory
        size = TRAFFIC.slot_bytes(STAGE)
        self.slots = [BoundarySlot(directory, number, size) for number in range(num_slots)]
        for slot in self.slots:
            slot.open()
        self.worker = ManualWorker(is_eager=False)
        self.reports = EventQueue()
        identity = make_identity(world_size=3)
        header = header_bytes(TRAFFIC.num_sends(STAGE))
        self.log = BoundaryLog(
            self.slots, header, identity, RANK, "node", self.worker, self.reports, RECORD_SETTINGS
        )

    def take(self, iteration: int, sends: Sequence[Send] | None = None) -> list[Send]:
        """Log an iteration and commit it; return what was sent."""
        sent = list(sends_of(iteration) if sends is None else sends)
        self.log.begin(iteration)
        for each in sent:
            self.log.record(*each)
        self.log.end()
        self.worker.work()
        return sent

    def held(self) -> list[int]:
        """Return the iterations that the slots hold, by their files."""
        found, problems = open_log(self.directory)
        assert not problems
        return sorted(found)

    def reasons(self) -> list[str]:
        """Return the reasons of all failures since the last call."""
        return [_reason(each) for each in self.reports.drain()]

    def skipped(self) -> list[int]:
        """Return the iterations for which there was no room, since the last call."""
        found = self.reports.drain()
        assert all(each.event == "skipped" for each in found)
        assert all(
            "again, stay until there is a new window" in each.fields["reason"] for each in found
        )
        return [each.iteration for each in found]


def _reason(report: EngineEvent) -> str:
    assert (report.event, report.fields["part"]) == ("degraded", "boundary-log")
    reason: str = report.fields["reason"]
    return reason


def sends_of(iteration: int) -> Iterator[Send]:
    """Yield what an iteration sends, as 1F1B does, with values of its own."""
    generator = torch.Generator().manual_seed(iteration)
    for receiver, direction in (
        (NEXT, Direction.FORWARD),
        (NEXT, Direction.FORWARD),
        (PREVIOUS, Direction.BACKWARD),
        (PREVIOUS, Direction.BACKWARD),
    ):
        values = torch.randn(TRAFFIC.shape, generator=generator)
        yield receiver, direction, values.to(torch.bfloat16)


@contextmanager
def small_log(directory: Path, *, num_slots: int = 2) -> Iterator[SmallLog]:
    """Yield a log that has started at iteration 0."""
    log = SmallLog(directory, num_slots=num_slots)
    log.log.start(0, 0)
    yield log
    for slot in log.slots:
        slot.close()
