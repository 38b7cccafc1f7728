"""Cost of a checkpoint to training: seconds blocked, until complete and lost, and host memory.

    python -m benchmarks.stall [--candidates TEXT ...] [--work busy|sleep ...] [--rounds N]
        [--parameters N] [--torch-checkpointing DIR] [--quick] [--output FILE.md]

Two ranks on gloo train a state of which every byte changes in every iteration. Stretches of five iterations
without a checkpoint and with one take turns; candidates take turns too, --rounds times. A row is the median
and range over the checkpoints, of the slower rank:

blocked   what the training thread spends in the candidate's calls: save, polls, and the wait before the
          optimizer
complete  from the call of save until the checkpoint is what "complete means" says, on both ranks; of
          candidates that notice it in a poll, until that poll, once per iteration
cost      the iterations from the save until the checkpoint is complete, five at least, minus as many as
          the mean of those before and after
memory    see `host_memory_bytes`, both ranks, peak minus before

Between checkpoints the ranks compute matrix products ("busy", a core each) or sleep ("sleep", as the
host does while a GPU works). Each of the --parameters is four tensors: more of them divide the same bytes.
The last checkpoint is loaded and compared, bit by bit, with its iteration: what `partial` and `sparse` load,
with the iteration that each part is of.
Files go to the folder for temporary files (TMPDIR), which has to be a disk for fsync to mean anything,
and stay until the candidate ends. The adapters are in benchmarks/ours.py and, of other libraries, in
benchmarks/peers.py. The exit code is 1 if a candidate that is installed fails, or loads something else.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import torch.multiprocessing as mp

from benchmarks.output import conditions, markdown_table, read_options, show, spread
from benchmarks.peers import DEFAULT_FOLDER, make_importable
from benchmarks.stall_rank import CANDIDATES, CHECKPOINT_INTERVAL, NUM_RANKS, Job, Phase, run_rank

TORN = "TORN"  # content of a checkpoint that is not as it was saved
_SAMPLE_S, _LOOK_S = 0.02, 0.5


def host_memory_bytes(processes: Sequence[psutil.Process], tmpfs: Path) -> int:
    """Return what processes hold that is not a file's, and what the candidate's files on tmpfs hold.

    Of a process it is the proportional set size of anonymous and shared memory, so that pages which a
    fork or shared memory shows in several processes count once. The libraries' code is left out: it
    would depend on who else runs them. Files on tmpfs count by their blocks, hence also where no
    process maps them, and mappings of them are taken off the processes. A sample takes some 50 ms: a
    peak that is shorter may be missed.
    """
    total = sum(path.stat().st_blocks * 512 for path in tmpfs.rglob("*") if path.is_file())
    for process in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            folder = Path(f"/proc/{process.pid}")
            held = _held_bytes(folder)
            if str(tmpfs) in (folder / "maps").read_text():
                mapped = _mapped_bytes((folder / "smaps").read_text(), tmpfs)
                # A mapping that appears or disappears meanwhile must not count twice.
                held = min(held, _held_bytes(folder)) - mapped
            total += held
    return total


def _held_bytes(folder: Path) -> int:
    return _sum_fields((folder / "smaps_rollup").read_text(), ("Pss_Anon:", "Pss_Shmem:"))


def _sum_fields(smaps: str, fields: tuple[str, ...]) -> int:
    lines = (line.split() for line in smaps.splitlines())
    return sum(int(words[1]) * 1024 for words in lines if words[0] in fields)


def _mapped_bytes(smaps: str, tmpfs: Path) -> int:
    """Return the shared memory in a process's mappings of files below a folder."""
    total, is_below = 0, False
    for line in smaps.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            is_below = len(words) == 6 and words[5].startswith(str(tmpfs)) and "s" in words[1]
        elif is_below and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


def supervise(context: Any, job: Job, tmpfs: Path, phase: Any) -> int:
    """Wait for the ranks, sampling memory when asked to; return its growth in bytes."""
    most = dict.fromkeys(Phase, 0)
    deadline = time.monotonic() + job.deadline_s()
    known: set[psutil.Process] = set()
    try:
        # To look through all processes takes from what is timed.
        while not context.join(timeout=_SAMPLE_S if phase.value != Phase.OFF else _LOOK_S):
            for pid in context.pids():
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank = psutil.Process(pid)
                    known |= {rank, *rank.children(recursive=True)}
            current = Phase(phase.value)
            if current is not Phase.OFF:
                size = host_memory_bytes([p for p in known if p.is_running()], tmpfs)
                if phase.value == current:  # else the sample may show what came later
                    most[current] = max(most[current], size)
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {job.deadline_s():.0f} s")
    finally:
        for process in known:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    return most[Phase.PEAK] - most[Phase.BEFORE]


HEADERS = (
    "candidate",
    "blocked s",
    "complete s",
    "cost s",
    f"extra MiB ({NUM_RANKS} ranks)",
    "complete means",
    "content",
    f"{CHECKPOINT_INTERVAL} iterations without, s",
)


_DIGITS = (".3f", ".2f", ".2f")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Result of a run of one candidate.

    Attributes:
        checkpoints: of each, seconds blocked, until complete, and that it cost.
        plain: seconds of stretches without one.
        memory_bytes: that host memory grew by.
    """

    checkpoints: list[tuple[float, float, float]]
    plain: list[float]
    memory_bytes: int
    is_intact: bool


def run(job: Job) -> Measured | str:
    """Measure a candidate once; return why it did not run, if so."""
    for module in CANDIDATES[job.candidate].requires:
        if not _is_installed(module):
            return f"{module} is not installed"
    shared = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(prefix="stall_", ignore_cleanup_errors=True) as disk,
        tempfile.TemporaryDirectory(
            prefix="stall_", dir=shared, ignore_cleanup_errors=True
        ) as tmpfs,
    ):
        phase = mp.get_context("spawn").Value("i", Phase.OFF)
        arguments = (job, Path(disk), Path(tmpfs), phase)
        try:
            context = mp.start_processes(run_rank, arguments, NUM_RANKS, join=False)
            memory = supervise(context, job, Path(tmpfs), phase)
            report = json.loads((Path(disk) / "report.json").read_text())
        except (mp.ProcessExitedException, mp.ProcessRaisedException, TimeoutError) as error:
            # The other rank fails too, a little later, for want of this one.
            errors = sorted(json.loads(p.read_text()) for p in Path(disk).glob("error_*.json"))
            return str(errors[0][1] if errors else error)[:200]
    plain = report["plain"]
    without = [(before + after) / 2 for before, after in pairwise(plain)]
    return Measured(
        checkpoints=[
            (blocked, complete, total - plain_s * count / CHECKPOINT_INTERVAL)
            for (blocked, complete, total, count), plain_s in zip(
                report["times"], without, strict=True
            )
        ],
        plain=plain,
        memory_bytes=memory,
        is_intact=report["intact"],
    )


def row(name: str, runs: Sequence[Measured]) -> tuple[str, ...]:
    """Return the row of a candidate."""
    columns = zip(*(each for run in runs for each in run.checkpoints), strict=True)
    return (
        name,
        *(spread(values, digits) for values, digits in zip(columns, _DIGITS, strict=True)),
        f"{max(run.memory_bytes for run in runs) / 2**20:.0f}",
        CANDIDATES[name].complete_means,
        "as saved" if all(run.is_intact for run in runs) else TORN,
        spread([seconds for run in runs for seconds in run.plain], ".2f"),
    )


def measure_in_turns(
    options: argparse.Namespace, work: str
) -> tuple[list[tuple[str, ...]], dict[str, str]]:
    """Measure all candidates once a round; return their rows, and why those without one did not run."""
    runs: dict[str, list[Measured]] = {name: [] for name in options.candidates}
    not_run: dict[str, str] = {}
    for number in range(options.rounds):
        for name in options.candidates:
            if name in not_run:
                continue
            print(f"{work}, round {number + 1}: {name}", file=sys.stderr, flush=True)
            result = run(
                Job(
                    candidate=name,
                    work=work,
                    mib=options.mib,
                    iteration_s=options.iteration_s,
                    num_checkpoints=options.checkpoints,
                    num_parameters=options.parameters,
                )
            )
            if isinstance(result, str):
                not_run[name] = result
            else:
                runs[name].append(result)
    rows = [row(name, found) for name, found in runs.items() if found and name not in not_run]
    return rows, not_run


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def parse() -> argparse.Namespace:
    """Return the options, with the names of the candidates filled in."""
    options = read_options(
        mib=(512, 8, "state per rank"),
        parameters=(40, 40, "of a rank, four tensors each"),
        iteration_s=(0.7, 0.05),
        checkpoints=(3, 1, "measured ones in a round"),
        rounds=(1, 1, "turns of each candidate"),
        candidates=([""], ["moe_ft", "torch.save"], "parts of names"),
        work=(["busy", "sleep"], ["sleep"]),
        torch_checkpointing=(DEFAULT_FOLDER,),
    )
    texts = [text.lower() for text in options.candidates]
    options.candidates = [
        name for name in CANDIDATES if any(text in name.lower() for text in texts)
    ]
    if not options.candidates or min(options.checkpoints, options.rounds, options.parameters) < 1:
        sys.exit(
            "--checkpoints, --rounds and --parameters must be 1 or more, "
            f"--candidates parts of: {list(CANDIDATES)}"
        )
    return options


def main() -> None:
    """Measure every candidate and print a table for each kind of work."""
    options = parse()
    has_failed = False
    make_importable(options.torch_checkpointing)
    os.environ |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}  # for helper processes too
    packages = ("nvidia-resiliency-ext", "safetensors", "torch-checkpointing")
    installed = [
        f"{each} {version(each)}" for each in packages if _is_installed(each.replace("-", "_"))
    ]
    parts = [
        conditions(
            f"{NUM_RANKS} ranks; {options.mib} MiB of state per rank in {4 * options.parameters:,} tensors; "
            f"iterations of {options.iteration_s} s, {CHECKPOINT_INTERVAL} per checkpoint; median (range) of "
            f"{options.rounds * options.checkpoints} checkpoints. {', '.join(installed)}."
        )
    ]
    for work in options.work:
        rows, not_run = measure_in_turns(options, work)
        reasons = [f"- {name}: not run: {reason}" for name, reason in not_run.items()]
        parts += [f"Work: {work}", markdown_table(rows, HEADERS)]
        parts += ["\n".join(reasons)] if reasons else []
        has_failed |= any(TORN in each for each in rows)
        has_failed |= any(not each.endswith("is not installed") for each in not_run.values())
    show(parts, options.output)
    sys.exit(int(has_failed))


if __name__ == "__main__":
    main()
