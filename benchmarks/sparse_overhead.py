"""Cost of sparse windows to training, against dense snapshots in every iteration and none at all.

    python -m benchmarks.sparse_overhead [--rounds N] [--parts TEXT ...] [--memory-windows N ...]
        [--quick] [--output FILE.md]

Trains a model of a few MB of state per rank (demo) and one with 64 experts per MoE layer and 310 MB per rank
through the stock loop. How snapshots are taken changes while a job runs (benchmarks/window_turns.py): no
snapshots, dense ones in every iteration, windows of 2, 3 and 6, and the window that the strategy chooses, in
turns of six measured iterations each, back and forth. Loops:

computing    forward and backward compute: training and copying share the cores
sleeping     they sleep instead, so that a copy has a core for itself, as next to a GPU
link         likewise, and copies take as long as over a link that brings a dense snapshot in three
             iterations' forward and backward: what PCIe is to a GPU with much state

Iterations are those of the event log, from one end to the next. Of a turn there is their median, "of none" by
that without snapshots in the same round; over rounds, median (range) of that. "processor" is the time of all
threads of a rank per iteration, which hardly grows with what else runs on the machine. "stall" is the mean
wait at the fence per iteration, "copy" until the weights may change,
"commit" until the snapshot is committed, "missed" how many were due and not taken. Bytes are of the rank
with the most.

Host memory is what a rank reserves (RankMemory), summed up over the ranks, per parameter of the model.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pretrain_gpt_moe
from benchmarks.output import markdown_table, parse_options, show, spread
from benchmarks.sparse_jobs import (
    DEADLINE_S,
    LONGEST_WINDOW,
    NUM_RANKS,
    conditions,
    job_folder,
    write_data,
)
from benchmarks.window_turns import Loop, Turn, Variant, plan_turns, times_path, train_in_turns
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.memory.rank_memory import RankMemory
from moe_ft.loop import checkpoints
from moe_ft.recovery import claim
from moe_ft.recovery.checkpointing import Checkpointing
from moe_ft.recovery.start import start
from tests.harness import events, run_ranks

NUM_MEASURED = 6  # iterations of a turn
NUM_WARM_UP = 2 * LONGEST_WINDOW + 1  # iterations before the first turn
NONE, DENSE = "no snapshots", "dense, every iteration"
VARIANTS = (
    Variant(name=NONE, window=0),
    Variant(name=DENSE, window=1),
    Variant(name="sparse, window 2", window=2),
    Variant(name="sparse, window 3", window=3),
    Variant(name="sparse, window 6", window=6),
    Variant(name="sparse, auto", window=None),
)
SLEEP_S = {"demo": 0.02, "64 experts": 0.1}
LINK_BYTES_PER_S = 1e9
PARTS: dict[str, tuple[str, Loop]] = {
    "demo, computing": ("demo", Loop()),
    "demo, sleeping": ("demo", Loop(sleep_s=SLEEP_S["demo"])),
    "64 experts, computing": ("64 experts", Loop()),
    "64 experts, sleeping": ("64 experts", Loop(sleep_s=SLEEP_S["64 experts"])),
    "64 experts, link": (
        "64 experts",
        Loop(sleep_s=SLEEP_S["64 experts"], link_bytes_per_s=LINK_BYTES_PER_S),
    ),
}
MEMORY_MODEL = "64 experts"
MEMORY_WINDOWS = (1, 2, 3, 5)
PAPER_MEMORY = {3: "28.0, 28.1", 5: "29.4"}  # bytes per parameter, Table 6 by Table 2

Row = tuple[str, ...]


@dataclass(kw_only=True, slots=True)
class Samples:
    """Measurements of a variant's turns, one number for each, of the rank with the most.

    Attributes:
        windows: lengths of the windows that were complete.
        window_bytes: by window, ``[snapshot]``.
    """

    iteration_s: list[float] = field(default_factory=list)
    ratio: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    cpu_ratio: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    forward_backward_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    num_missed: int = 0
    windows: set[int] = field(default_factory=set)
    window_bytes: list[list[int]] = field(default_factory=list)


# --- measuring


def run_part(
    name: str, data: Sequence[str], num_rounds: int, folder: Path
) -> Mapping[str, Samples]:
    """Train with all variants in turns; return what each measured, by name.

    Raises:
        AssertionError: if a rank failed.
    """
    model, loop = PARTS[name]
    rounds = plan_turns(VARIANTS, num_rounds, NUM_MEASURED, NUM_WARM_UP)
    turns = [turn for turns in rounds for turn in turns]
    with job_folder(folder) as job:
        flags = job.flags(model, data, turns[-1].measured.stop) + job.strategy_flags("sparse")
        arguments = (flags, turns, loop, str(job.log))
        run_ranks(
            train_in_turns, NUM_RANKS, *arguments, log_dir=job.log, deadline_s=DEADLINE_S
        ).check()
        log = JobLog(job.log, job.events)
    found = {variant.name: Samples() for variant in VARIANTS}
    for turns in rounds:
        for turn in turns:
            log.read(turn, found[turn.variant.name])
        without = found[NONE]
        for samples in found.values():
            samples.ratio.append(samples.iteration_s[-1] / without.iteration_s[-1])
            samples.cpu_ratio.append(samples.cpu_s[-1] / without.cpu_s[-1])
    return found


class JobLog:
    """Log of the ranks of one job, by iteration."""

    def __init__(self, folder: Path, event_log: Path) -> None:
        ranks = range(NUM_RANKS)
        iterations = [_by_iteration(event_log, rank, "iteration") for rank in ranks]
        self._ended = {number: line["time"] for number, line in iterations[-1].items()}
        self._stalls = [
            {number: line["stall_s"] for number, line in lines.items()} for lines in iterations
        ]
        self._snapshots = [_by_iteration(event_log, rank, "snapshot") for rank in ranks]
        self._windows = [_by_iteration(event_log, rank, "window") for rank in ranks]
        self._skipped = set(_by_iteration(event_log, 0, "skipped"))
        times = [json.loads(times_path(folder, rank).read_text()) for rank in ranks]
        self._times = [{int(number): seconds for number, seconds in each.items()} for each in times]

    def read(self, turn: Turn, samples: Samples) -> None:
        """Add what a turn measured."""
        states = turn.measured
        samples.iteration_s.append(median(self._ended[i + 1] - self._ended[i] for i in states))
        samples.forward_backward_s.append(median(self._times[-1][i + 1][0] for i in states))
        cpu_s = [times[states.stop][1] - times[states.start][1] for times in self._times]
        samples.cpu_s.append(sum(cpu_s) / NUM_RANKS / len(states))
        samples.stall_s.append(max(fmean(stalls[i + 1] for i in states) for stalls in self._stalls))
        taken = [i for i in states if all(i in lines for lines in self._snapshots)]
        for key, values in (("copy_s", samples.copy_s), ("seconds", samples.commit_s)):
            if taken:
                values.append(median(max(s[i][key] for s in self._snapshots) for i in taken))
        samples.num_missed += len(self._skipped.intersection(states))
        for i in states:
            if all(i in lines for lines in self._windows):
                sizes = [lines[i]["bytes"] for lines in self._windows]
                samples.windows.add(len(sizes[0]))
                samples.window_bytes.append([max(each) for each in zip(*sizes, strict=True)])


def _by_iteration(event_log: Path, rank: int, event: str) -> dict[int, Any]:
    return {line["iteration"]: line for line in events(event_log, rank, event)}


def report_memory(flags: list[str], folder: str) -> None:
    """Train on this rank; write what it has reserved, for itself and for peers, and its parameters."""
    memories: list[RankMemory] = []

    def make(*args: Any, **options: Any) -> RankMemory:
        memories.append(RankMemory(*args, **options))
        return memories[-1]

    def start_and_report(*args: Any, **options: Any) -> Checkpointing:
        checkpointing = start(*args, **options)
        regions = (r for each in memories[0].replicas.values() for r in each.regions)
        found = {
            "own": memories[0].num_own_bytes,
            "replicas": sum(region.num_bytes for region in regions),
            "parameters": sum(each.end - each.start for each in checkpointing.met.live.parameters),
        }
        (Path(folder) / f"memory_{os.environ['RANK']}.json").write_text(json.dumps(found))
        return checkpointing

    patches = Patches()
    patches.set(claim, "RankMemory", make)
    patches.set(checkpoints, "start", start_and_report)
    pretrain_gpt_moe.main(flags)


def measure_memory(data: Sequence[str], windows: Sequence[int], folder: Path) -> Iterator[Row]:
    """Yield what strategies reserve, in bytes per parameter."""
    for window in (None, *windows):
        with job_folder(folder) as job:
            flags = job.flags(MEMORY_MODEL, data, max(windows))
            flags += job.strategy_flags("sparse" if window else "dense", window)
            flags += ["--moe-ft-replication-factor", "1"]
            nodes = [f"node{rank}" for rank in range(NUM_RANKS)]
            arguments = (flags, str(job.log))
            run_ranks(report_memory, NUM_RANKS, *arguments, log_dir=job.log, nodes=nodes).check()
            found = [json.loads(path.read_text()) for path in job.log.glob("memory_*.json")]
        total = {key: sum(each[key] for each in found) for key in found[0]}
        own, replicas = (total[key] / total["parameters"] for key in ("own", "replicas"))
        yield (
            "dense" if window is None else f"sparse, window {window}",
            *(f"{own + count * replicas:.1f}" for count in range(3)),
            "26" if window is None else f"{26 + 2 * (window - 1)}",
            PAPER_MEMORY.get(window or 0, ""),
        )


# --- tables


def cost_rows(found: Mapping[str, Samples]) -> Iterator[Row]:
    """Yield what each variant costs."""
    for name, samples in found.items():
        lengths = sorted(samples.windows)
        yield (
            name,
            ", ".join(map(str, lengths)) or "-",
            spread(samples.iteration_s),
            spread(samples.ratio, ".2f"),
            spread(samples.cpu_s),
            spread(samples.cpu_ratio, ".2f"),
            spread(samples.stall_s),
            spread(samples.copy_s),
            spread(samples.commit_s),
            str(samples.num_missed),
        )


def byte_rows(found: Mapping[str, Samples]) -> Iterator[Row]:
    """Yield what the snapshots of each variant hold, and less than dense ones by how much."""
    dense = _mean_of(size for window in found[DENSE].window_bytes for size in window)
    for name, samples in found.items():
        windows = samples.window_bytes
        if name == NONE or not windows:
            continue
        first = _mean_of(window[0] for window in windows)
        mean = _mean_of(fmean(window) for window in windows)
        largest = max(max(window) for window in windows)
        yield (
            name,
            *(f"{size / 1e6:.2f}" for size in (first, largest, mean)),
            *(f"{100 * (1 - size / dense):.1f}" for size in (first, largest, mean)),
        )


def _mean_of(values: Iterable[float]) -> float:
    return fmean(list(values))


COST_HEADERS = (
    "snapshots",
    "window",
    "iteration s",
    "of none",
    "processor s",
    "of none",
    "stall s",
    "copy s",
    "commit s",
    "missed",
)
BYTE_HEADERS = (
    "snapshots",
    "first MB",
    "largest MB",
    "mean MB",
    "first -%",
    "largest -%",
    "mean -%",
)
MEMORY_HEADERS = (
    "strategy",
    "own",
    "with a replica",
    "with two (calculated)",
    "26 + 2(W-1)",
    "paper, Table 6",
)


def part_text(name: str, found: Mapping[str, Samples]) -> list[str]:
    """Return the paragraphs of one part."""
    model, loop = PARTS[name]
    without, dense = found[NONE], found[DENSE]
    text = f"{name}: forward and backward, with what else lies before the fence, take "
    text += f"{median(without.forward_backward_s):.3f} s, a dense copy {median(dense.copy_s):.3f} s"
    if loop.link_bytes_per_s:
        text += f" over a link of {loop.link_bytes_per_s / 1e9:g} GB/s"
    parts = [f"{text}.", markdown_table(cost_rows(found), COST_HEADERS)]
    if not loop.sleep_s:
        parts += [f"{model}, bytes", markdown_table(byte_rows(found), BYTE_HEADERS)]
    return parts


def main() -> None:
    """Run all parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--memory-windows", type=int, nargs="+", default=MEMORY_WINDOWS)
    parser.add_argument("--parts", nargs="+", metavar="TEXT", default=[""])
    options = parse_options(
        parser, rounds=1, parts=["demo, computing", "memory"], memory_windows=[2]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = [
        f"{conditions()} {options.rounds} rounds, turns of {NUM_MEASURED} iterations; median (range) over "
        "rounds."
    ]
    with tempfile.TemporaryDirectory(prefix="sparse_overhead_") as folder_name:
        folder = Path(folder_name)
        data = write_data(folder)
        for name in PARTS:
            if any(text in name for text in options.parts):
                print(name, file=sys.stderr, flush=True)
                parts += part_text(name, run_part(name, data, options.rounds, folder))
        if any(text in "memory" for text in options.parts):
            print("memory", file=sys.stderr, flush=True)
            rows = measure_memory(data, options.memory_windows, folder)
            parts += [
                f"{MEMORY_MODEL}: host memory that is reserved, bytes per parameter",
                markdown_table(rows, MEMORY_HEADERS),
            ]
    show(parts, options.output)


if __name__ == "__main__":
    main()
