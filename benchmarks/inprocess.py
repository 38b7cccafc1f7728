"""Jobs whose ranks call their training function again after a death, in nvidia-resiliency-ext's wrapper.

The ranks run benchmarks/inprocess_rank.py. For each rank that will be killed there is a reserve rank, which
waits with its imports done. There is no launcher: one that ends all processes after a death is in the way.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from typing import Self

import psutil

from tests.namespaces import INTERFACE, Namespaces
from tests.ports import free_port
from tests.processes import kill_all

VERSION = "0.7.0"
# Its wheels are for glibc 2.39 and newer, by name; the wrapper is Python and runs with older ones.
_TARGET = "--platform manylinux_2_39_x86_64 --only-binary :all: --no-deps --target"
_ROOT = Path(__file__).resolve().parent.parent
_POLL_S = 0.2
_SILENCE_S = 120.0  # imports on few cores hold threads up for long
_TAIL_CHARACTERS = 3000


def find_problem(nvrx: Path) -> str:
    """Return why the wrapper cannot be used from a folder; empty if it can."""
    if (nvrx / "nvidia_resiliency_ext" / "inprocess").is_dir():
        return ""
    return (
        f"nvidia-resiliency-ext is not in {nvrx}. Alongside Megatron it must be in a folder of its own: "
        f"pip install {_TARGET} {nvrx} nvidia-resiliency-ext=={VERSION} httpx defusedxml nvidia-ml-py"
    )


def run_in_process(
    flags: Sequence[str],
    num_ranks: int,
    *,
    num_kills: int,
    interval_s: float,
    nvrx: Path,
    log_path: Path,
    deadline_s: float = 1200,
) -> None:
    """Run a job, one of whose ranks is killed again and again, until it ends by itself.

    Args:
        flags: of pretrain_gpt_moe.py.
        num_ranks: that train.
        num_kills: number of reserve ranks besides.
        interval_s: how often the wrapper looks, and how long it waits for other reports.
        nvrx: where nvidia-resiliency-ext is installed.
        log_path: gets the output of all ranks; calls are noted in the same folder.
        deadline_s: until the end.

    Raises:
        AssertionError: if other processes fail than those that are killed, or it takes longer.
    """
    ranks = _start(
        flags,
        num_ranks,
        num_reserve=num_kills,
        num_calls=1 + num_kills,
        interval_s=interval_s,
        nvrx=nvrx,
        log_path=log_path,
    )
    try:
        codes = _wait(ranks, num_kills, time.monotonic() + deadline_s)
    finally:
        for each in ranks:
            with suppress(ProcessLookupError):
                os.killpg(each.pid, SIGKILL)
            each.wait()
    expected = sorted([-SIGKILL] * num_kills + [0] * num_ranks)
    output = log_path.read_text(errors="replace")[-_TAIL_CHARACTERS:]
    assert sorted(codes) == expected, f"the ranks ended with {codes}\n...\n{output}"


def _start(
    flags: Sequence[str],
    num_ranks: int,
    *,
    num_reserve: int,
    num_calls: int,
    interval_s: float,
    nvrx: Path,
    log_path: Path,
    silence_s: float = _SILENCE_S,
    place: Callable[[int], tuple[Sequence[str], dict[str, str]]] = lambda rank: ((), {}),
) -> list[subprocess.Popen[bytes]]:
    """Start all ranks.

    Args:
        num_calls: most calls of the training function.
        silence_s: of a rank after which its wrapper is called lost.
        place: returns the beginning of a rank's command, and variables.
    """
    world_size = num_ranks + num_reserve
    words = [*("--nvrx", str(nvrx), "--num-ranks", str(num_ranks), "--interval-s", str(interval_s))]
    words += ["--silence-s", str(silence_s), "--notes", str(log_path.parent)]
    words += ["--ports", *(str(free_port()) for _ in range(num_calls))]
    env = {**os.environ, "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "error"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": str(world_size)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "benchmarks.inprocess_rank", *words, "--", *flags]
    ranks = []
    with log_path.open("w") as log:
        for rank in range(world_size):
            before, variables = place(rank)
            ranks.append(
                subprocess.Popen(
                    [*before, *command],
                    cwd=_ROOT,
                    env={**env, **variables, "RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return ranks


class WrappedNodes:
    """Nodes of one job with networks of their own; the last one is in reserve. All end with its context."""

    def __init__(
        self,
        flags: Sequence[str],
        networks: Namespaces,
        names: Sequence[str],
        *,
        ranks_per_node: int,
        lost_after_s: float,
        nvrx: Path,
        log_path: Path,
    ) -> None:
        """Start all ranks, with the wrapper's own intervals.

        Args:
            lost_after_s: silence after which a rank is lost.
        """
        self._folder = str(log_path.parent)

        def place(rank: int) -> tuple[Sequence[str], dict[str, str]]:
            name = names[rank // ranks_per_node]
            env = {"MOE_FT_NODE_ID": name, "GLOO_SOCKET_IFNAME": INTERFACE}
            return networks.command(name), env | {"MASTER_ADDR": networks.address(names[0])}

        self._ranks = _start(
            flags,
            (len(names) - 1) * ranks_per_node,
            num_reserve=ranks_per_node,
            num_calls=2,
            interval_s=1.0,
            nvrx=nvrx,
            log_path=log_path,
            silence_s=lost_after_s,
            place=place,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(list(filter(self._is_ours, psutil.process_iter())))
        for each in self._ranks:
            each.wait()

    def kill(self, name: str) -> None:
        """Lose a node with all its processes at once."""
        kill_all([each for each in psutil.process_iter() if self._is_ours(each, name)])

    def _is_ours(self, process: psutil.Process, node: str | None = None) -> bool:
        """Return whether a process is a rank, or the monitor of one, which leaves its session."""
        try:
            is_ours = self._folder in process.cmdline()
            return is_ours and node in (None, process.environ().get("MOE_FT_NODE_ID"))
        except psutil.Error:  # gone, or not of this user
            return False


def _wait(ranks: Sequence[subprocess.Popen[bytes]], num_kills: int, deadline_s: float) -> list[int]:
    """Return exit codes when all have ended, more have failed than are killed, or time is up (-1)."""
    while time.monotonic() < deadline_s:
        codes = [each.poll() for each in ranks]
        if None not in codes or sum(code not in (None, 0) for code in codes) > num_kills:
            break
        time.sleep(_POLL_S)
    return [-1 if code is None else code for code in codes]


def note_call(folder: Path, number: int, rank: int) -> None:
    """Note that a rank calls its function, for the first time (0) or again."""
    _note_of(folder, number, rank).write_text(str(time.time()))


def called_s(folder: Path, num_ranks: int, num_kills: int) -> list[float]:
    """Return ``[kill]`` the time when the last rank has called its function again."""
    return [
        max(float(_note_of(folder, number, rank).read_text()) for rank in range(num_ranks))
        for number in range(1, num_kills + 1)
    ]


def _note_of(folder: Path, number: int, rank: int) -> Path:
    return folder / f"call_{number}_{rank}"
