"""Cost of a checkpoint to training, O_save of MoC-System's Fig. 12: blocking, asynchronous, and partial.

    python -m benchmarks.partial_overhead [--rounds N] [--windows N] [--quick] [--output FILE.md]

Trains an MoE GPT whose expert state is large against its compute with two ranks (expert parallelism 2)
through the real training loop. Every candidate is a job of its own; the jobs take turns, in rounds. A window
is four iterations with two checkpoints, of which candidates with a memory tier bring one to storage. Times
are those at which the event log has the iterations.

O_save       a window minus the median window without checkpoints, per checkpoint
stall        what the training thread waits at the fence, per checkpoint, as the event log has it
reduction    of a round's median O_save against that of Megatron's blocking save in the same round: torch
             without the distributed optimizer, torch_dist with it
rank MB      what the rank with the most copies in a snapshot, or writes
persist      what a rank's part of a checkpoint on storage takes, alongside training
missed       snapshots that were due and not taken, because the one before was not complete
"""

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.conditions import versions
from benchmarks.output import markdown_table, parse_options, show, spread
from benchmarks.sparse_jobs import job_folder, write_data
from tests.demo_model import layout_flags, model_flags
from tests.harness import events, run_training

NUM_RANKS = 2
INTERVAL = 2
WINDOW = 4  # iterations
NUM_WARM_UP = 4  # iterations
CHECKPOINTS_PER_WINDOW = WINDOW // INTERVAL

MODEL: dict[str, str | int | float | bool] = {
    "num_layers": 4,
    "moe_layer_freq": "([0]+[1]*3)",  # odd: with K = 1 one rank has more selected experts than the other
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "moe_ffn_hidden_size": 512,
    "num_experts": 16,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 8,
    "global_batch_size": 16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A way for a job to save its state.

    Attributes:
        flags: of Megatron or moe_ft; empty for no checkpoints.
        own: whether it is moe_ft, with both tiers.
        distributed: whether the optimizer is distributed.
    """

    flags: tuple[str, ...] = ()
    own: bool = False
    distributed: bool = False


def megatron(*flags: str) -> Candidate:
    """Return a job that saves with Megatron's own flags."""
    return Candidate(flags=("--save-interval", str(INTERVAL), *flags))


def moe_ft(strategy: str, sharding: str, k: int = 0, *, distributed: bool = False) -> Candidate:
    """Return a job that saves with moe_ft."""
    flags = ["--moe-ft-strategy", strategy, "--moe-ft-sharding", sharding]
    flags += ["--moe-ft-interval", str(INTERVAL)]
    flags += ["--moe-ft-persist-interval", str(CHECKPOINTS_PER_WINDOW)]
    if k:
        flags += ["--moe-ft-k-snapshot", str(k), "--moe-ft-k-persist", str(k)]
    return Candidate(flags=tuple(flags), own=True, distributed=distributed)


PLAIN = {False: "no checkpoints", True: "no checkpoints, distributed optimizer"}
BLOCKING = {False: "Megatron torch, blocking", True: "Megatron torch_dist, blocking, dist. opt."}
CANDIDATES: dict[str, Candidate] = {
    PLAIN[False]: Candidate(),
    BLOCKING[False]: megatron("--ckpt-format", "torch"),
    "Megatron torch_dist, blocking": megatron("--ckpt-format", "torch_dist"),
    "Megatron torch_dist, asynchronous": megatron("--ckpt-format", "torch_dist", "--async-save"),
    "full, sharding none (Base-Async)": moe_ft("dense", "none"),
    "full, sharding equal": moe_ft("dense", "equal"),
    **{
        f"K={k}, sharding {sharding}": moe_ft("partial", sharding, k)
        for k in (4, 2, 1)
        for sharding in ("none", "equal", "adaptive")
    },
    PLAIN[True]: Candidate(distributed=True),
    BLOCKING[True]: Candidate(
        flags=("--save-interval", str(INTERVAL), "--ckpt-format", "torch_dist"), distributed=True
    ),
    "full, distributed optimizer": moe_ft("dense", "equal", distributed=True),
    "K=1, distributed optimizer": moe_ft("partial", "equal", 1, distributed=True),
}


@dataclass(kw_only=True, slots=True)
class Samples:
    """Measurements of a candidate's jobs, all rounds together; seconds are per checkpoint.

    Attributes:
        windows: by round, seconds of each window.
        bytes: of the rank with the most, in each checkpoint.
        persist_s, persist_bytes: of every rank's part of a checkpoint on storage.
    """

    windows: list[list[float]] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    persist_s: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    persist_bytes: list[int] = field(default_factory=list)
    num_missed: int = 0


def run(name: str, data: Sequence[str], num_windows: int, folder: Path) -> Samples:
    """Run a candidate's job once."""
    os.sync()  # what jobs before have left to be written must not fall on this one
    candidate = CANDIDATES[name]
    changes = {
        **MODEL,
        "use_distributed_optimizer": candidate.distributed,
        "train_iters": NUM_WARM_UP + WINDOW * num_windows,
    }
    flags = [*model_flags(**changes), *layout_flags({"ep": NUM_RANKS}), *data, *candidate.flags]
    with job_folder(folder) as job:
        flags += ["--moe-ft-event-log", str(job.events)]
        if candidate.own:
            flags += ["--moe-ft-memory-dir", str(job.memory), "--moe-ft-job-id", "overhead"]
            flags += ["--moe-ft-persist-dir", str(job.log / "saved")]
        elif candidate.flags:
            flags += ["--save", str(job.log / "saved")]
        run_training(flags, NUM_RANKS, log_dir=job.log, deadline_s=400).check()
        samples = read_events(job.events, num_windows)
        if candidate.flags and not candidate.own:
            samples.bytes = list(file_bytes(job.log / "saved"))
        return samples


def read_events(folder: Path, num_windows: int) -> Samples:
    """Return what the event logs of a job say."""
    samples, last = Samples(), NUM_WARM_UP + WINDOW * num_windows
    lines = events(folder, NUM_RANKS - 1, "iteration")
    ended = {line["iteration"]: line["time"] for line in lines}
    starts = range(NUM_WARM_UP, last, WINDOW)
    samples.windows = [[ended[start + WINDOW] - ended[start] for start in starts]]
    stalls = [
        {line["iteration"]: line["stall_s"] for line in events(folder, rank, "iteration")}
        for rank in range(NUM_RANKS)
    ]
    samples.stall_s = [
        max(sum(stall[start + step] for step in range(1, WINDOW + 1)) for stall in stalls)
        / CHECKPOINTS_PER_WINDOW
        for start in starts
    ]
    by_iteration = defaultdict(list)
    for rank in range(NUM_RANKS):
        for line in events(folder, rank, "snapshot"):
            if NUM_WARM_UP <= line["iteration"] < last:
                by_iteration[line["iteration"]].append((line["bytes"], line["copy_s"]))
        for line in events(folder, rank, "persist"):
            if NUM_WARM_UP <= line["iteration"] < last:
                samples.persist_s.append(line["seconds"])
                samples.persist_bytes.append(line["bytes"])
    samples.bytes = [max(each[0] for each in lines) for lines in by_iteration.values()]
    samples.copy_s = [max(each[1] for each in lines) for lines in by_iteration.values()]
    if by_iteration:
        samples.num_missed = CHECKPOINTS_PER_WINDOW * num_windows - len(by_iteration)
    return samples


def file_bytes(folder: Path) -> Iterator[int]:
    """Yield the bytes of the rank that wrote the most, for each of Megatron's checkpoints."""
    for checkpoint in folder.glob("iter_*"):
        by_rank: dict[str, int] = defaultdict(int)
        for path in checkpoint.rglob("*"):
            if path.is_file():  # mp_rank_00_001/model_optim_rng.pt or __1_0.distcp
                parts = path.relative_to(checkpoint).parts
                rank = parts[0] if len(parts) > 1 else path.name.split("_")[2:3]
                by_rank[str(rank)] += path.stat().st_size
        yield max(by_rank.values())


# --- the table


def overheads(name: str, found: Mapping[str, Samples]) -> list[list[float]]:
    """Return O_save in seconds per checkpoint, by round and window."""
    plain = found[PLAIN[CANDIDATES[name].distributed]].windows
    # Of all rounds: a single job may be off by more than what most candidates cost.
    without = median(window for windows in plain for window in windows)
    return [
        [(window - without) / CHECKPOINTS_PER_WINDOW for window in windows]
        for windows in found[name].windows
    ]


def rows(found: Mapping[str, Samples]) -> Iterator[tuple[str, ...]]:
    """Yield the row of each candidate."""
    for name, samples in found.items():
        iteration_s = [window / WINDOW for windows in samples.windows for window in windows]
        costs = overheads(name, found)
        reductions = []
        blocking = BLOCKING[CANDIDATES[name].distributed]
        if blocking in found and name not in (blocking, *PLAIN.values()):
            for own, base in zip(costs, overheads(blocking, found), strict=True):
                reductions.append(100 * (1 - median(own) / median(base)))
        yield (
            name,
            spread(iteration_s),
            "-" if name in PLAIN.values() else spread([c for costs_ in costs for c in costs_]),
            spread(reductions, ".0f"),
            spread(samples.stall_s) if samples.copy_s else "-",
            spread(samples.copy_s),
            spread([size / 1e6 for size in samples.bytes], ".1f"),
            spread(samples.persist_s, ".2f"),
            spread([size / 1e6 for size in samples.persist_bytes], ".1f"),
            str(samples.num_missed),
        )


HEADERS = (
    "candidate",
    "iteration s",
    "O_save s",
    "reduction %",
    "stall s",
    "copy s",
    "rank MB",
    "persist s",
    "persist MB",
    "missed",
)


def conditions(rounds: int, num_windows: int) -> str:
    """Return under what the numbers were taken."""
    return (
        f"{rounds} rounds of {num_windows} windows of {WINDOW} iterations, a checkpoint every "
        f"{INTERVAL}; two ranks on {os.cpu_count()} cores. Median (range) over windows, of the reduction "
        f"over rounds. {versions()}."
    )


def merge(total: Samples, more: Samples) -> None:
    """Add what another round measured."""
    for name in ("windows", "stall_s", "copy_s", "persist_s", "bytes", "persist_bytes"):
        getattr(total, name).extend(getattr(more, name))
    total.num_missed += more.num_missed


def main() -> None:
    """Run all candidates in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--candidates", nargs="+", metavar="TEXT", default=[""])
    options = parse_options(
        parser, rounds=1, windows=1, candidates=["K=1, distributed", "blocking"]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [
        name
        for name in CANDIDATES
        if name in PLAIN.values() or any(text in name for text in options.candidates)
    ]
    found = {name: Samples() for name in names}
    with tempfile.TemporaryDirectory(prefix="overhead_") as folder_name:
        folder = Path(folder_name)
        data = write_data(folder)
        for number in range(options.rounds):
            for name in names if number % 2 == 0 else reversed(names):
                if name not in found:
                    continue
                print(f"round {number}: {name}", file=sys.stderr, flush=True)
                try:
                    merge(found[name], run(name, data, options.windows, folder))
                except AssertionError as error:  # a rank failed
                    print(error, file=sys.stderr)
                    del found[name]
    parts = [conditions(options.rounds, options.windows)]
    parts += [markdown_table(rows(found), HEADERS)]
    parts += [f"- {name}: not measured: a rank failed" for name in names if name not in found]
    show(parts, options.output)
    sys.exit(int(len(found) < len(names)))


if __name__ == "__main__":
    main()
