"""`moe_ft keep`, which torchrun starts as a rank: it has a zygote fork the rank, and stands for it.

It uses the standard library alone and is there in a moment. It passes signals on, ends as the rank ends, and
takes the rank with it if it is killed. The first worker of a node starts the zygote (zygote.py), which lives
as long as the launcher's agent and so serves all restarts.
"""

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from moe_ft.engine.memory.private_files import make_private, make_root
from moe_ft.errors import UnsafePathError
from moe_ft.keeper.protocol import (
    NO_RANK,
    RankRequest,
    receive_number,
    send_number,
    send_request,
)
from moe_ft.keeper.target import Target, read_target

_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
_START_DEADLINE_S = 60.0
_POLL_S = 0.02
_BACKLOG = 1024


def main(words: Sequence[str]) -> NoReturn:
    """Run a rank; never returns.

    Args:
        words: of the command line after `keep`.
    """
    target = read_target(words)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        _run_here(target, "torchrun has not started this process, so nothing would restart it")
    try:
        connection = _connect(target, os.getppid())
    except (OSError, UnsafePathError) as error:
        _run_here(target, f"there is no process to fork ranks from ({error})")
    _stand_for_rank(target, connection)


def _run_here(target: Target, reason: str) -> NoReturn:
    """Become the rank, as without `keep`."""
    print(f"moe_ft: keep: {reason}: this rank starts as usual", file=sys.stderr, flush=True)
    os.execv(sys.executable, [*interpreter(), *target.words])


def interpreter() -> list[str]:
    """Return the command of this Python with its flags."""
    return [sys.executable, *subprocess._args_from_interpreter_flags(), "-u"]  # type: ignore[attr-defined]


def socket_path(agent_pid: int) -> Path:
    """Return where the zygote of a launcher's agent listens.

    Raises:
        UnsafePathError: if another user could listen there.
        OSError: if the directory cannot be made, or the agent has ended.
    """
    root = Path(tempfile.gettempdir())
    make_root(root)
    folder = root / f"moe_ft_keep_{os.getuid()}"
    make_private(folder)
    return folder / f"{agent_pid}_{_start_time(agent_pid)}.socket"


def _start_time(pid: int) -> str:
    """Return when a process was started, which tells it from earlier ones of its number."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _connect(target: Target, agent_pid: int) -> socket.socket:
    """Return a connection to the zygote of an agent; start it if this worker is the node's first."""
    path = socket_path(agent_pid)
    deadline = time.monotonic() + _START_DEADLINE_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(path))
            return connection
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            if time.monotonic() > deadline:
                raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _start_zygote(target, agent_pid, path)
        else:
            time.sleep(_POLL_S)


def _start_zygote(target: Target, agent_pid: int, path: Path) -> None:
    """Start a zygote; requests wait in its socket while it imports."""
    path.unlink(missing_ok=True)  # of one that was killed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
        command = [*interpreter(), "-m", "moe_ft.keeper.zygote", str(listener.fileno())]
        command += [str(agent_pid), str(path), *(f"--preload={each}" for each in target.preload)]
        subprocess.Popen(
            [*command, "--", *target.words],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            pass_fds=[listener.fileno()],
            # torch asks the driver for GPUs then, and not CUDA, which a process must not use before it forks.
            env={**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            start_new_session=True,  # torchrun kills the group of a worker
        )


def _stand_for_rank(target: Target, connection: socket.socket) -> NoReturn:
    """Have the zygote fork the rank, pass signals on, and end as the rank has ended."""
    request = RankRequest(
        words=target.words,
        environment=dict(os.environ),
        folder=os.getcwd(),
        mask=_umask(),
        cpus=tuple(sorted(os.sched_getaffinity(0))),
    )
    try:
        send_request(connection, request, (0, 1, 2))
        if receive_number(connection) == NO_RANK:
            _run_here(target, "the process with the imports cannot be forked")
        for number in _FORWARDED:
            signal.signal(number, lambda number, _: send_number(connection, number))
        status = receive_number(connection)
    except ConnectionError as error:
        print(f"moe_ft: keep: the process that forks ranks has ended: {error}", file=sys.stderr)
        os._exit(1)
    _end_as(status)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _end_as(status: int) -> NoReturn:
    """End with the exit code or the signal of another process."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the rank has left one
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
