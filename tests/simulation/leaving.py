"""A simulated rank is told to end: the thread that SIGTERM wakes, in which the product writes a breakpoint.

The job's store, where ranks that leave meet, is store.py.
"""

from moe_ft.engine import breakpoints
from moe_ft.loop import checkpoints, leaving
from tests.simulation.active import Patches
from tests.simulation.collectives import Distributed
from tests.simulation.kernel import Process
from tests.simulation.rank import WRITER

_TOLD_TO_END = 128 + 15
_POLL_S = 0.1


def terminate(process: Process) -> None:
    kernel, writer = process.kernel, process.local.get(WRITER)
    if not process.is_alive:
        return
    if writer is None:
        kernel.kill(process, -15)
        return

    def leave() -> None:
        kernel.event("told to end")
        writer.on_sigterm()
        kernel.end(process, _TOLD_TO_END)

    kernel.spawn(process, leave, "sigterm")


def install(patches: Patches) -> None:
    """Have ranks leave in simulated time."""
    for module in (leaving, checkpoints):
        patches.set(module, "dist", Distributed())
    patches.set(leaving, "_MIN_POLL_S", _POLL_S)
    patches.divert(breakpoints, "_nothing", lambda world: world.kernel.event("in breakpoint"))
