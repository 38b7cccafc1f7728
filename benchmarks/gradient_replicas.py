"""Replicas by gradients: bytes to peers, and what training pays.

    python -m benchmarks.gradient_replicas [--rounds N] [--iterations N] [--quick]
        [--output FILE.md]

Two ranks on two nodes of one machine train a small model, dense, with a snapshot in every iteration that goes
to the other node: as state, as gradients that are reduced in fp32, and as such that are reduced in bf16. The
jobs take turns, round after round. Bytes are what a rank sent to its peer in an iteration; "send" is the time
until the peer has committed the replica; "stall" how long checkpoints held an iteration up, with the copy of
the gradients. Over iterations and rounds: median (range) of the medians of jobs.

What a peer's processor pays is in benchmarks/replica_sources.py.

The second table has all strategies, as in the first one. "memory" are the bytes of a rank's own store and of
the replica that it keeps, "process" the largest resident set of a rank, in which these are mapped.
"""

import argparse
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import psutil

from benchmarks.conditions import conditions
from benchmarks.output import markdown_table, parse_options, show, spread
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, run_training
from tests.jobs import NUM_RANKS, TWO_NODES

_WARM_UP = 4  # iterations
_STATE, _FP32, _BF16 = "state", "gradients in fp32", "gradients in bf16"
_JOBS = {_STATE: ("state", False), _FP32: ("gradients", False), _BF16: ("gradients", True)}
_INTERVAL = ("--moe-ft-interval", "1")
_STRATEGIES = {
    "dense": ("--moe-ft-strategy", "dense", *_INTERVAL),
    "partial": ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "1", *_INTERVAL),
    "sparse": ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3"),
    "selective": ("--moe-ft-strategy", "selective", *_INTERVAL),
}
_COMMAND = "python -m benchmarks.gradient_replicas"


def train(
    name: str, num_iterations: int, folder: Path, strategy: Sequence[str] = _STRATEGIES["dense"]
) -> dict[str, float]:
    """Train once; return bytes, seconds and stall of an iteration, medians of all, and host memory."""
    what, is_reduced_in_bf16 = _JOBS[name]
    model = {
        "train_iters": num_iterations,
        "hidden_size": 128,
        "moe_ffn_hidden_size": 256,
        "mock_data": True,
        "grad_reduce_in_bf16": is_reduced_in_bf16,
    }
    flags = [
        *(*model_flags(**model), *layout_flags({"ep": 2}), *event_flags(folder / "events")),
        *(*strategy, "--moe-ft-job-id", "bench"),
        *("--moe-ft-memory-dir", str(folder / "memory"), "--moe-ft-replicate", what),
    ]
    with watched(folder / "memory") as seen:
        run_training(flags, NUM_RANKS, log_dir=folder / "log", nodes=TWO_NODES).check()
    sent, ended = (
        [
            line
            for rank in range(NUM_RANKS)
            for line in events(folder / "events", rank, event)
            if line["iteration"] > _WARM_UP
        ]
        for event in ("replicate", "iteration")
    )
    return {
        "bytes": median(line["bytes"] for line in sent),
        "send": median(1000 * line["seconds"] for line in sent),
        "stall": median(1000 * line["stall_s"] for line in ended),
        "iteration": median(1000 * line["iteration_s"] for line in ended),
        "followed": median(line["followed"] for line in sent),
        "memory": seen["memory"] / NUM_RANKS,
        "process": seen["process"],
        "state": sum(line["state_bytes"] > 0 for line in sent) / len(sent),
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


def table_of_strategies(num_iterations: int) -> str:
    """Return bytes, stall and host memory of all strategies, as state and as gradients."""
    rows = []
    for strategy, flags in _STRATEGIES.items():
        for name in (_STATE, _FP32) if strategy != "sparse" else (_STATE,):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                found = train(name, num_iterations, Path(folder), flags)
            numbers = [f"{found['bytes'] / 1e6:.2f}", f"{found['followed']:.0f}"]
            numbers += [f"{found['stall']:.1f}", f"{found['memory'] / 1e6:.1f}"]
            rows.append((strategy, name, *numbers, f"{found['process'] / 1e6:.0f}"))
    headers = ["strategy", "sent", "MB", "followed", "stall, ms", "memory, MB", "process, MB"]
    return markdown_table(rows, headers)


def table_of_jobs(rounds: int, num_iterations: int) -> str:
    """Return what jobs send and pay, by what they send."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in _JOBS}
    for _ in range(rounds):
        for name in _JOBS:
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                found[name].append(train(name, num_iterations, Path(folder)))
    whole = median(each["bytes"] for each in found[_STATE])
    rows = [
        (
            name,
            f"{median(each['bytes'] for each in runs) / 1e6:.2f}",
            f"{whole / median(each['bytes'] for each in runs):.2f}",
            *(
                spread([each[key] for each in runs], ".1f")
                for key in ("send", "stall", "iteration")
            ),
            f"{max(each['state'] for each in runs):.0%}",
        )
        for name, runs in found.items()
    ]
    headers = [
        "sent",
        "MB",
        "times fewer",
        "send, ms",
        "stall, ms",
        "iteration, ms",
        "sent as state",
    ]
    return markdown_table(rows, headers)


def main(words: Sequence[str] | None = None) -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(prog=_COMMAND)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30, help="of a job")
    parser.add_argument("--only-strategies", action="store_true", help="the second table alone")
    options = parse_options(parser, words, rounds=1, iterations=8)
    say = conditions("2 ranks (ep 2), each on a node of its own; both nodes are this machine.")
    if options.only_strategies:
        show([say, table_of_strategies(options.iterations)], options.output)
        return
    jobs = table_of_jobs(options.rounds, options.iterations)
    show([say, jobs, table_of_strategies(options.iterations)], options.output)


if __name__ == "__main__":
    main()
