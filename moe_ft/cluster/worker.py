"""`moe_ft keep`, which torchrun starts as a rank: it has a zygote fork the rank, and stands for it.

It uses the standard library alone and is there in a moment. It passes signals on, ends as the rank ends, and
takes the rank with it if it is killed. The first worker of a node starts the zygote (zygote.py), which lives
as long as the launcher's agent and so serves all restarts. A zygote that should answer and does not, such as
one that is stopped, is killed with its ranks.
"""

import hashlib
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from moe_ft.cluster.protocol import (
    FORWARDED,
    IMPORTING,
    Answer,
    RankRequest,
    peer_pid,
    receive_answer,
    say,
    send_request,
    send_signal,
)
from moe_ft.cluster.target import Target, read_target
from moe_ft.errors import UnsafePathError
from moe_ft.files.private_files import make_private, make_root
from moe_ft.processes import has_ended, is_stopped, process_name, start_ticks

NODE = "moe_ft.cluster.node"
_START_DEADLINE_S = 60.0  # until a zygote listens
_POLL_S = 0.02
_LOOK_S = 1.0
# Looks at a zygote without an answer. A look counts only if this worker ran, so a node that stood still is
# not held against the zygote.
_MOST_LOOKS = 30
_MOST_LOOKS_AT_IMPORTS = 900
_LOOKS_PER_LINE = 60
_KILLED_S = 10.0
_MOST_ZYGOTES = 2  # that end, or are killed, before they answer


def main(words: Sequence[str]) -> NoReturn:
    """Run a rank, from the words of the command line after `keep`."""
    target = read_target(words)
    own_words, environment, agent_pid = target.words, dict(os.environ), os.getppid()
    if target.of_node:
        own_words, agent_pid = ("-m", NODE, *target.words), os.getpid()
        try:
            environment |= target.of_node | {"MOE_FT_KEEP_SOCKET": str(socket_path(agent_pid))}
        except (OSError, UnsafePathError) as error:
            _run_here(target, f"there is no place for a process to fork ranks from ({error})")
        environment.pop("RANK", None)  # of the launcher: it has one process a node
    elif "TORCHELASTIC_RUN_ID" not in os.environ:
        _run_here(target, "torchrun has not started this process, so nothing would restart it")
    os.umask(mask := os.umask(0))
    request = RankRequest(
        words=own_words,
        environment=environment,
        folder=os.getcwd(),
        mask=mask,
        cpus=tuple(sorted(os.sched_getaffinity(0))),
    )
    for _ in range(_MOST_ZYGOTES):
        try:
            connection = _connect(target, agent_pid)
        except (OSError, UnsafePathError) as error:
            _run_here(target, f"there is no process to fork ranks from ({error})")
        if (found := _ask(connection, request)) is not None:
            _stand_for_rank(target, connection, *found)
        connection.close()
    os._exit(1)


def _run_here(target: Target, reason: str) -> NoReturn:
    """Become the rank, as without `keep`; a node fails."""
    if target.of_node:
        say(f"{reason}: this node cannot run ranks, and fails")
        raise SystemExit(1)
    say(f"{reason}: this rank starts as usual")
    os.execv(sys.executable, [*interpreter(), *target.words])


def interpreter() -> list[str]:
    """Return the command of this Python with its flags."""
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-u"]  # type: ignore[attr-defined]


def socket_path(agent_pid: int) -> Path:
    """Return where the zygote of a launcher's agent listens.

    Raises:
        OSError: if the directory cannot be made, or the agent has ended.
        UnsafePathError: if another user could listen there.
    """
    root = Path(tempfile.gettempdir())
    make_root(root)
    folder = root / f"moe_ft_keep_{os.getuid()}"
    try:
        make_private(folder)
    except (OSError, UnsafePathError):  # another user may have taken the name
        if not (secret := _secret()):
            raise
        folder = root / f"{folder.name}_{secret}"
        make_private(folder)
    return folder / f"{agent_pid}_{start_ticks(agent_pid)}.socket"


def _secret() -> str:
    """Return what this job knows and no other user: from its secret, or the name of torchrun's log folder."""
    if token := os.environ.get("MOE_FT_KEEP_TOKEN", ""):
        return hashlib.sha256(f"socket {token}".encode()).hexdigest()[:16]
    folder, is_known, _ = os.environ.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:16] if is_known else ""


def _connect(target: Target, agent_pid: int) -> socket.socket:
    """Return a connection to the zygote of an agent; start it if this worker is the node's first."""
    path, zygote = socket_path(agent_pid), None
    deadline = time.monotonic() + _START_DEADLINE_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(_START_DEADLINE_S)
        try:
            connection.connect(str(path))
            connection.settimeout(None)
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            has_ended = zygote is not None and zygote.poll() is not None
            if has_ended or time.monotonic() > deadline:
                raise
        if zygote is None and _is_first():
            zygote = _start_zygote(target, agent_pid, path)
        time.sleep(_POLL_S)


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _start_zygote(target: Target, agent_pid: int, path: Path) -> "subprocess.Popen[bytes]":
    """Start a zygote, which soon listens; requests wait in its socket while it imports."""
    for each in path.parent.glob("*_*.socket"):  # of zygotes that were killed
        with suppress(OSError, ValueError):
            if each == path or has_ended(*map(int, each.stem.split("_"))):
                each.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        command = [*interpreter(), "-m", "moe_ft.cluster.zygote", str(listener.fileno())]
        command += [str(agent_pid), str(path), *(f"--preload={each}" for each in target.preload)]
        return subprocess.Popen(
            [*command, "--", *target.words],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=[listener.fileno()],
            # torch asks the driver for GPUs then, and not CUDA, which a process must not use before it forks.
            env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            start_new_session=True,  # torchrun kills the group of a worker
        )


def _ask(connection: socket.socket, request: RankRequest) -> tuple[Answer, int] | None:
    """Return what the zygote answers to a request; None if it is no more."""
    try:
        send_request(connection, request, (0, 1, 2))
        return receive_answer(connection) if _wait_for_answer(connection) else None
    except ConnectionError as error:
        say(f"the process that forks ranks has ended: {error}")
        return None


def _stand_for_rank(
    target: Target, connection: socket.socket, answer: Answer, number: int
) -> NoReturn:
    """Pass signals on to the rank that runs, and end as it ends."""
    if answer is Answer.UNUSABLE:
        _run_here(target, "the process with the imports cannot be forked")
    if answer is Answer.FAILED:
        say("this rank could not be forked, and fails")
        os._exit(1)
    for each in FORWARDED:
        signal.signal(each, lambda number, _: send_signal(connection, number))
    try:
        while answer is not Answer.ENDED:
            _wait_for_end(connection, number)
            if not _wait_for_answer(connection):
                os._exit(1)
            answer, number = receive_answer(connection)
    except ConnectionError as error:
        say(f"the process that forks ranks has ended: {error}")
        os._exit(1)
    _end_as(number)


def _wait_for_end(connection: socket.socket, pid: int) -> None:
    """Wait until a process has ended, or there is an answer."""
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        select.select([connection.fileno(), process], [], [])
        os.close(process)


def _wait_for_answer(connection: socket.socket) -> bool:
    """Wait for an answer that is due; kill the zygote and return False if there is none."""
    zygote, looks = peer_pid(connection), Counter[bool]()
    while not _can_read(connection, _LOOK_S):
        is_importing = process_name(zygote) == IMPORTING and not is_stopped(zygote)
        looks[is_importing] += 1
        if is_importing and looks[True] % _LOOKS_PER_LINE == 0 and _is_first():
            say(f"process {zygote} has been importing for {looks[True] * _LOOK_S:.0f} s")
        if looks[False] > _MOST_LOOKS or looks[True] > _MOST_LOOKS_AT_IMPORTS:
            say(
                f"process {zygote}, which forks ranks, has not answered for {looks.total() * _LOOK_S:.0f} s: "
                "it is killed, and its ranks with it"
            )
            _kill(zygote, connection)
            return False
    return True


def _can_read(connection: socket.socket, timeout_s: float) -> bool:
    return bool(select.select([connection], [], [], timeout_s)[0])


def _kill(zygote: int, connection: socket.socket) -> None:
    with suppress(OSError):  # it has ended
        process = os.pidfd_open(zygote)
        if not _can_read(connection, 0):  # or its number may be that of another process now
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], _KILLED_S)
        os.close(process)


def _end_as(status: int) -> NoReturn:
    """End with the exit code or the signal of another process."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
