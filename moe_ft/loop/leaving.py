"""Ranks that leave: their processes, their meeting, and the breakpoint that each writes.

A rank writes on SIGTERM, and after an exception that is no refusal. A repair in place begins with it too. So
does the end of training on this rank if others have failed: its last state is nowhere else.

A breakpoint comes before any report, because a launcher kills the process some seconds later. Then the rank
waits until the log of what it has sent is committed: other stages may need it to reach this state. The state
and the lock around it are moe_ft/engine/breakpoints.py, the log moe_ft/engine/boundary/log.py.

Breakpoints are of use only where all are of one iteration. A SIGTERM that comes in the middle of an optimizer
step finds some ranks before it and others after it. Each rank writes at once and says in the job's store
which iteration that is. If others are one iteration further, it steps and writes again; those wait for it.
Nobody waits once a rank is known to be gone, or to have no breakpoint.
"""

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from msgspec.json import Decoder

from moe_ft.cluster.member import own_member
from moe_ft.cluster.signed_store import SignedStore, StoreMeeting
from moe_ft.engine import exchange
from moe_ft.engine.background import BackgroundPart, device_of_this_thread
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.engine.breakpoints import BreakpointResult, Breakpoints
from moe_ft.errors import ConfigError, CorruptionError, UnrecoverableError
from moe_ft.events import EventLog
from moe_ft.loop.listeners import LoopState
from moe_ft.processes import has_ended, process_namespace
from moe_ft.recovery.failures import is_rejected
from moe_ft.saying import say, warn

# Torchrun and SLURM kill a process 30 s after SIGTERM; its report needs some of that.
_LEAVING_S = 25.0
_MEETING_S = 5.0  # for ranks that say nothing and cannot be seen: of a node that is gone
_STEP_S = 5.0  # for those that are one iteration behind
_ANSWER_S = 2.0
_MIN_POLL_S = 0.02
_NO_ANSWER = (RuntimeError, OSError)  # the store's host may be what died
# A device leaves a collective that is aborted, and its step, without an exception.
_PROCESS = Decoder(tuple[str, int, str])  # namespace, process id, token
_UNCERTAIN = "it is not known whether the device had received all gradients when it made the step"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProcesses:
    """Processes of the ranks as one rank knows them: none before the ranks have met.

    Attributes:
        pids: process ids, by rank, of the ranks whose processes this one can see.
        token: signs what the ranks say in the job's store when they leave. Before they have met, it is one
            that anybody knows, unless all were forked with one.
    """

    pids: Mapping[int, int] = field(default_factory=dict)
    token: str = field(default_factory=lambda: _forked_token() or "none yet")


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRank:
    """This rank in the job, which torch forgets when its groups are aborted; `store` is that of the job."""

    store: Any
    rank: int
    world_size: int


def find_job_rank() -> JobRank | None:
    """Return this rank in the job; None without groups."""
    if not dist.is_initialized():
        return None
    store = dist.distributed_c10d._get_default_store()
    return JobRank(store=store, rank=dist.get_rank(), world_size=dist.get_world_size())


def meet_processes() -> JobProcesses:
    """Meet the other ranks. Called by all ranks."""
    own = (process_namespace(), os.getpid(), secrets.token_hex(16))
    everyone = exchange.meet(own, _PROCESS)
    pids = {
        rank: pid
        for rank, (namespace, pid, _) in enumerate(everyone)
        if namespace and namespace == own[0]
    }
    # A repair may fail on some ranks before they meet: they sign with what all were forked with.
    return JobProcesses(pids=pids, token=_forked_token() or everyone[0][2])


def _forked_token() -> str:
    member = own_member()
    return "" if member is None else member.token


def gone_ranks(pids: Mapping[int, int]) -> frozenset[int]:
    """Return the ranks whose processes have ended, if only just."""
    return frozenset(rank for rank, pid in pids.items() if has_ended(pid))


class BreakpointMeeting:
    """One rank's part in a meeting of a start. Used by one thread at a time."""

    def __init__(
        self,
        own: JobRank,
        incarnation: int,
        processes: JobProcesses,
    ) -> None:
        self._world_size = own.world_size
        self._pids = processes.pids
        self._prefix = f"moe_ft/breakpoints/{incarnation}"
        self._meeting = StoreMeeting(
            SignedStore(own.store, lambda: processes.token),
            own.rank,
            own.world_size,
            least_poll_s=_MIN_POLL_S,
            answer_s=_ANSWER_S,
        )

    def cannot_step(self) -> None:
        """Say that this rank has no breakpoint, or stays where it is: nobody need wait."""
        with suppress(*_NO_ANSWER):
            self._meeting.ask(lambda store: store.set(f"{self._prefix}/alone", True))

    def agree(self, iteration: int) -> int | None:
        """Return the iteration of which all can have a breakpoint; None if they cannot."""
        found = self._say_and_wait("at", iteration, _MEETING_S)
        return None if found is None else max(found.values())

    def wait_for_others(self) -> None:
        """Say that this rank is done, and wait for those that step: the step may need this rank."""
        self._say_and_wait("done", True, _STEP_S)

    def _say_and_wait(self, what: str, value: int, seconds: float) -> dict[int, int] | None:
        """Say something, and return what all ranks have said, by rank; None if some will not."""
        try:
            key = f"{self._prefix}/{what}"
            said = self._meeting.exchange(key, value, seconds, self._gives_up)
        except _NO_ANSWER:
            return None
        return said if said and len(said) == self._world_size else None

    def _gives_up(self, seconds: float) -> bool:
        if gone_ranks(self._pids):
            self.cannot_step()
        if self._meeting.ask(lambda store: store.get(f"{self._prefix}/alone")):
            return True
        time.sleep(seconds)
        return False


class BreakpointWriter:
    """Writes once in a start of checkpointing, whoever asks first; others wait for that. Any thread."""

    def __init__(self, loop: LoopState, event_log: EventLog) -> None:
        self._loop = loop
        self._log = event_log
        self._breakpoints: Breakpoints | None = None
        self._boundary: BoundaryLog | None = None
        self._processes = JobProcesses()
        self._abort: Callable[[], None] | None = None
        self._use_device: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._has_written = False

    def use(
        self,
        breakpoints: Breakpoints,
        processes: JobProcesses,
        *,
        is_on_gpu: bool,
        boundary: BoundaryLog | None = None,
    ) -> None:
        """Begin to write what these objects hold; before, nothing is written. Training thread."""
        self._breakpoints = breakpoints
        self._processes = processes
        self._boundary = boundary
        self._has_written = False
        self._abort = _abort_collectives if is_on_gpu else None
        self._use_device = device_of_this_thread()

    def on_failure(self, error: Exception) -> None:
        """Write because of an exception, unless the state is what has failed. Training thread."""
        if self._breakpoints is None:
            return
        self._breakpoints.break_off()
        if isinstance(error, ConfigError | UnrecoverableError):
            self._breakpoints.refuse("the start or the state was refused")
        elif isinstance(error, CorruptionError):
            self._breakpoints.refuse("a check has found corruption")
        elif is_rejected(error):
            self.refuse_rejected()
        self._write(type(error).__name__, can_step=False)

    def refuse_rejected(self) -> None:
        """Leave no breakpoint of a state that leads to a rejected result. Training thread."""
        if self._breakpoints is not None:
            self._breakpoints.refuse("a result was rejected: training cannot continue from there")

    def on_end(self) -> None:
        """Write because training has ended here, and its last state is nowhere else. Training thread."""
        self._write("the end of training", can_step=False, may_hang=False)

    def on_repair(self, iteration: int) -> None:
        """Write because another rank has died and is replaced: this one has left the given iteration.

        Its groups have ended, and stay: nothing is aborted.
        """
        if self._breakpoints is None:
            return
        if self._abort is not None:
            self._breakpoints.refuse_later_than(iteration, _UNCERTAIN)
        self._breakpoints.break_off()
        self._write("repair", can_step=False, may_hang=False)

    def on_sigterm(self) -> None:
        """Write because the launcher ends the job. A thread of its own."""
        self._use_device()
        self._write("SIGTERM", can_step=self._abort is None)

    def _write(self, reason: str, *, can_step: bool, may_hang: bool = True) -> None:
        with self._lock:
            if self._has_written or self._breakpoints is None:
                return
            self._has_written = True
            start_s = time.perf_counter()
            own = find_job_rank()  # before an abort, after which torch knows no group
            if self._abort is not None and may_hang:
                self._abort()
            if own is None or own.world_size == 1:
                written = self._breakpoints.write()
            else:
                # A step may need the ranks that wait for it: say that it is under way before waiting for it.
                written = self._breakpoints.write(waits=not can_step)
                written = self._meet(own, self._breakpoints, written, can_step=can_step)
            self._tell(reason, written, time.perf_counter() - start_s)
            self._flush(_LEAVING_S - (time.perf_counter() - start_s))

    def _meet(
        self, own: JobRank, breakpoints: Breakpoints, written: BreakpointResult, *, can_step: bool
    ) -> BreakpointResult:
        """Bring the breakpoints of all ranks to one iteration, if that takes one step at most."""
        meeting = BreakpointMeeting(own, self._log.incarnation, self._processes)
        at = written.stepping_to if written.iteration is None else written.iteration
        if at is None or not can_step:
            meeting.cannot_step()
            return written
        target = meeting.agree(at)
        if target is None:
            return breakpoints.write() if written.iteration is None else written
        if target != written.iteration and breakpoints.wait_for_iteration(target, _STEP_S):
            again = breakpoints.write()
            # If this could not begin, the breakpoint that was written first is still there.
            written = again if again.iteration is not None else written
        meeting.wait_for_others()
        return written

    def _flush(self, rest_s: float) -> None:
        """Wait for the log of what was sent, as long as the launcher lets this rank live."""
        if self._boundary is None or self._boundary.flush(max(0.0, rest_s)):
            return
        reason = (
            f"the rank has left, and what it sent last was not committed within {_LEAVING_S:.0f} s: the next "
            "recovery may be global"
        )
        part = BackgroundPart.BOUNDARY_LOG
        warn(f"rank {self._log.rank}, {part}: {reason}")
        self._log.write("degraded", self._loop.iteration, part=part.value, reason=reason)

    def _tell(self, reason: str, written: BreakpointResult, seconds: float) -> None:
        rank, iteration = self._log.rank, written.iteration
        if iteration is None:
            warn(f"rank {rank} left no breakpoint: {written.problem}")
        else:
            say(f"rank {rank} left a breakpoint of iteration {iteration}")
        self._log.write(
            "breakpoint",
            self._loop.iteration if iteration is None else iteration,
            reason=reason,
            bytes=written.num_bytes,
            copy_s=written.seconds,
            seconds=seconds,
            problem=written.problem,
        )


def _abort_collectives() -> None:
    """Abort the collectives that the device may hang in: a copy would wait for them."""
    with suppress(Exception):  # of whatever kind: the copy is tried all the same
        dist.distributed_c10d._abort_process_group()
