"""The zygote of a node: it has imported torch, Megatron and moe_ft, and forks ranks for workers.

It never uses CUDA and starts no threads, both of which a forked process would miss. It waits for nobody, so
it always answers soon, and workers kill it if it does not. It ends with the launcher's agent, once no rank of
it runs any more; ranks end with it.

With repairs in place (link.py says when), it forks a replacement for a rank that dies, and the worker does
not learn of it. It kills ranks that hang. The node of rank 0 then also has a process that
keeps the job's store.
"""

import gc
import importlib
import importlib.util
import os
import secrets
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.forked_rank import (
    become,
    follow_parent,
    has_driver,
    run,
    why_not_to_fork,
    without_driver,
)
from moe_ft.cluster.link import (
    START,
    Pulse,
    exit_signal,
    period_s,
    token_of,
    wants_repair,
)
from moe_ft.cluster.member import Member, become_member
from moe_ft.cluster.protocol import (
    IMPORTING,
    Answer,
    RankRequest,
    receive_request,
    receive_signal,
    say,
    send_answer,
)
from moe_ft.cluster.target import Target
from moe_ft.launches import shares_store
from moe_ft.processes import set_process_name

_REQUEST_DEADLINE_S = 30.0  # from a connection to its request
_LOOK_S = 1.0  # between two looks at connections without a request
_BACKLOG = 1024
_STORE_DEADLINE_S = 60.0  # to reach the store of a start that trains
# Modules that torch imports when it first compiles. Megatron has imported the rest of the compiler by then.
_OF_COMPILER = ("torch._inductor.compile_fx", "torch.export._trace", "sympy.physics.units")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL)


def main(words: list[str]) -> None:
    """Serve workers until their agent has ended; in a rank, run it.

    Args:
        words: descriptor of a socket that is bound, the agent's process, path of the socket, modules to
            import, and the command line of ranks after "--".
    """
    own, of_ranks = words[: words.index("--")], words[words.index("--") + 1 :]
    set_process_name(IMPORTING)
    listener = socket.socket(fileno=int(own[0]))
    listener.set_inheritable(False)
    listener.listen(_BACKLOG)  # not its worker: who listens is whom the others can kill
    preload = tuple(each.removeprefix("--preload=") for each in own[3:])
    target, begin = Target(words=tuple(of_ranks), preload=preload), time.monotonic()
    blamed = import_modules(target)
    set_process_name("moe_ft_zygote")
    say(
        f"ranks are forked from process {os.getpid()}, which took {time.monotonic() - begin:.1f} s to import"
    )
    role: Role | None = None
    try:
        role = Zygote(listener, int(own[1]), blamed).serve()
    finally:
        if role is None:
            Path(own[2]).unlink(missing_ok=True)
    if role is not None:
        role()


def import_modules(target: Target) -> str:
    """Import what ranks will need, and return the module that has made it impossible to fork them, if any.

    What cannot be imported is theirs to complain about.
    """
    path, blamed = list(sys.path), ""
    sys.path.insert(0, target.first_path_of_imports)
    for name in (*target.preload, *(_OF_COMPILER if has_driver() else ())):
        top = name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            continue
        try:
            with without_driver():
                importlib.import_module(name)
        except (Exception, SystemExit) as error:
            say(f"{name} is not imported beforehand: {type(error).__name__}: {error}")
        if not blamed and why_not_to_fork():
            blamed = name
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # collections of ranks leave alone what they share, or its pages are copied
    return blamed


@dataclass(frozen=True, slots=True, eq=False)
class _Rank:
    """A rank that runs."""

    pid: int
    end: int  # a descriptor that can be read once the process has ended
    connection: socket.socket  # of its worker
    request: RankRequest
    streams: tuple[int, ...] = ()  # kept for a replacement
    member: Member | None = None
    pulse: Pulse | None = None  # with a member


Role = Callable[[], None]


class Zygote:
    """Forks ranks and watches them. Single-threaded."""

    def __init__(self, listener: socket.socket, agent_pid: int, blamed: str = "") -> None:
        """Watch the agent of the launcher, and whoever connects.

        Args:
            listener: is closed when the agent has ended.
            blamed: the imported module that has made it impossible to fork.
        """
        self._listener, self._blamed = listener, blamed or "an imported module"
        self._selector = selectors.DefaultSelector()
        self._ranks: set[_Rank] = set()
        self._callers: dict[socket.socket, float] = {}  # with the end of the time for their request
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._agent: int | None = None
        with suppress(ProcessLookupError):
            self._agent = os.pidfd_open(agent_pid)
            self._selector.register(self._agent, selectors.EVENT_READ, self._stop)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._store_pid = 0
        self._role: Role | None = None  # of a forked process

    def serve(self) -> Role | None:
        """Serve until the agent has ended and no rank runs; return what a forked process is to do."""
        while self._selector.get_map():
            for key, _ in self._selector.select(self._look_period_s()):
                if self._selector.get_map().get(key.fd) is key:  # not closed by an event before
                    key.data()
                if self._role is not None:
                    return self._role
            self._end_silent()
            self._hang_up()
        self._end_store()
        return None

    def _look_period_s(self) -> float | None:
        """Return how often to look at beats of ranks and at silent callers; None if there are none."""
        periods = [
            period_s(rank.member.link.limit_s) for rank in self._ranks if rank.member is not None
        ]
        return min(periods + [_LOOK_S] * bool(self._callers), default=None)

    def _end_silent(self) -> None:
        """Kill ranks without a beat for too long. Their death is repaired like any other, or not."""
        for rank in self._ranks:
            if rank.member is None or rank.pulse is None:
                continue
            link, silent_s = rank.member.link, rank.pulse.silent_s()
            if silent_s > link.limit_s:
                link.note_hang(silent_s)
                link.expect_beats(0)  # it is killed once
                say(
                    f"rank {rank.member.rank} (process {rank.pid}) has given no sign of life for "
                    f"{silent_s:.1f} s (in its {link.section}), and is killed"
                )
                _send(rank, signal.SIGKILL)

    def _stop(self) -> None:
        """Accept no further ranks: the agent has ended."""
        assert self._agent is not None
        self._selector.unregister(self._agent)
        self._selector.unregister(self._listener)
        self._listener.close()
        for rank in self._ranks:
            if rank.member is not None:
                rank.member.link.retire()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # no descriptor is left
            say(f"a request for a rank is refused: {error}")
            os.close(self._spare)
            self._listener.accept()[0].close()
            self._spare = os.open(os.devnull, os.O_RDONLY)
            return
        connection.setblocking(False)
        self._callers[connection] = time.monotonic() + _REQUEST_DEADLINE_S
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._serve(connection))

    def _hang_up(self) -> None:
        """Close connections over which no request has come in time."""
        now_s = time.monotonic()
        for connection in [each for each, end_s in self._callers.items() if end_s < now_s]:
            self._leave(connection)
            connection.close()

    def _leave(self, connection: socket.socket) -> None:
        del self._callers[connection]
        self._selector.unregister(connection)

    def _serve(self, connection: socket.socket) -> None:
        """Fork the rank that a worker asks for, or tell it why there is none."""
        self._leave(connection)
        try:
            request, streams = receive_request(connection)
        except (OSError, ValueError, TypeError, KeyError) as error:
            say(f"a request for a rank was not understood: {error}")
            connection.close()
            return
        connection.setblocking(True)
        answer = Answer.FAILED
        try:
            if not (problem := why_not_to_fork()):
                member = Member(_assignment_of(request)) if _has_member(request) else None
                if member is not None and not member.link.token and member.rank == 0:
                    member.link.token = self._start_store(request)
                if self._role is None:
                    self._fork(request, tuple(streams), connection, member)
                return
            answer = Answer.UNUSABLE
            say(
                f"no rank is forked: {self._blamed} {problem}, which a forked process would lack. Leave this "
                "module out of --preload, or let it do that when a rank first uses it"
            )
        except OSError as error:
            say(f"{_name_of(request)} cannot be forked: {error}")
        for each in streams:
            os.close(each)
        with suppress(OSError), connection:
            send_answer(connection, answer)

    def _fork(
        self,
        request: RankRequest,
        streams: tuple[int, ...],
        connection: socket.socket,
        member: Member | None,
    ) -> None:
        """Fork a rank, and tell its worker; raise OSError if it cannot be forked, now."""
        pid = os.fork()
        if pid == 0:
            self._forget(connection)
            self._role = lambda: _be_rank(request, streams, member)
            return
        try:
            end = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        if member is None:
            for each in streams:
                os.close(each)
            streams = ()
        pulse = None if member is None else Pulse(member.link)
        rank = _Rank(pid, end, connection, request, streams, member, pulse)
        self._ranks.add(rank)
        self._selector.register(rank.end, selectors.EVENT_READ, lambda: self._reap(rank))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(rank))
        with suppress(OSError):  # its worker is gone: `_hear` notices
            send_answer(connection, Answer.RUNS, pid)

    def _start_store(self, request: RankRequest) -> str:
        """Fork the process that keeps the store of a start, unless the launcher does; return its token."""
        # It imports torch, as a script that repairs does anyway.
        from moe_ft.cluster import job_store

        self._end_store()
        if shares_store(request.environment):
            return ""
        try:
            listener = job_store.listen(request.environment)
        except (OSError, KeyError, ValueError) as error:
            say(f"nothing can listen at MASTER_ADDR and MASTER_PORT, where ranks meet: {error}")
            return ""
        token, zygote = secrets.token_hex(16), os.getpid()
        try:
            pid = os.fork()
        except OSError:
            listener.close()
            raise
        if pid == 0:
            self._forget()
            os.setsid()
            follow_parent(zygote)
            self._role = lambda: job_store.serve(listener, request.environment, token)
        else:
            listener.close()
            self._store_pid = pid
        return token

    def _end_store(self) -> None:
        """End the store of the start before: the next one may listen at the same port."""
        if self._store_pid:
            with suppress(ProcessLookupError):
                os.kill(self._store_pid, signal.SIGKILL)
            os.waitpid(self._store_pid, 0)
            self._store_pid = 0

    def _forget(self, connection: socket.socket | None = None) -> None:
        """Close in a forked process what belongs to the zygote, and a connection."""
        for rank in self._ranks:
            for each in rank.streams:
                os.close(each)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()
        os.close(self._spare)
        if connection is not None:
            connection.close()

    def _hear(self, rank: _Rank) -> None:
        """Pass a signal on; kill a rank whose worker is gone."""
        heard = receive_signal(rank.connection)
        number = signal.SIGKILL if heard is None else heard
        if rank.member is not None and number in _ENDING:
            rank.member.link.retire()
        if heard is None:
            self._selector.unregister(rank.connection)
            name = _name_of(rank.request)
            say(f"the process that stood for {name} has ended: {name} is killed")
        if number in signal.valid_signals():
            _send(rank, number)

    def _reap(self, rank: _Rank) -> None:
        """Replace a rank that has died, or tell the worker how it has ended."""
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
        if rank.connection in self._selector.get_map():
            self._selector.unregister(rank.connection)
        if dead is not None and can_replace and status:
            try:
                if not why_not_to_fork():
                    say(f"rank {dead.rank} has died ({_end_of(status)}), and is replaced")
                    member = dead.replacement(died_s)
                    self._fork(rank.request, rank.streams, rank.connection, member)
                    return
            except OSError as error:
                say(f"rank {dead.rank} cannot be replaced: {error}")
        for each in rank.streams:
            os.close(each)
        with suppress(OSError):
            send_answer(rank.connection, Answer.ENDED, status)
        rank.connection.close()


def _name_of(request: RankRequest) -> str:
    """Return what messages call a process: `keep --nodes` has one without a number for each node."""
    number = request.environment.get("RANK")
    return "the node's process" if number is None else f"rank {number}"


def _end_of(status: int) -> str:
    if os.WIFSIGNALED(status):
        return str(signal.strsignal(os.WTERMSIG(status)))
    return f"exit code {os.waitstatus_to_exitcode(status)}"


def _send(rank: _Rank, number: int) -> None:
    """Send a signal to a rank and what it has started."""
    try:
        os.killpg(rank.pid, number)
    except ProcessLookupError:  # it has not made its group yet, or has ended
        with suppress(ProcessLookupError):
            os.kill(rank.pid, number)


def _has_member(request: RankRequest) -> bool:
    """Return whether a process is a rank that may be replaced."""
    return "RANK" in request.environment and wants_repair(request.words)


def _assignment_of(request: RankRequest) -> Assignment:
    """Return the assignment of the first process of a rank on this node."""
    variables, token = request.environment, token_of(request.environment)
    start = int(variables.get(START) or variables.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return Assignment(
        rank=int(variables["RANK"]),
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        world_size=int(variables["WORLD_SIZE"]),
        node=variables.get("MOE_FT_NODE_ID", ""),
        start=start,
        begun_from=start - 1,
        round=request.round,
        died_s=request.died_s if request.round else None,
        lost_node=request.lost_node,
        is_watched=bool(token),
        token=token,
    )


def _be_rank(request: RankRequest, streams: tuple[int, ...], member: Member | None) -> None:
    """Run a rank. A replacement first reports that its predecessor has died: the others wait for it."""
    number = exit_signal(request.words)
    if number is not None and number not in _ENDING:
        signal.signal(number, signal.SIG_IGN)  # it would die of it until Megatron has its handler
    become(request, streams)
    become_member(member)
    if member is not None and member.is_replacement:
        # It imports torch, as a script that repairs does anyway.
        from moe_ft.cluster import job_store

        store = job_store.connect(request.environment, member.link, _STORE_DEADLINE_S)
        member.connect(store)
        member.take_place()
    run(Target(words=request.words, preload=()))


if __name__ == "__main__":
    main(sys.argv[1:])
