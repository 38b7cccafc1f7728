"""Time to recover from sparse windows, and the share that frozen units save in replayed iterations.

    python -m benchmarks.sparse_recovery [--rounds N] [--windows N ...] [--parts TEXT ...] [--quick]
        [--output FILE.md]

Recoveries: rank 1 of two is killed where an iteration's backward begins, at every place of a window once,
and all ranks start again, with W = 1 (dense), 2, 3 and 6 snapshots in a window. "redone" are iterations that
were complete and are run again, W-1 of them in the conversion, the rest in the stock loop. Their mean is
1.5 W - 0.5 where a window counts from the end of the iteration behind its last snapshot on, and 1.5 W - 1.5
where it counts at once. Phases are those of rank 0's `recovery` event; the start of the processes comes
before them, and the first iterations of a process are slower than later ones. "back" is all phases, and what
is run again in the stock loop at the speed of later iterations.

Frozen units: between the iterations of the stock loop one is run again in each variant, in the same process
and in turns (benchmarks/replay_turns.py). "skipped" leaves out the weight gradients of frozen units;
"dropped", with Freezing(is_possible=False), computes all, and only the optimizer passes over frozen units.
Median (range) of rank 0, and the medians of the ratios to the replay with nothing frozen in the same round.
"processor" is the time of all threads of a rank, which hardly grows with what else runs on the machine.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

from benchmarks.output import markdown_table, parse_options, show, spread
from benchmarks.replay_turns import NUM_WARM_UP, ReplayVariant, train_and_replay
from benchmarks.sparse_jobs import (
    DEADLINE_S,
    NUM_RANKS,
    JobFolder,
    conditions,
    job_folder,
    write_data,
)
from tests.harness import events, run_ranks, run_with_restarts

WINDOWS = (1, 2, 3, 6)
FEWEST_KILLS = 3
NUM_FIRST = 3  # iterations of a process that are slower than later ones
NUM_AFTER = 6  # iterations after the last recovery

REFERENCE = "replay, nothing frozen"
VARIANTS = (
    ReplayVariant(name=REFERENCE, share=0.0),
    ReplayVariant(name="replay, half frozen, skipped", share=0.5),
    ReplayVariant(name="replay, all frozen, skipped", share=1.0),
    ReplayVariant(name="replay, half frozen, dropped", share=0.5, skips=False),
    ReplayVariant(name="replay, all frozen, dropped", share=1.0, skips=False),
)
RECOVERY_MODELS = ("demo", "64 experts")
REPLAY_MODELS = ("compute-bound", "64 experts")

Row = tuple[str, ...]
Times = Mapping[str, Sequence[tuple[float, float, float, float]]]


# --- recoveries


def plan_kills(window: int) -> list[int]:
    """Return iterations in which to kill, so that failures are at each place of a window equally often.

    Windows begin anew after each recovery, with the iteration after the one that training goes on from.
    """
    num_kills = window * -(-FEWEST_KILLS // window)
    return [2 * window * (number + 1) + number % window for number in range(num_kills)]


def recover(
    model: str, window: int, kills: Sequence[int], data: Sequence[str], folder: Path
) -> Row:
    """Train, kill and start again; return a row.

    Raises:
        AssertionError: if the run does not come to its end.
    """
    with job_folder(folder) as job:
        flags = job.flags(model, data, kills[-1] + NUM_AFTER)
        flags += job.strategy_flags("sparse", window)
        for iteration in kills:
            flags += ["--moe-ft-inject-fault", f"kill:1@{iteration}:backward"]
        results = run_with_restarts(
            flags,
            NUM_RANKS,
            log_dir=job.log,
            max_restarts=len(kills),
            deadline_s=DEADLINE_S,
        )
        results[-1].check()
        return recovery_row(model, window, job)


def recovery_row(model: str, window: int, job: JobFolder) -> Row:
    """Return what the event log says of the recoveries of a run."""
    recoveries = events(job.events, 0, "recovery")
    faults = [line["iteration"] for line in events(job.events, 1, "fault_injected")]
    assert len(faults) == len(recoveries), "a start found nothing to recover from"
    redone = [
        fault - recovery["restored_iteration"]
        for fault, recovery in zip(faults, recoveries, strict=True)
    ]
    iteration_s = median(_later_iterations(job))
    phases = [recovery["phases_s"] for recovery in recoveries]
    replays = [each.get("replay", 0.0) for each in phases]
    back = [
        sum(phase.values()) + (fault - recovery["target_iteration"]) * iteration_s
        for phase, fault, recovery in zip(phases, faults, recoveries, strict=True)
    ]
    each = [seconds / (window - 1) for seconds in replays] if window > 1 else []
    return (
        model,
        str(window),
        str(len(faults)),
        f"{fmean(redone):.1f} ({min(redone)} to {max(redone)})",
        f"{1.5 * window - 0.5:.1f}, {1.5 * window - 1.5:.1f}",
        *(spread([phase[name] for phase in phases]) for name in ("inventory", "plan", "restore")),
        spread(replays) if window > 1 else "-",
        spread(each),
        f"{iteration_s:.3f}",
        spread(back, ".2f"),
    )


def _later_iterations(job: JobFolder) -> Iterator[float]:
    """Yield how long iterations took, without the first ones of each process."""
    number, incarnation = 0, -1
    for line in events(job.events, 0, "iteration"):
        number = number + 1 if line["incarnation"] == incarnation else 1
        incarnation = line["incarnation"]
        if number > NUM_FIRST:
            yield line["iteration_s"]


RECOVERY_HEADERS = (
    "model",
    "W",
    "kills",
    "redone",
    "1.5 W - 0.5, - 1.5",
    "inventory s",
    "plan s",
    "restore s",
    "replay s",
    "per iteration",
    "normal iteration s",
    "back s",
)


# --- frozen units


def replay_times(model: str, num_rounds: int, data: Sequence[str], folder: Path) -> Times:
    """Return rank 0's times; raises AssertionError if a rank failed."""
    with job_folder(folder) as job:
        num_iterations = NUM_WARM_UP + num_rounds
        # What replays read is read from the data set too.
        planned = num_iterations + num_rounds * len(VARIANTS)
        flags = job.flags(model, data, planned) + job.strategy_flags("sparse", 1)
        flags += ["--exit-interval", str(num_iterations)]
        arguments = (flags, VARIANTS, num_rounds, str(job.log))
        run_ranks(
            train_and_replay, NUM_RANKS, *arguments, log_dir=job.log, deadline_s=DEADLINE_S
        ).check()
        times: Times = json.loads((job.log / "times_0.json").read_text())
        return times


def replay_rows(times: Times) -> Iterator[Row]:
    """Yield a row for the stock loop's iterations and for each variant."""
    reference = times[REFERENCE]
    for name in ("", *(variant.name for variant in VARIANTS)):
        found = times[name]
        ratios = [
            median(own[index] / base[index] for own, base in zip(found, reference, strict=True))
            for index in range(4)
        ]
        yield (
            name or "iteration of the stock loop",
            spread([each[0] for each in found]),
            spread([each[1] for each in found]),
            spread([each[2] for each in found]),
            *(f"{ratio:.2f}" for ratio in ratios),
        )


REPLAY_HEADERS = (
    "iteration",
    "s",
    "forward and backward s",
    "processor s",
    "ratio",
    "forward and backward",
    "processor",
    "forward and backward, processor",
)


def main() -> None:
    """Run all parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="of replays")
    parser.add_argument("--windows", type=int, nargs="+", default=WINDOWS)
    parser.add_argument("--parts", nargs="+", metavar="TEXT", default=[""])
    options = parse_options(
        parser, rounds=1, windows=[2], parts=["recovery demo", "replay 64 experts"]
    )
    os.environ["OMP_NUM_THREADS"] = "1"
    parts = [conditions()]
    with tempfile.TemporaryDirectory(prefix="sparse_recovery_") as folder_name:
        folder = Path(folder_name)
        data = write_data(folder)
        rows = []
        for model in RECOVERY_MODELS:
            if not any(text in f"recovery {model}" for text in options.parts):
                continue
            for window in options.windows:
                print(f"recovery: {model}, window {window}", file=sys.stderr, flush=True)
                rows.append(recover(model, window, plan_kills(window), data, folder))
        if rows:
            parts += ["Recoveries, median (range)", markdown_table(rows, RECOVERY_HEADERS)]
        for model in REPLAY_MODELS:
            if any(text in f"replay {model}" for text in options.parts):
                print(f"replay: {model}", file=sys.stderr, flush=True)
                found = list(replay_rows(replay_times(model, options.rounds, data, folder)))
                parts += [f"Frozen units, {model}, {options.rounds} rounds"]
                parts += [markdown_table(found, REPLAY_HEADERS)]
    show(parts, options.output)


if __name__ == "__main__":
    main()
