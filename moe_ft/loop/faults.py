"""Faults of --moe-ft-inject-fault, which a rank inflicts on itself, each once per event log.

Names and parsing are moe_ft/faults.py.
"""

import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, override

import torch
import torch.distributed as dist

from moe_ft.errors import InjectedFaultError
from moe_ft.events import EventLog
from moe_ft.faults import FaultKind, FaultSpec, FlipTarget, Phase
from moe_ft.loop.leaving import meet_processes
from moe_ft.loop.listeners import Built, LoopListener
from moe_ft.saying import say
from moe_ft.state import flips


@dataclass(frozen=True, kw_only=True, slots=True)
class LostNode:
    """Parts of this node that are lost with its power: its ranks, and its memory of the job."""

    pids: tuple[int, ...]
    directory: Path


class Faults(LoopListener):
    """Fires the faults of this rank at their phases, on the thread that is in the phase."""

    def __init__(self, faults: Sequence[FaultSpec], event_log: EventLog) -> None:
        self._faults = tuple(fault for fault in faults if fault.rank == event_log.rank)
        self._event_log = event_log
        self._find_node: Callable[[], LostNode] | None = None
        self._needs_pids = any(fault.kind is FaultKind.TERMINATE for fault in faults)
        self._pids: Mapping[int, int] = {}
        self._built: Built | None = None
        self._call_off: dict[FaultSpec, Callable[[], None]] = {}  # flips that wait for a tensor

    def after_setup(self, built: Built) -> None:
        """Learn which processes a fault of kind terminate ends. Called by all ranks."""
        self._built = built
        if self._needs_pids and dist.is_initialized():
            self._pids = meet_processes().pids

    def set_node(self, find_node: Callable[[], LostNode]) -> None:
        """Set what a fault of kind lose-node calls: only ranks that have met know what to destroy."""
        self._find_node = find_node

    @override
    def waits_for(self, iteration: int, phase: Phase) -> bool:
        return any(fault.is_due(iteration, phase) for fault in self._faults)

    def enter_phase(self, iteration: int, phase: Phase) -> None:
        """Inflict the faults of this phase that have not fired before, if any. Any thread.

        Raises:
            InjectedFaultError: for faults of kind exception.
        """
        for fault in self._faults:
            if not fault.is_due(iteration, phase):
                continue
            if fault.target is not None:
                self._flip(fault, fault.target)
            elif self._claim(fault):
                self._event_log.write(
                    "fault_injected", iteration, kind=fault.kind.value, phase=phase.value
                )
                self._inflict(fault)

    def _claim(self, fault: FaultSpec) -> bool:
        """Leave the fault's marker; return False if an earlier incarnation left it."""
        # Several equal faults on a command line are one fault.
        name = f"fault_{fault}".replace(":", "_").replace("@", "_")
        try:
            os.close(os.open(self._event_log.directory / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _flip(self, fault: FaultSpec, target: FlipTarget) -> None:
        """Flip a bit of a tensor as soon as that is there; if it was awaited before, only now."""
        self._call_off.pop(fault, lambda: None)()
        number = fault.rank + fault.iteration

        def flip(name: str, tensor: torch.Tensor) -> None:
            if not self._claim(fault):
                return
            index, bit = flips.flip_bit(tensor, number, fault.bit)
            self._event_log.write(
                "fault_injected",
                fault.iteration,
                kind=fault.kind.value,
                phase=fault.phase.value,
                target=target.value,
                parameter=name,
                index=index,
                bit=bit,
            )
            say(f"rank {fault.rank} inflicts {fault} on itself")

        assert self._built is not None
        self._call_off[fault] = flips.arm(target, self._built, number, flip)

    def suspend(self, iteration: int) -> None:
        """Call off flips that wait for a tensor."""
        while self._call_off:
            self._call_off.popitem()[1]()

    def _inflict(self, fault: FaultSpec) -> None:
        say(f"rank {fault.rank} inflicts {fault} on itself")
        if fault.kind is FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.kind is FaultKind.HANG:
            _hang()
        elif fault.kind is FaultKind.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
            return  # somebody has it continue
        elif fault.kind is FaultKind.LOSE_NODE and self._find_node is not None:
            _lose(self._find_node())
        elif fault.kind is FaultKind.TERMINATE:
            for pid in self._pids.values() or (os.getpid(),):
                os.kill(pid, signal.SIGTERM)
            return
        raise InjectedFaultError(f"--moe-ft-inject-fault {fault}")


def _lose(node: LostNode) -> None:
    """Leave no process and no memory of this node, as the loss of its power does."""
    for pid in node.pids:
        if pid != os.getpid():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(node.directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _hang() -> NoReturn:
    while True:
        time.sleep(3600)
