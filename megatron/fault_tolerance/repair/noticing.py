"""News of a death: whether an exception of the training thread comes from the end of another rank.

The exception often comes first. The news then arrives in the job's store while this waits for it.
"""

import time

import torch.distributed as dist

from megatron.fault_tolerance.repair import lost_device
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.membership import Membership
from megatron.fault_tolerance.repair.phases import Phases
from megatron.fault_tolerance.repair.watcher import STUCK_S, Watcher
from moe_ft.errors import SnapshotError
from moe_ft.keeper.link import Link
from moe_ft.keeper.rounds import Rounds
from moe_ft.recovery.failures import is_timeout
from moe_ft.saying import say

_NOTICE_S = 5.0  # from an exception until the keeper has said that a rank died

# Gloo and torch.distributed raise the first, the engine's threads the other.
MAY_MEAN_DEATH = (RuntimeError, SnapshotError)

Kinds = type[Exception] | tuple[type[Exception], ...]


class Noticing:
    """Decides whether a repair begins after an exception. Owned by the training thread."""

    def __init__(
        self, link: Link, rounds: Rounds, membership: Membership, watcher: Watcher, links: Links
    ) -> None:
        """Prepare.

        Args:
            link: to the zygote.
            rounds: over a connection of the training thread.
            membership: of this rank.
            watcher: may have learned of the death before.
            links: of the groups, which this ends, so that nobody waits for this rank.
        """
        self._link, self._rounds, self._membership = link, rounds, membership
        self._watcher, self._links = watcher, links

    def notice_or_raise(
        self, error: BaseException, may_mean_death: Kinds = MAY_MEAN_DEATH
    ) -> Phases:
        """Return the phases of a repair that begins; disarm and raise the error if no rank has died.

        Args:
            error: that has ended an iteration, an evaluation or a repair.
            may_mean_death: exceptions after which the news of a death may still be on its way.
        """
        if self._link.is_armed and (reason := lost_device.why_lost(error)):
            lost_device.end_process(reason)
        phases = self.notice(error, may_mean_death) if isinstance(error, Exception) else None
        if phases is None:
            self._link.disarm()
            raise error
        return phases

    def notice(self, error: Exception, may_mean_death: Kinds = MAY_MEAN_DEATH) -> Phases | None:
        """Return the phases of a repair that begins; None if no rank has died."""
        raised_s, number = time.time(), self._membership.round + 1
        if not self._is_declared(number, error, isinstance(error, may_mean_death)):
            return None
        self._links.end(number - 1)
        is_over = self._rounds.is_finished(number - 1)
        where = "its iteration" if is_over else "a repair"
        say(f"rank {dist.get_rank()} has left {where}: a rank has died ({_first_line(error)})")
        return Phases(min(raised_s, self._watcher.noticed_s(number)))

    def _is_declared(self, number: int, error: Exception, waits: bool) -> bool:
        """Return whether a round has begun; wait for that, if asked to, as long as it may still begin."""
        begin_s = time.monotonic()
        if waits and is_timeout(error):
            self._rounds.time_out(number)
        while not self._rounds.is_declared(number):
            # A rank that hangs ends itself then.
            wait_s = _NOTICE_S + (STUCK_S if self._rounds.has_timed_out(number) else 0.0)
            if not waits or time.monotonic() - begin_s > wait_s:
                return False
            time.sleep(self._rounds.poll_s)
        return True


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
