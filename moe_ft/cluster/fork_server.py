"""The fork server of a node: it has imported torch, Megatron and moe_ft, and forks ranks for the agent.

It never uses CUDA and starts no threads, both of which a forked process would miss. It waits for nobody, so
it always answers soon, and the agent kills it if it does not. It ends with its agent, and ranks end with it.

With repairs in place (link.py says when), it forks a replacement for a rank that dies, and the agent does not
learn of it. It kills ranks that hang.
"""

import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from moe_ft.cluster import job_store
from moe_ft.cluster.forked_rank import (
    become,
    has_driver,
    run,
    why_not_to_fork,
    without_driver,
)
from moe_ft.cluster.forks import (
    FORWARDED,
    REQUEST,
    Answers,
    Ask,
    Ended,
    Fork,
    Role,
    receive,
    send,
)
from moe_ft.cluster.link import Pulse, exit_signal, period_s, wants_repair
from moe_ft.cluster.member import Member, become_member
from moe_ft.cluster.target import Target, is_found
from moe_ft.processes import follow_parent, set_process_name
from moe_ft.saying import say, silence_dependencies, warn

_STORE_DEADLINE_S = 60.0  # to reach the store of a start that trains
_ALLOCATOR = "JE_ARROW_MALLOC_CONF"  # settings of the allocator of pyarrow; the last one holds
_FAILED = 1 << 8  # status of a process that has ended with code 1
# Modules that torch imports when it first compiles. Megatron has imported the rest of the compiler by then.
_OF_COMPILER = ("torch._inductor.compile_fx", "torch.export._trace", "sympy.physics.units")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)


def serve_forks(target: Target, connection: socket.socket) -> None:
    """Import, and serve the agent until it has ended; in a rank, run it."""
    os.setsid()
    # SLURM signals all processes of a step, and ranks would end with this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    for each in FORWARDED:  # those of the agent, if it has had a fork server before
        signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
    set_process_name("moe_ft_imports")
    # Bridge imports pyarrow, whose allocator starts a thread otherwise: no rank could be forked.
    settings = os.environ.get(_ALLOCATOR), "background_thread:false"
    os.environ[_ALLOCATOR] = ",".join(filter(None, settings))
    # torch asks the driver for GPUs then, and not CUDA, which a process must not use before it forks.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    silence_dependencies()
    begin_s = time.monotonic()
    blamed = import_modules(target)
    set_process_name("moe_ft_forks")
    say(
        f"ranks are forked from process {os.getpid()}, which took "
        f"{time.monotonic() - begin_s:.1f} s to import"
    )
    role = ForkServer(target, connection, blamed).serve()
    if role is not None:
        role()


def import_modules(target: Target) -> str:
    """Import what ranks will need, and return the module that has made it impossible to fork them, if any.

    What cannot be imported is theirs to complain about.
    """
    path, blamed = list(sys.path), ""
    sys.path.insert(0, target.first_path_of_imports)
    for each in (*target.preload, *(_OF_COMPILER if has_driver() else ())):
        name, _, function = each.partition(":")
        if name not in sys.modules and not is_found(name):
            continue
        try:
            with without_driver():
                module = importlib.import_module(name)
                if function:
                    getattr(module, function)()
        except (Exception, SystemExit) as error:
            warn(f"{name} is not imported beforehand: {type(error).__name__}: {error}")
        if not blamed and why_not_to_fork():
            blamed = name
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # collections of ranks leave alone what they share, or its pages are copied
    return blamed


@dataclass(frozen=True, slots=True, eq=False)
class _ForkedRank:
    """A rank that runs."""

    pid: int
    end: int  # a descriptor that can be read once the process has ended
    request: Fork
    member: Member | None = None  # with repairs
    pulse: Pulse | None = None  # of a member

    def retire(self) -> None:
        """Have its end be taken as it is."""
        if self.member is not None:
            self.member.link.retire()


class ForkServer:
    """Forks ranks and watches them. Single-threaded."""

    def __init__(self, target: Target, connection: socket.socket, blamed: str = "") -> None:
        """Have no rank yet.

        Args:
            connection: to the agent.
            blamed: the imported module that has made it impossible to fork.
        """
        self._target = target
        self._connection = connection
        self._blamed = blamed or "an imported module"
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ, self._serve)
        self._ranks: set[_ForkedRank] = set()
        self._has_agent = True
        self._role: Role | None = None  # of a forked process

    def serve(self) -> Role | None:
        """Serve until the agent has ended; return what a forked process is to do."""
        send(self._connection, Answers())
        while self._has_agent:
            for key, _ in self._selector.select(self._look_period_s()):
                if self._selector.get_map().get(key.fd) is key:  # not closed by an event before
                    key.data()
                if self._role is not None:
                    return self._role
            self._end_silent()
        return None

    def _look_period_s(self) -> float | None:
        """Return how often to look at beats of ranks; None if there are none."""
        members = [rank.member for rank in self._ranks if rank.member is not None]
        return min((period_s(each.link.limit_s) for each in members), default=None)

    def _end_silent(self) -> None:
        """Kill ranks without a beat for too long. Their death is repaired like any other, or not."""
        for rank in self._ranks:
            if rank.member is None or rank.pulse is None:
                continue
            link, silent_s = rank.member.link, rank.pulse.silent_s()
            if silent_s > link.limit_s:
                link.note_hang(silent_s)
                link.expect_beats(0)  # it is killed once
                warn(
                    f"rank {rank.member.rank} (process {rank.pid}) has given no sign of life for "
                    f"{silent_s:.1f} s (in its {link.section}), and is killed"
                )
                _send_signal(rank, signal.SIGKILL)

    def _serve(self) -> None:
        """Do what the agent asks for."""
        request = receive(self._connection, REQUEST)
        if request is None:
            self._has_agent = False
        elif isinstance(request, Ask):
            self._answer(Answers())
        elif isinstance(request, Fork):
            self._fork_first(request)
        else:
            for rank in self._ranks:
                if rank.request.number in request.numbers:
                    if request.signal in _ENDING:
                        rank.retire()
                    _send_signal(rank, request.signal)

    def _answer(self, answer: Answers | Ended) -> None:
        with suppress(OSError):  # the agent has ended
            send(self._connection, answer)

    def _fork_first(self, request: Fork) -> None:
        """Fork the first process of a rank on this node."""
        rank = request.assignment.rank
        try:
            if not (problem := why_not_to_fork()):
                repairs = wants_repair(self._target.words)
                self._fork(request, Member(request.assignment) if repairs else None)
                return
            warn(
                f"rank {rank} is not forked: {self._blamed} {problem}, which a forked process would lack. "
                "Leave this module out of --preload, or let it do that when a rank first uses it"
            )
        except OSError as error:
            warn(f"rank {rank} cannot be forked: {error}")
        self._answer(Ended(request.number, _FAILED))

    def _fork(self, request: Fork, member: Member | None) -> None:
        """Fork a rank; raise OSError if it cannot be forked now."""
        act, server = partial(_be_rank, self._target, request, member), os.getpid()
        pid = os.fork()
        if pid == 0:
            self._forget()
            follow_parent(server)
            self._role = act
            return
        try:
            end = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        pulse = None if member is None else Pulse(member.link)
        rank = _ForkedRank(pid, end, request, member, pulse)
        self._ranks.add(rank)
        self._selector.register(rank.end, selectors.EVENT_READ, lambda: self._reap(rank))

    def _forget(self) -> None:
        """Close in a forked process what belongs to the fork server."""
        for rank in self._ranks:
            os.close(rank.end)
        self._selector.close()
        self._connection.close()

    def _reap(self, rank: _ForkedRank) -> None:
        """Replace a rank that has died, or tell the agent how it has ended."""
        died_s, dead = time.time(), rank.member
        can_replace = dead is not None and dead.link.is_armed
        if can_replace:
            # Processes that it has started share its locks and connections.
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
        _, status = os.waitpid(rank.pid, 0)
        self._ranks.discard(rank)
        self._selector.unregister(rank.end)
        os.close(rank.end)
        if dead is not None and can_replace and status:
            try:
                if not why_not_to_fork():
                    warn(f"rank {dead.rank} has died ({_end_of(status)}), and is replaced")
                    self._fork(rank.request, dead.replacement(died_s))
                    return
            except OSError as error:
                warn(f"rank {dead.rank} cannot be replaced: {error}")
        self._answer(Ended(rank.request.number, status))


def _end_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        return str(signal.strsignal(os.WTERMSIG(status)))
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _send_signal(rank: _ForkedRank, number: int) -> None:
    """Send a signal to a rank and what it has started."""
    try:
        os.killpg(rank.pid, number)
    except ProcessLookupError:  # it has not made its group yet, or has ended
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def _be_rank(target: Target, request: Fork, member: Member | None) -> None:
    """Run a rank. A replacement first reports that its predecessor has died: the others wait for it."""
    number = exit_signal(target.words)
    if number is not None and number not in _ENDING:
        signal.signal(number, signal.SIG_IGN)  # it would die of it until Megatron has its handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    become(f"rank_{request.assignment.rank}", request.environment)
    become_member(member, request.assignment)
    if member is not None and member.is_replacement:
        member.connect(job_store.connect(request.environment, member.token, _STORE_DEADLINE_S))
        member.take_place()
    run(target)
