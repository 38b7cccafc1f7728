"""Cost of snapshots to training: dense, sparse and partial ones of moe_ft beside Megatron's own checkpoints.

    python -m benchmarks.papers.overhead [--loops NAME ...] [--candidates TEXT ...] [--rounds N] [--windows N]
        [--quick] [--output FILE.md]

O_save of MoC-System's Fig. 12, and the overhead of MoEvement's windows. Two ranks (expert parallelism 2)
train a model whose state is large against its compute through the real training loop. Every candidate is a
job of its own; the jobs take turns, in rounds, back and forth. Times are those at which the event log has the
iterations, in stretches ("windows") of `WINDOW` iterations. Loops:

partial    16 experts a layer, of which one rank has more selected ones; a checkpoint every second iteration,
           of which candidates with a memory tier bring every second one to storage
sparse     64 experts a layer and 310 MB of state per rank; a snapshot every iteration, in memory
sleeping   likewise, and forward and backward sleep: a copy has a core for itself, as next to a GPU
link       likewise, and copies take as long as over a link that brings a dense snapshot in three iterations'
           forward and backward: what PCIe is to a GPU with much state

cost         a window minus the median window without checkpoints, per iteration
reduction    of a round's median cost against that of Megatron's blocking save in the same round: torch
             without the distributed optimizer, torch_dist with it
stall        what the training thread waits at the fence, per iteration, as the event log has it
copy, commit until the weights may change, and until the snapshot is committed
rank MB      what the rank with the most copies in a snapshot, or writes
persist      what a rank's part of a checkpoint on storage takes, alongside training
missed       snapshots that were due and not taken, because the one before was not complete
"""

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from megatron.training import training

import pretrain_gpt_moe
from benchmarks.jobs import DEADLINE_S, MODELS, NUM_RANKS, Changes, data_folder, job_folder
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.snapshots import copying
from tests.demo_model import layout_flags, model_flags
from tests.harness import events, run_training

WINDOW = 12  # iterations: a multiple of all windows of snapshots
NUM_WARM_UP = 12  # iterations
PLAIN = {False: "no checkpoints", True: "no checkpoints, distributed optimizer"}
BLOCKING = {False: "Megatron torch, blocking", True: "Megatron torch_dist, blocking, dist. opt."}

_patches = Patches()  # for as long as a rank runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A way for a job to save its state.

    Attributes:
        flags: of Megatron or moe_ft; empty for no checkpoints.
        own: whether it is moe_ft.
    """

    flags: tuple[str, ...] = ()
    own: bool = False
    distributed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Use of time by the training loop, and what is compared in it.

    Attributes:
        interval: iterations between snapshots.
        sleep_s: sleep for so long instead of forward and backward; 0 to compute.
        link_bytes_per_s: copies into regions take at least as long as over a link of this rate, for whose
            rest they wait without a core; 0 to copy as fast as the host can.
    """

    model: Changes
    candidates: Mapping[str, Candidate]
    interval: int = 1
    sleep_s: float = 0.0
    link_bytes_per_s: float = 0.0


def _megatron(*flags: str, distributed: bool = False) -> Candidate:
    return Candidate(flags=("--save-interval", "2", *flags), distributed=distributed)


def _moe_ft(strategy: str, *flags: str, distributed: bool = False) -> Candidate:
    given = ("--moe-ft-strategy", strategy, *flags)
    return Candidate(flags=given, own=True, distributed=distributed)


def _stored(strategy: str, sharding: str, k: int = 0, *, distributed: bool = False) -> Candidate:
    """Return a candidate with both tiers."""
    flags = ["--moe-ft-sharding", sharding, "--moe-ft-interval", "2"]
    flags += ["--moe-ft-persist-interval", "2"]
    if k:
        flags += ["--moe-ft-k-snapshot", str(k), "--moe-ft-k-persist", str(k)]
    return _moe_ft(strategy, *flags, distributed=distributed)


_PARTIAL = {
    PLAIN[False]: Candidate(),
    BLOCKING[False]: _megatron("--ckpt-format", "torch"),
    "Megatron torch_dist, blocking": _megatron("--ckpt-format", "torch_dist"),
    "Megatron torch_dist, asynchronous": _megatron("--ckpt-format", "torch_dist", "--async-save"),
    "full, sharding none (Base-Async)": _stored("dense", "none"),
    "full, sharding equal": _stored("dense", "equal"),
    **{
        f"K={k}, sharding {sharding}": _stored("partial", sharding, k)
        for k in (4, 2, 1)
        for sharding in ("none", "equal", "adaptive")
    },
    PLAIN[True]: Candidate(distributed=True),
    BLOCKING[True]: _megatron("--ckpt-format", "torch_dist", distributed=True),
    "full, distributed optimizer": _stored("dense", "equal", distributed=True),
    "K=1, distributed optimizer": _stored("partial", "equal", 1, distributed=True),
}
_SPARSE = {
    PLAIN[True]: Candidate(distributed=True),
    "dense, every iteration": _moe_ft("dense", "--moe-ft-interval", "1", distributed=True),
    **{
        f"sparse, window {window}": _moe_ft("sparse", "--moe-ft-window", window, distributed=True)
        for window in ("2", "3", "6", "auto")
    },
}
_PARTIAL_MODEL: Changes = {
    "num_layers": 4,
    "moe_layer_freq": "([0]+[1]*3)",  # odd: with K = 1 one rank has more selected experts
    "hidden_size": 256,
    "ffn_hidden_size": 1024,
    "moe_ffn_hidden_size": 512,
    "num_experts": 16,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 8,
    "global_batch_size": 16,
}
_LARGE = MODELS["64 experts"]
LOOPS = {
    "partial": Loop(model=_PARTIAL_MODEL, candidates=_PARTIAL, interval=2),
    "sparse": Loop(model=_LARGE, candidates=_SPARSE),
    "sleeping": Loop(model=_LARGE, candidates=_SPARSE, sleep_s=0.1),
    "link": Loop(model=_LARGE, candidates=_SPARSE, sleep_s=0.1, link_bytes_per_s=1e9),
}


def train(sleep_s: float, link_bytes_per_s: float, flags: list[str]) -> None:
    """Train on this rank, with forward, backward and copies as a loop says."""

    def sleep(**_: Any) -> list[dict[str, torch.Tensor]]:
        time.sleep(sleep_s)  # gradients stay what they are, which is zero
        return [{"lm loss": torch.ones(1)}]

    def get(*_: Any, **__: Any) -> Callable[..., Any]:
        return sleep

    copy_all = copying.StateCopier._copy_all

    def copy_slowly(copier: Any, copies: Sequence[Any]) -> set[tuple[str, str]]:
        start = time.perf_counter()
        absent = copy_all(copier, copies)
        seconds = sum(copy.target.nbytes for copy in copies) / link_bytes_per_s
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return absent

    if sleep_s:
        _patches.set(training, "get_forward_backward_func", get)
    if link_bytes_per_s:
        _patches.set(copying.StateCopier, "_copy_all", copy_slowly)
    pretrain_gpt_moe.main(flags)


@dataclass(kw_only=True, slots=True)
class Samples:
    """Measurements of a candidate's jobs, all rounds together.

    Attributes:
        windows: by round, seconds of each window.
        stall_s: per iteration, on the rank that waits longest.
        copy_s, commit_s, bytes: of the rank with the most, in each snapshot.
        persist_s, persist_bytes: of every rank's part of a checkpoint on storage.
    """

    windows: list[list[float]] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)
    commit_s: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    persist_s: list[float] = field(default_factory=list)
    persist_bytes: list[int] = field(default_factory=list)
    num_missed: int = 0

    def read(self, folder: Path, num_windows: int) -> None:
        """Add what the event logs of a job have."""
        last, ranks = NUM_WARM_UP + WINDOW * num_windows, range(NUM_RANKS)
        ends = {each["iteration"]: each["time"] for each in events(folder, 1, "iteration")}
        starts = range(NUM_WARM_UP, last, WINDOW)
        self.windows.append([ends[start + WINDOW] - ends[start] for start in starts])
        by_iteration: dict[tuple[str, int], list[Any]] = defaultdict(list)
        for kind in ("iteration", "snapshot", "persist"):
            for rank in ranks:
                for line in events(folder, rank, kind):
                    if NUM_WARM_UP <= line["iteration"] < last:
                        by_iteration[kind, line["iteration"]].append(line)
        for (kind, _), lines in by_iteration.items():
            if kind == "iteration":
                self.stall_s.append(max(each["stall_s"] for each in lines))
            elif kind == "snapshot":
                for values, name in (
                    (self.copy_s, "copy_s"),
                    (self.commit_s, "seconds"),
                    (self.bytes, "bytes"),
                ):
                    values.append(max(each[name] for each in lines))
            else:
                self.persist_s += [each["seconds"] for each in lines]
                self.persist_bytes += [each["bytes"] for each in lines]
        skipped = events(folder, 0, "skipped")
        self.num_missed += sum(NUM_WARM_UP <= each["iteration"] < last for each in skipped)


def run(
    loop: Loop, name: str, data: Sequence[str], num_windows: int, folder: Path, samples: Samples
) -> None:
    """Run a candidate's job once."""
    os.sync()  # what jobs before have left to be written must not fall on this one
    candidate = loop.candidates[name]
    changes = {
        **loop.model,
        "use_distributed_optimizer": candidate.distributed,
        "train_iters": NUM_WARM_UP + WINDOW * num_windows,
    }
    flags = [*model_flags(**changes), *layout_flags({"ep": NUM_RANKS}), *data, *candidate.flags]
    with job_folder(folder) as job:
        flags += ["--moe-ft-event-log", str(job.events)]
        if candidate.own:
            flags += job.memory_flags
            if loop.interval > 1:
                flags += ["--moe-ft-persist-dir", str(job.log / "saved")]
        elif candidate.flags:
            flags += ["--save", str(job.log / "saved")]
        program = partial(train, loop.sleep_s, loop.link_bytes_per_s)
        run_training(
            flags, NUM_RANKS, log_dir=job.log, deadline_s=DEADLINE_S, train=program
        ).check()
        samples.read(job.events, num_windows)
        if candidate.flags and not candidate.own:
            samples.bytes += file_bytes(job.log / "saved")


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


def costs(loop: Loop, name: str, found: Mapping[str, Samples]) -> list[list[float]]:
    """Return the seconds that an iteration takes longer, by round and window."""
    plain = found[PLAIN[loop.candidates[name].distributed]].windows
    # Of all rounds: a single job may be off by more than what most candidates cost.
    without = median(window for windows in plain for window in windows)
    return [[(window - without) / WINDOW for window in windows] for windows in found[name].windows]


def rows(loop: Loop, found: Mapping[str, Samples]) -> Iterator[tuple[str, ...]]:
    """Yield the row of each candidate."""
    for name, samples in found.items():
        own = costs(loop, name, found)
        blocking, reductions = BLOCKING[loop.candidates[name].distributed], list[float]()
        if blocking in found and name not in (blocking, *PLAIN.values()):
            base = costs(loop, blocking, found)
            reductions = [
                100 * (1 - median(each) / median(of)) for each, of in zip(own, base, strict=True)
            ]
        yield (
            name,
            spread([window / WINDOW for windows in samples.windows for window in windows]),
            "-" if name in PLAIN.values() else spread([each for of in own for each in of]),
            spread(reductions, ".0f"),
            spread(samples.stall_s),
            spread(samples.copy_s),
            spread(samples.commit_s),
            spread([size / 1e6 for size in samples.bytes], ".1f"),
            spread(samples.persist_s, ".2f"),
            spread([size / 1e6 for size in samples.persist_bytes], ".1f"),
            str(samples.num_missed),
        )


HEADERS = (
    *("candidate", "iteration s", "cost s", "reduction %", "stall s", "copy s", "commit s"),
    *("rank MB", "persist s", "persist MB", "missed"),
)


def main() -> None:
    """Run all candidates in turns, and print the tables."""
    options = read_options(
        loops=(list(LOOPS), ["link"]),
        rounds=(2, 1),
        windows=(3, 1, f"of {WINDOW} iterations in a job"),
        candidates=([""], ["window 3"], "parts of names"),
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = [
        conditions(
            f"{options.rounds} rounds of {options.windows} windows of {WINDOW} iterations; two ranks. "
            "Median (range) over windows, of the reduction over rounds."
        )
    ]
    failed = []
    with data_folder() as (folder, data):
        for loop_name in options.loops:
            loop = LOOPS[loop_name]
            names = [
                name
                for name in loop.candidates
                if name in PLAIN.values() or any(text in name for text in options.candidates)
            ]
            found = {name: Samples() for name in names}
            for number in range(options.rounds):
                for name in names[:: -1 if number % 2 else 1]:
                    if name not in found:
                        continue
                    print(f"{loop_name}, round {number}: {name}", file=sys.stderr, flush=True)
                    try:
                        run(loop, name, data, options.windows, folder, found[name])
                    except AssertionError as error:  # a rank failed
                        print(error, file=sys.stderr)
                        del found[name]
            parts += [loop_name, markdown_table(rows(loop, found), HEADERS)]
            failed += [
                f"- {name}: not measured: a rank failed" for name in names if name not in found
            ]
    show([*parts, *failed], options.output)
    sys.exit(int(bool(failed)))


if __name__ == "__main__":
    main()
