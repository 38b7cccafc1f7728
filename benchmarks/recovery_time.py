"""Seconds from a kill until training runs again, with and without `moe_ft keep`.

    python -m benchmarks.recovery_time [--ranks N ...] [--repetitions N] [--output FILE.md]

Each run is a small job under torchrun whose highest rank is killed in an iteration, so that all ranks start
again and recover from memory. The variants take turns. Seconds count from the kill, on the slowest rank:

    stopped    survivors have reported that they end
    begun      the ranks of the next start have their settings: processes and imports are over
    recovered  the state is back
    iteration  the first new iteration has ended

Medians (ranges). Ranks wait --grace seconds for each other's reports, 0.2 by default, since that wait is not
what is compared here.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.output import markdown_table, show
from benchmarks.sparse_jobs import write_data
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, free_port

_ROOT = Path(__file__).resolve().parent.parent
_KILL_AT, _TRAIN_ITERATIONS = 6, 10
_DEADLINE_S = 600
HEADERS = ("ranks", "variant", "stopped, s", "begun, s", "recovered, s", "iteration, s", "of plain")
VARIANTS = {"plain": (), "keep": ("-m", "moe_ft", "keep", "--")}


def recover(
    num_ranks: int, keep: Sequence[str], grace_s: float, data: Sequence[str]
) -> list[float]:
    """Run a job that is killed once; return the seconds after the kill of each moment.

    Raises:
        AssertionError: if the job does not recover from memory and come to its end.
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)),
            *("--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-id", "recovery_time"),
            *("--rdzv-endpoint", f"localhost:{free_port()}", *keep, "pretrain_gpt_moe.py"),
            *model_flags(train_iters=_TRAIN_ITERATIONS),
            *layout_flags({"pp": 2, "ep": 2} if num_ranks >= 4 else {"ep": 2}),
            *(*data, *event_flags(folder), "--moe-ft-strategy", "dense"),
            *("--moe-ft-memory-dir", str(folder / "memory")),
            *("--moe-ft-fault-report-grace-s", str(grace_s)),
            *("--moe-ft-inject-fault", f"kill:{num_ranks - 1}@{_KILL_AT}:backward"),
        ]
        env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONWARNINGS": "ignore"}
        with (folder / "log").open("w") as log:
            subprocess.run(
                command,
                cwd=_ROOT,
                env={**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                stdout=log,
                stderr=log,
                check=True,
                timeout=_DEADLINE_S,
            )
        return _moments(folder, num_ranks)


def _moments(folder: Path, num_ranks: int) -> list[float]:
    killed_s = events(folder, num_ranks - 1, "fault_injected")[0]["time"]
    slowest = []
    for kind in ("stopped", "start", "recovery", "iteration"):
        ranks = range(num_ranks - 1) if kind == "stopped" else range(num_ranks)
        after = [
            [each for each in events(folder, rank, kind) if each["time"] > killed_s]
            for rank in ranks
        ]
        assert all(after), f"a rank has no event {kind!r} after the kill"
        slowest.append(max(found[0]["time"] for found in after) - killed_s)
        if kind == "recovery":
            assert all(set(found[0]["sources"]) == {"memory"} for found in after)
    return slowest


def rows(ranks: Sequence[int], repetitions: int, grace_s: float) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table."""
    with tempfile.TemporaryDirectory() as name:
        data = write_data(Path(name))
        for num_ranks in ranks:
            found: dict[str, list[list[float]]] = {variant: [] for variant in VARIANTS}
            for _ in range(repetitions):
                for variant, keep in VARIANTS.items():
                    found[variant].append(recover(num_ranks, keep, grace_s, data))
                    print(num_ranks, variant, found[variant][-1], file=sys.stderr, flush=True)
            for variant, runs in found.items():
                pairs = zip(runs, found["plain"], strict=True)
                ratio = median(own[-1] / plain[-1] for own, plain in pairs)
                yield (
                    str(num_ranks),
                    variant,
                    *(_spread(moment) for moment in zip(*runs, strict=True)),
                    f"{ratio:.0%}",
                )


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--grace", type=float, default=0.2, help="--moe-ft-fault-report-grace-s")
    parser.add_argument("--output", type=Path, metavar="FILE.md")
    options = parser.parse_args()
    table = list(rows(options.ranks, options.repetitions, options.grace))
    described = (
        f"{os.cpu_count()} cores; load {os.getloadavg()[0]:.1f} at the end; median (range) of "
        f"{options.repetitions}. Python {platform.python_version()}, torch {torch.__version__}."
    )
    show([described, markdown_table(table, HEADERS)], options.output)


if __name__ == "__main__":
    main()
