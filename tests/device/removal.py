"""Removal of the product's waits, one at a time: each must be noticed.

The waits are read from the source, so a new one is tried too. Run `python -m tests.device.removal` for the
table of what finds each.
"""

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import torch

from moe_ft.engine.snapshots.windows import Windows
from tests.device.queues import Device, Event, Stream
from tests.device.simulated import late_devices
from tests.device.tensors import LateTensor
from tests.simulation.active import Patches
from tests.simulation.job import Setup
from tests.simulation.schedule import Fault, Schedule
from tests.simulation.simulate import installed
from tests.simulation.soak import attempt
from tests.unit.source import ROOT

_CALLS = {"wait_stream", "wait_event", "synchronize", "record_stream", "record_event", "record"}
_KILLED = Fault(kind="kill-all", start=0, event=300)
_ALONE = Setup(dp=1, ep=1, nodes=1, replication="0", iterations=6)
_PACKED = msgspec.structs.replace(_ALONE, state_dtype="master=split")
_STAGES = msgspec.structs.replace(
    _ALONE, stages=2, breakpoints=True, upstream_log=True, recovery="local", interval="2"
)
# Jobs in which the waits of the product matter, and how they are disturbed.
JOBS: tuple[tuple[Setup, tuple[Fault, ...]], ...] = (
    (_ALONE, (_KILLED,)),
    (_PACKED, (_KILLED,)),
    (_STAGES, (Fault(kind="kill-rank", start=0, event=360, target=1),)),
    (_STAGES, (Fault(kind="terminate", start=0, event=13, moment="after step"),)),
    (_STAGES, (Fault(kind="terminate", start=0, event=400),)),
)
# A device may be later than an iteration, which then gets no log, and says so.
_SLOW = "the logs of earlier iterations are still being written"
_TESTS = str(ROOT / "tests")
FENCE = "Windows.wait_for_copy"
# Waits for collectives of NCCL, which simulated jobs do not have: test_late_links.py leaves them out.
OF_LINKS = ("Nccl.settle: synchronize", "Nccl.leave: synchronize")
# Waits for the streams on which Megatron parks state, which simulated jobs do not have either.
OF_PARKING = ("settle: wait_stream", "settle: synchronize")
_FOLDERS = ("moe_ft", "megatron/fault_tolerance")
_CLOCKS = {"_now: record"}  # events that nobody waits for: they only tell the time
_STAND_IN = "megatron/fault_tolerance/cpu/device.py"  # whose streams have nothing to wait for
_ON_ITS_OWN_THREAD = {"Nccl.leave": "_WorkItem.run"}  # of the standard library's pool


def schedules(seeds: range) -> Iterator[Schedule]:
    """Yield the jobs with each seed."""
    for seed in seeds:
        for setup, faults in JOBS:
            yield Schedule(seed=seed, setup=setup, faults=faults)


def waits() -> dict[str, Path]:
    """Return the places that order the device's work as "Class.function: call", with their files."""
    found: dict[str, Path] = {}
    for path in (each for folder in _FOLDERS for each in sorted((ROOT / folder).rglob("*.py"))):
        source = path.read_text()
        # Without a device, a log may have a function of the name "record".
        calls = _CALLS if "torch.cuda" in source else _CALLS - {"record"}
        if path != ROOT / _STAND_IN and any(f".{each}" in source for each in calls):
            for name in calls_in(ast.parse(source), ""):
                if name not in _CLOCKS and name.rpartition(" ")[2] in calls:
                    found[name] = path
    return found


def calls_in(node: ast.AST, place: str) -> Iterator[str]:
    """Yield the waits in a piece of source, also those that are given away to be called."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from calls_in(child, f"{place}.{child.name}".removeprefix("."))
            continue
        if isinstance(child, ast.Attribute) and child.attr in _CALLS:
            is_ours = child.attr == "record" and ast.unparse(child).startswith("self")
            if not is_ours:
                yield f"{place}: {child.attr}"
        yield from calls_in(child, place)


@contextmanager
def without(name: str) -> Iterator[list[int]]:
    """Leave out one wait, or none if it has no name; the list gets an entry each time that it is left out."""
    patches, left_out = Patches(), list[int]()
    try:
        if not name:
            pass
        elif name == FENCE:
            patches.set(Windows, "wait_for_copy", lambda *_: left_out.append(1))
        else:
            place, _, call = name.partition(": ")
            _leave_out(patches, place, call, left_out)
        yield left_out
    finally:
        patches.restore()


def _leave_out(patches: Patches, place: str, call: str, left_out: list[int]) -> None:
    def replace(owner: Any, instead: Callable[..., Any]) -> None:
        original = getattr(owner, call)

        def act(*args: Any, **kwargs: Any) -> Any:
            if _caller() != _ON_ITS_OWN_THREAD.get(place, place):
                return original(*args, **kwargs)
            left_out.append(1)
            return instead(*args)

        patches.set(owner, call, act)

    instead: Callable[..., Any] = _unrecorded if call == "record_event" else lambda *_: None
    for owner in (Stream, Event, LateTensor, Device):
        if call in vars(owner):
            replace(owner, instead)


def _unrecorded(stream: Stream) -> Event:
    return Event(stream._device)


def _caller() -> str:
    """Return the name of the function of the product that has called the device."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TESTS):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_qualname


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Outcome of a hunt for one removed wait.

    Attributes:
        num_schedules: that were run with it.
        num_left_out: times that the wait was left out in them.
        problem: what was noticed first; empty if nothing was.
    """

    num_schedules: int
    num_left_out: int
    problem: str


def check(
    schedule: Schedule, folder: Path = Path("/dev/shm"), *, refuses_pins: bool = False
) -> list[str]:
    """Run a schedule on late devices; return what is wrong."""
    with installed(), late_devices(schedule.seed, refuses_pins=refuses_pins) as devices:
        verdict = attempt(schedule, folder)
        violations = [each for each in verdict.violations if _SLOW not in each]
        return [*devices.conflicts, *violations]


def hunt(name: str, seeds: range) -> Finding:
    """Run jobs without a wait until that is noticed; an empty name leaves out nothing."""
    count = 0
    with without(name) as left_out:
        for count, schedule in enumerate(schedules(seeds), 1):
            if problems := check(schedule):
                return Finding(num_schedules=count, num_left_out=len(left_out), problem=problems[0])
    return Finding(num_schedules=count, num_left_out=len(left_out), problem="")


def main() -> int:
    """Print a table of all waits."""
    torch.set_num_threads(1)
    num_missed = 0
    for name in ("", *(each for each in waits() if each not in OF_LINKS), FENCE):
        found = hunt(name, range(4))
        num_missed += bool(name) != bool(found.problem)
        problem = found.problem.partition("\n")[0][:110] or "nothing noticed"
        print(
            f"{name or 'none':50} {found.num_schedules:3} {found.num_left_out:4}  {problem}",
            flush=True,
        )
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
