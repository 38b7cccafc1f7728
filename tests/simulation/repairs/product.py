"""Parts of megatron/fault_tolerance/repair that simulated ranks use; nothing else here imports any of it."""

import threading
from typing import Any

from megatron.fault_tolerance.repair import own_errors, watcher
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.own_errors import OwnErrors
from megatron.fault_tolerance.repair.watcher import STUCK_S, Deaths, Watcher, ending_after
from moe_ft.cluster.member import Done, LoopPosition, Member, Standing
from moe_ft.files import progress
from moe_ft.loop import hangs
from tests.simulation.active import Patches, world

__all__ = [
    "STUCK_S",
    "Deaths",
    "Done",
    "Links",
    "Member",
    "OwnErrors",
    "LoopPosition",
    "Watcher",
    "ending_after",
]


REPAIRED_IN = own_errors._REPAIRED_IN
WAITS, WRITTEN = "waits", "written"  # local state of a process
FLOOR_S, NUM_LEARNED = 20.0, 2


class _Threading:
    """The module `threading` of what asks which thread it is in."""

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    def get_ident(self) -> int:
        if (current := world()) is None:
            return threading.get_ident()
        running, process = current.kernel.running, current.process
        assert running is not None
        return process.pid * 100 + process.threads.index(running)


def _local(name: str, default: Any) -> Any:
    current = world()
    assert current is not None
    return current.process.local.get(name, default)


def install(patches: Patches) -> None:
    """Have simulated threads be told apart, and their hangs be watched; sections are learned soon."""
    for module in (progress, hangs, watcher):
        patches.set(module, "threading", _Threading())
    patches.set(hangs, "own_member", lambda: _local("member", None))
    patches.set(hangs, "is_debugged", lambda thread: False)
    patches.set(hangs, "written_bytes", lambda: _local(WRITTEN, 0))
    patches.set(hangs, "is_in_exchange", lambda thread: _local(WAITS, 0) > 0)
    patches.set(hangs, "FLOORS_S", dict.fromkeys(hangs.FLOORS_S, FLOOR_S))
    patches.set(hangs, "NUM_ITERATIONS", NUM_LEARNED)


def forget_threads() -> None:
    """Forget those of a simulation before this one."""
    for known in (progress._ends_s, progress._left_s, progress._progress_s, progress._among_ranks):
        known.clear()


def links_of(member: Member, transport: Any) -> Links:
    return Links(member, (transport,))


def be_replaced_again(member: Member) -> None:
    """Put a mistake in: say in the next round, too, that the rank of this process has died."""
    member.standing = Standing.JOINED


def hold_stops_against_threads(patches: Patches) -> None:
    """Put a mistake in: time in which a process did not run counts as a hang of its training thread."""
    patches.set(watcher, "_LONGEST_LOOK_S", float("inf"))


def position_at(iteration: int) -> LoopPosition:
    return LoopPosition(
        iteration=iteration,
        counters={"consumed_train_samples": iteration},
        num_groups=1,
        gathers_weights=False,
        evaluations_draw=False,
    )
