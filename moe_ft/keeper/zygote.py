"""The zygote of a node: it has imported torch, Megatron and moe_ft, and forks ranks for workers.

It never uses CUDA and starts no threads, both of which a forked process would miss. It ends with the
launcher's agent, once no rank of it runs any more; ranks end with it.
"""

import gc
import importlib
import importlib.util
import os
import selectors
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moe_ft.keeper.forked_rank import become, run
from moe_ft.keeper.protocol import NO_RANK, RankRequest, receive_request, send_number
from moe_ft.keeper.target import Target

_REQUEST_DEADLINE_S = 30.0


def main(words: list[str]) -> None:
    """Serve workers until their agent has ended; in a rank, run it.

    Args:
        words: descriptor of a socket that listens, the agent's process, path of the socket, modules to
            import, and the command line of ranks after "--".
    """
    own, of_ranks = words[: words.index("--")], words[words.index("--") + 1 :]
    listener = socket.socket(fileno=int(own[0]))
    preload = tuple(each.removeprefix("--preload=") for each in own[3:])
    target = Target(words=tuple(of_ranks), preload=preload)
    begin = time.monotonic()
    import_modules(target)
    _say(
        f"ranks are forked from process {os.getpid()}, which took {time.monotonic() - begin:.1f} s to import"
    )
    zygote = Zygote(listener, int(own[1]))
    try:
        request = zygote.serve()
    except BaseException:
        Path(own[2]).unlink(missing_ok=True)
        raise
    if request is not None:
        run(Target(words=request.words, preload=()))
    else:
        Path(own[2]).unlink(missing_ok=True)


def import_modules(target: Target) -> None:
    """Import what ranks will need; what cannot be imported is theirs to complain about."""
    path = list(sys.path)
    sys.path.insert(0, target.first_path_of_imports)
    for name in target.preload:
        top = name.partition(".")[0]
        if top not in sys.modules and importlib.util.find_spec(top) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            _say(f"{name} is not imported beforehand: {type(error).__name__}: {error}")
    sys.path[:] = path
    gc.collect()
    gc.freeze()  # collections of ranks leave alone what they share, or its pages are copied


@dataclass(frozen=True, slots=True, eq=False)
class _Rank:
    """A rank that runs, and the connection of its worker."""

    pid: int
    end: int  # a descriptor that can be read once the process has ended
    connection: socket.socket


class Zygote:
    """Forks ranks and watches them. Single-threaded."""

    def __init__(self, listener: socket.socket, agent_pid: int) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._ranks: set[_Rank] = set()
        self._agent: int | None = None
        with suppress(ProcessLookupError):
            self._agent = os.pidfd_open(agent_pid)
            self._selector.register(self._agent, selectors.EVENT_READ, self._stop)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._forked: RankRequest | None = None

    def serve(self) -> RankRequest | None:
        """Serve until the agent has ended and no rank runs; in a rank, return its request at once."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if key.fileobj in self._selector.get_map():  # not closed by an event before
                    key.data()
                if self._forked is not None:
                    return self._forked
        return None

    def _stop(self) -> None:
        """Accept no further ranks: the agent has ended."""
        assert self._agent is not None
        self._selector.unregister(self._agent)
        self._selector.unregister(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(_REQUEST_DEADLINE_S)
        try:
            request, streams = receive_request(connection)
        except (OSError, ValueError, TypeError, KeyError) as error:
            _say(f"a request for a rank was not understood: {error}")
            connection.close()
            return
        connection.settimeout(None)
        if problem := why_not_to_fork():
            _say(f"no rank is forked: {problem}")
            for each in streams:
                os.close(each)
            with suppress(OSError), connection:
                send_number(connection, NO_RANK)
            return
        pid = os.fork()
        if pid == 0:
            self._forget()
            connection.close()
            become(request, streams)
            self._forked = request
            return
        for each in streams:
            os.close(each)
        rank = _Rank(pid, os.pidfd_open(pid), connection)
        self._ranks.add(rank)
        self._selector.register(rank.end, selectors.EVENT_READ, lambda: self._reap(rank))
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(rank))
        with suppress(OSError):  # its worker is gone: `_hear` notices
            send_number(connection, pid)

    def _forget(self) -> None:
        """Close in a rank what belongs to the zygote."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            else:
                key.fileobj.close()  # type: ignore[attr-defined]
        self._selector.close()

    def _hear(self, rank: _Rank) -> None:
        """Pass a signal on; kill a rank whose worker is gone."""
        try:
            message = rank.connection.recv(8)
        except OSError:
            message = b""
        number = signal.SIGKILL if not message else signal.Signals(message[-1])
        if not message:
            self._selector.unregister(rank.connection)
        try:
            os.killpg(rank.pid, number)
        except ProcessLookupError:  # it has not made its group yet, or has ended
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)

    def _reap(self, rank: _Rank) -> None:
        """Tell the worker how its rank has ended."""
        _, status = os.waitpid(rank.pid, 0)
        self._ranks.discard(rank)
        self._selector.unregister(rank.end)
        os.close(rank.end)
        if rank.connection in self._selector.get_map():
            self._selector.unregister(rank.connection)
        with suppress(OSError):
            send_number(rank.connection, status)
        rank.connection.close()


def why_not_to_fork() -> str:
    """Return what would be broken in a process that is forked now; empty if nothing is known."""
    if threading.active_count() > 1:
        names = ", ".join(each.name for each in threading.enumerate()[1:])
        return f"an imported module has started threads ({names})"
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            if path.startswith("/dev/nvidia"):
                return f"an imported module has used CUDA ({path} is open)"
    return ""


def _say(line: str) -> None:
    print(f"moe_ft: keep: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
