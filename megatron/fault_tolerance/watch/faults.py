"""Inflicts the faults of --moe-ft-inject-fault on this rank, each once per event log.

Names and parsing are moe_ft/faults.py. The seams in hooks.py say which phase the rank is in.
"""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from moe_ft.errors import InjectedFaultError
from moe_ft.events import EventLog
from moe_ft.faults import FaultKind, FaultSpec, Phase
from moe_ft.recovery.site import Site


class FaultInjector:
    """Fires this rank's faults at their phases, on the thread that is in the phase."""

    def __init__(self, faults: Sequence[FaultSpec], event_log: EventLog) -> None:
        self._faults = tuple(fault for fault in faults if fault.rank == event_log.rank)
        self._event_log = event_log
        self._site: Site | None = None

    def node_of(self, site: Site) -> None:
        """Learn what faults of kind lose-node destroy."""
        self._site = site

    def is_armed(self, iteration: int, phase: Phase) -> bool:
        """Return whether a fault waits for this rank at this phase of this iteration."""
        return any(fault.is_due(iteration, phase) for fault in self._faults)

    def fire(self, iteration: int, phase: Phase) -> None:
        """Inflict the faults of this phase that have not fired before, if any.

        Raises:
            InjectedFaultError: for faults of kind exception.
        """
        for fault in self._faults:
            if fault.is_due(iteration, phase) and self._claim(fault):
                self._event_log.write(
                    "fault_injected", iteration, kind=fault.kind.value, phase=phase.value
                )
                self._inflict(fault)

    def _claim(self, fault: FaultSpec) -> bool:
        """Leave the fault's marker; return False if an earlier incarnation left it."""
        # Several equal faults on a command line are one fault.
        name = f"fault_{fault.kind}_{fault.rank}_{fault.iteration}_{fault.phase}"
        try:
            os.close(os.open(self._event_log.directory / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _inflict(self, fault: FaultSpec) -> None:
        print(f"moe_ft: rank {fault.rank} inflicts {fault} on itself", flush=True)
        if fault.kind is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind is FaultKind.HANG:
            _hang()
        elif fault.kind is FaultKind.LOSE_NODE and self._site is not None:
            _lose_node(self._site)
        raise InjectedFaultError(f"--moe-ft-inject-fault {fault}")


def _lose_node(site: Site) -> None:
    """Do to this node what the loss of its power does: no process and no memory is left."""
    topology = site.topology
    node = next(info.node for info in topology.ranks if info.pid == os.getpid())
    pids = [info.pid for info in topology.on_node(node) if info.pid != os.getpid()]
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(site.node_dir, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)
