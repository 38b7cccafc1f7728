"""Jobs whose ranks are forked by `moe_ft keep`, from a zygote that has imported everything already.

The zygote is a fork of the tests' fork server, and the workers are those that torchrun would start. This file
stands for torchrun's agent: when a worker fails it ends all of them and starts them again.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ft.cluster.worker import socket_path
from moe_ft.cluster.zygote import Zygote
from tests.harness import DEADLINE_S, _context, be_process, prepare_to_fork
from tests.ports import free_port
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.05
_LISTEN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class KeptResult:
    """End of a job.

    Attributes:
        exit_codes: ``[start][rank]`` of the workers.
        log: everything that was printed.
    """

    exit_codes: tuple[tuple[int, ...], ...]
    log: Path

    @property
    def num_restarts(self) -> int:
        """Number of times that all workers were started again."""
        return len(self.exit_codes) - 1

    def check(self) -> "KeptResult":
        """Return self, or fail with the end of the log if the last start failed."""
        assert not any(self.exit_codes[-1]), f"{self.exit_codes}\n{self.log.read_text()[-5000:]}"
        return self


def run_kept(
    flags: Sequence[str],
    world_size: int,
    *,
    log: Path,
    script: str = "pretrain_gpt_moe.py",
    max_restarts: int = 0,
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
) -> KeptResult:
    """Run a job under `moe_ft keep`; return when all workers have ended.

    Args:
        log: gets what all processes print.
        max_restarts: of all workers, after one has failed.
        deadline_s: fails the test if a start takes longer.
        env: further environment variables. GPUs are hidden unless they show them.
    """
    prepare_to_fork()
    path = socket_path(os.getpid())
    zygote = _context.Process(target=_serve, args=(os.getpid(), str(path), str(log)))
    zygote.start()
    try:
        wait_for(path.exists, "the zygote", _LISTEN_S)
        codes: list[tuple[int, ...]] = []
        while not codes or (any(codes[-1]) and len(codes) <= max_restarts):
            workers = _start(flags, world_size, log, script, len(codes), env or {})
            codes.append(_wait(workers, time.monotonic() + deadline_s, log))
    finally:
        zygote.kill()  # and with it its ranks
        zygote.join()
        path.unlink(missing_ok=True)
    return KeptResult(exit_codes=tuple(codes), log=log)


def _serve(agent_pid: int, path: str, log: str) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen()
    os.rename(f"{path}.new", path)  # who sees it can connect

    def act() -> None:
        role = Zygote(listener, agent_pid).serve()
        if role is not None:
            role()

    be_process(Path(log), act)


def _start(
    flags: Sequence[str],
    world_size: int,
    log: Path,
    script: str,
    start: int,
    env: Mapping[str, str],
) -> list[subprocess.Popen[bytes]]:
    common = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "kept",
        "TORCHELASTIC_RESTART_COUNT": str(start),
        "CUDA_VISIBLE_DEVICES": "",
        **env,
    }
    workers = []
    with log.open("a") as file:
        for rank in range(world_size):
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "moe_ft", "keep", "--", script, *flags],
                    cwd=ROOT,
                    env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            )
    return workers


def _wait(workers: Sequence[Any], deadline: float, log: Path) -> tuple[int, ...]:
    try:
        while None in [each.poll() for each in workers]:
            assert time.monotonic() < deadline, f"too slow\n{log.read_text()[-5000:]}"
            if any(each.returncode for each in workers):
                for each in workers:
                    with suppress(ProcessLookupError):
                        each.terminate()
            time.sleep(_POLL_S)
    finally:
        for each in workers:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    return tuple(each.returncode for each in workers)


def logged_in(text: str) -> list[int]:
    """Return the iterations that have a log line of Megatron's in a text, in their order."""
    return [int(number) for number in re.findall(r"iteration +(\d+)/ +\d+ \|", text)]
