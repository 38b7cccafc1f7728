"""Ways in which a simulated rank leaves: after an exception, or when it is told to end, with a breakpoint.

The writer and the meeting of all ranks are those of megatron/fault_tolerance. Simulated are the job's store
(store.py) and the thread that SIGTERM wakes.
"""

import os
from pathlib import Path

from moe_ft.engine import breakpoints
from moe_ft.events import EventLog
from moe_ft.loop import breakpoint_meeting, breakpoint_writer, local_processes
from moe_ft.loop.breakpoint_writer import BreakpointWriter
from moe_ft.loop.listeners import LoopState
from moe_ft.recovery.checkpointing import Checkpointing
from tests.simulation.active import Patches, World
from tests.simulation.collectives import Distributed
from tests.simulation.kernel import Process

_LEAVING = "leaving"  # local state of a process
_TOLD_TO_END = 128 + 15
_POLL_S = 0.1


class Leaving:
    """Writer of the breakpoint of one rank, which leaves once."""

    def __init__(self, world: World, rank: int) -> None:
        self.loop = LoopState()
        self._writer = BreakpointWriter(self.loop, EventLog(Path(os.devnull), rank))
        world.process.local[_LEAVING] = self

    def use(self, running: Checkpointing) -> None:
        """Begin to write the breakpoint of an engine that has one. Called by all ranks."""
        if running.engine.breakpoints is not None:
            processes, engine = local_processes.meet_processes(), running.engine
            self._writer.use(
                engine.breakpoints, processes, is_on_gpu=False, boundary=engine.boundary
            )

    def fail(self, error: Exception) -> None:
        """Write because of an exception. Training thread."""
        self._writer.on_failure(error)

    def end(self) -> None:
        """Write because training has ended here alone. Training thread."""
        self._writer.on_end()

    def on_sigterm(self) -> None:
        """Write because the launcher ends the job. A thread of its own."""
        self._writer.on_sigterm()


def terminate(process: Process) -> None:
    """Send SIGTERM to a rank."""
    kernel, leaving = process.kernel, process.local.get(_LEAVING)
    if not process.is_alive:
        return
    if leaving is None:
        kernel.kill(process, -15)
        return

    def leave() -> None:
        kernel.event("told to end")
        leaving.on_sigterm()
        kernel.end(process, _TOLD_TO_END)

    kernel.spawn(process, leave, "sigterm")


def install(patches: Patches) -> None:
    """Have ranks leave in simulated time."""
    for module in (local_processes, breakpoint_writer):
        patches.set(module, "dist", Distributed())
    patches.set(breakpoint_meeting, "_MIN_POLL_S", _POLL_S)
    patches.divert(breakpoints, "_nothing", lambda world: world.kernel.event("in breakpoint"))
