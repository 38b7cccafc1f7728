"""Origin of a start: its processes and its launcher, which may tell that the start is over.

A start that is over has left its lock, if it was killed. Where nothing here says so, only a lock that nobody
renews tells it: storage_lock.py.
"""

import os
from collections.abc import Iterable

import msgspec

from moe_ft.launches import Launch
from moe_ft.processes import has_ended, process_namespace, start_ticks

_MAX_AGENTS = 64  # that a lock names: a restart without any of these watches the lock


class Origin(msgspec.Struct, frozen=True):
    """Processes of a start, and its launcher.

    Attributes:
        system: boot and process numbers that its processes belong to; empty if that cannot be known.
        processes: numbers and start times of rank 0 and, under torchrun, of the process that started it: as
            long as that lives, another rank 0 may come.
        agents: names of torchrun's agents, of the first nodes. An agent serves one job, and ends what it has
            started before it starts anything again.
        scheduled: job of SLURM; empty without it.
        counts: how often SLURM has started that job before, and without torchrun, how often its script has
            started the ranks before.
    """

    system: str = ""
    processes: tuple[tuple[int, int], ...] = ()
    agents: tuple[str, ...] = ()
    scheduled: str = ""
    counts: tuple[int, int] = (0, 0)

    def is_over(self, own: "Origin") -> bool:
        """Return whether it is known that nothing of this start runs any more."""
        if set(self.agents) & set(own.agents):
            return True
        if self.scheduled and self.scheduled == own.scheduled and self.counts < own.counts:
            return True
        is_here = self.system and self.system == own.system
        return bool(is_here and self.processes) and all(has_ended(*each) for each in self.processes)


def own_origin(launch: Launch, agents: Iterable[str] = ()) -> Origin:
    """Return the origin of this process, which a launch has made.

    Args:
        agents: of all nodes.
    """
    pids = [os.getpid(), os.getppid()] if launch.agent else [os.getpid()]
    return Origin(
        system=process_namespace(),
        processes=tuple((pid, start_ticks(pid)) for pid in pids),
        agents=tuple(dict.fromkeys(filter(None, agents)))[:_MAX_AGENTS],
        scheduled=launch.job,
        counts=(launch.requeues, launch.scripted),
    )
