"""Replicas: bytes to peers as state and as gradients, host memory, and what training pays.

    python -m benchmarks.gradient_replicas [--parts NAME ...] [--rounds N] [--iterations N] [--quick]
        [--output FILE.md]

Each rank is on a node of its own, all on one machine, and trains a small model with a snapshot in every
iteration that goes to other nodes. The jobs of a part take turns, round after round:

sent        two ranks, dense: as state, as gradients that are reduced in fp32, and as such in bf16
strategies  two ranks: all strategies, as state and as gradients
regions     four ranks, dense, with two replicas: one region at each peer and two

"sent" is what a rank sent to its peers in an iteration, "followed" how many units of it as gradients; "send"
the time until a peer has committed the replica; "stall" how long checkpoints held an iteration up, with the
copy of the gradients; "as state" the share of replicas that had state, "complete" that of iterations of which
a snapshot was taken. "memory" are the bytes of a rank's own store and of the replicas that it keeps, also for
each parameter that it saves, "process" the largest resident set of a rank, in which these are mapped. Of jobs
their medians over iterations; median (range) of the rounds.

What a peer's processor pays is in benchmarks/replica_sources.py.
"""

import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.output import conditions, markdown_table, read_options, show, spread
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, run_training

_WARM_UP = 4  # iterations
_STATE_BYTES = 12  # of a parameter: its master and two moments
_INTERVAL = ("--moe-ft-interval", "1")
_DENSE = ("--moe-ft-strategy", "dense", *_INTERVAL)
_FOLLOWED = ("--moe-ft-replicate", "gradients")
_STRATEGIES = {
    "dense": _DENSE,
    "partial": ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1", *_INTERVAL),
    "sparse": ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3"),
    "selective": ("--moe-ft-strategy", "selective", *_INTERVAL),
}
# By part: ranks, and flags by job.
PARTS: dict[str, tuple[int, Mapping[str, tuple[str, ...]]]] = {
    "sent": (
        2,
        {
            "state": _DENSE,
            "gradients in fp32": (*_DENSE, *_FOLLOWED),
            "gradients in bf16": (*_DENSE, *_FOLLOWED, "--grad-reduce-in-bf16"),
        },
    ),
    "strategies": (
        2,
        {
            f"{name}, {sent}": (*flags, *(_FOLLOWED if sent == "gradients" else ()))
            for name, flags in _STRATEGIES.items()
            for sent in ("state", "gradients")
            if (name, sent) != ("sparse", "gradients")
        },
    ),
    "regions": (
        4,
        {
            f"{count} at each peer": (*_DENSE, "--moe-ft-replica-regions", count)
            for count in ("1", "2")
        },
    ),
}
HEADERS = {
    "sent": "sent, MB",
    "followed": "followed",
    "send": "send, ms",
    "stall": "stall, ms",
    "iteration": "iteration, ms",
    "state": "as state, %",
    "complete": "complete, %",
    "memory": "memory, MB",
    "per_parameter": "bytes per parameter",
    "process": "process, MB",
}


def train(flags: tuple[str, ...], num_ranks: int, num_iterations: int) -> dict[str, float]:
    """Train once; return what the columns of the tables show."""
    sizes = {"train_iters": num_iterations, "hidden_size": 128, "moe_ffn_hidden_size": 256}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder, ranks = Path(name), range(num_ranks)
        words = [
            *(*model_flags(**sizes, mock_data=True), *layout_flags({"ep": 2}), *flags),
            *(*event_flags(folder / "events"), "--moe-ft-job-id", "bench"),
            *("--moe-ft-memory-dir", str(folder / "memory")),
        ]
        with watched(folder / "memory") as seen:
            nodes = [f"node{rank}" for rank in ranks]
            run_training(words, num_ranks, log_dir=folder / "log", nodes=nodes).check()
        taken, sent, ended = (
            [
                line
                for rank in ranks
                for line in events(folder / "events", rank, kind)
                if line["iteration"] > _WARM_UP
            ]
            for kind in ("snapshot", "replicate", "iteration")
        )
    saved_bytes = median(line["bytes"] for line in taken)
    return {
        "sent": median(line["bytes"] for line in sent) / 1e6,
        "followed": median(line["followed"] for line in sent),
        "send": median(1000 * line["seconds"] for line in sent),
        "stall": median(1000 * line["stall_s"] for line in ended),
        "iteration": median(1000 * line["iteration_s"] for line in ended),
        "state": 100 * sum(line["state_bytes"] > 0 for line in sent) / len(sent),
        "complete": 100 * len(taken) / len(ended),
        "memory": seen["memory"] / num_ranks / 1e6,
        "per_parameter": seen["memory"] / num_ranks / (saved_bytes / _STATE_BYTES),
        "process": seen["process"] / 1e6,
    }


@contextmanager
def watched(folder: Path) -> Iterator[dict[str, int]]:
    """Yield the most bytes of a folder, and of a process that maps files in it, seen until the end."""
    seen, should_end = {"memory": 0, "process": 0}, threading.Event()

    def watch() -> None:
        while not should_end.wait(0.5):
            with suppress(OSError):  # what is removed meanwhile
                sizes = [each.stat().st_size for each in folder.rglob("*") if each.is_file()]
                seen["memory"] = max(seen["memory"], sum(sizes))
            for process in psutil.Process().children(recursive=True):
                with suppress(OSError, psutil.Error):
                    if str(folder) in Path(f"/proc/{process.pid}/maps").read_text():
                        seen["process"] = max(seen["process"], process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        should_end.set()
        thread.join()


def main() -> None:
    """Run everything and print it."""
    options = read_options(
        parts=(list(PARTS), ["regions"]),
        rounds=(3, 1),
        iterations=(30, 8, "of a job"),
    )
    parts = [conditions("Each rank is on a node of its own; all nodes are this machine.")]
    for part in options.parts:
        num_ranks, jobs = PARTS[part]
        found: dict[str, list[dict[str, float]]] = {name: [] for name in jobs}
        for _ in range(options.rounds):
            for name, flags in jobs.items():
                print(f"{part}: {name}", file=sys.stderr, flush=True)
                found[name].append(train(flags, num_ranks, options.iterations))
        rows = [
            (name, *(spread([each[key] for each in runs], ".1f") for key in HEADERS))
            for name, runs in found.items()
        ]
        parts += [f"{part}, {num_ranks} ranks", markdown_table(rows, ("job", *HEADERS.values()))]
    show(parts, options.output)


if __name__ == "__main__":
    main()
