"""Local against global recoveries: time of the replay, bytes of the boundary logs, and seconds by phase.

    python -m benchmarks.local_recovery [--stages N ...] [--micro-batches N ...] [--repeats N]
        [--parts NAME ...] [--forward-s S] [--backward-s S] [--quick] [--output FILE.md]

Each job trains the demo model in pretrain_gpt_moe.py under torchrun and `moe_ft keep`, with one rank in each
pipeline stage and sparse windows of 3. The middle rank is killed in the backward of the iteration that ends a
window, --repeats times in a job, and all ranks start again. So a local recovery runs the same two iterations
again as a global one, which every recovery is checked for. All jobs with the same stages and micro-batches
must end in the same state, bit for bit.

sleeping   forward and backward of a micro-batch sleep until a given time has passed, so that stages take as
           long as on devices of their own (benchmarks/slow_stages.py)
computing  as it is: the stages share the cores, and a stage that replays alone has them for itself

Seconds of a replay are for each iteration, on the slowest rank; "last" leaves out the first iteration of
each process, which is slower. "local / global" is the median of the pairs, one recovery each; "slots" the
time that stages sleep at least, alone and together. Expected are M / (M+S-1), which is 1 less the bubble
share, and on C cores the least time that they allow: M / max(M+S-1, S M / C). Phases are those of
benchmarks/recoveries.py; "torchrun" is without `moe_ft keep`. Medians (ranges).
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.jobs import data_folder, job_folder, run_under_torchrun
from benchmarks.output import conditions, distinct, markdown_table, read_options, show, spread
from benchmarks.recoveries import (
    PHASES,
    Answer,
    Event,
    Expected,
    Recovery,
    check_answers,
    digests_of,
    read_recoveries,
)
from benchmarks.slow_stages import notes_path
from moe_ft.planning.boundary_log import PipelineTraffic, num_slots
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events

WINDOW = 3
NUM_REPLAYS = WINDOW - 1
SEQUENCE, HIDDEN, ELEMENT_BYTES = 32, 64, 2
LEAST_LAYERS = 8
SLEEPING, COMPUTING, PLAIN = "sleeping", "computing", "plain"
PARTS = (SLEEPING, COMPUTING, PLAIN)
SCOPES = ("local", "global")

Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """1F1B schedule of a pipeline, whose stages are equally fast.

    Its unit is a slot: the time of one micro-batch on one stage, forward and backward. Reading logs and the
    optimizer step are left out. Source: MoEvement, section 3.4.
    """

    num_stages: int
    num_microbatches: int

    @property
    def bubble_share(self) -> float:
        """Share of an iteration in which a stage waits for others."""
        return (self.num_stages - 1) / self.slots(self.num_stages)

    def slots(self, num_live: int) -> int:
        """Return the length of an iteration of neighbouring stages that are linked live."""
        return self.num_microbatches + num_live - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job but for its scope of recovery.

    Attributes:
        stage_s: seconds of forward and of backward; 0 to compute.
        keeps: whether ranks are forked by `moe_ft keep`.
    """

    num_stages: int
    num_microbatches: int
    num_recoveries: int
    stage_s: tuple[float, float] = (0.0, 0.0)
    keeps: bool = True

    @property
    def killed(self) -> int:
        """Rank and stage that is killed: one with neighbours on both sides, if there is one."""
        return self.num_stages // 2

    @property
    def kills(self) -> list[int]:
        """Iterations in which it is killed, each the last of a window.

        One window lies between: a breakpoint is left once all ranks know of a window after the last recovery.
        """
        return [WINDOW * (2 * number + 1) for number in range(self.num_recoveries)]

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule."""
        return Schedule(num_stages=self.num_stages, num_microbatches=self.num_microbatches)

    @property
    def traffic(self) -> PipelineTraffic:
        """Tensors that the formula counts."""
        return PipelineTraffic(
            num_stages=self.num_stages,
            num_chunks=1,
            num_microbatches=self.num_microbatches,
            shape=(SEQUENCE, 1, HIDDEN),
            element_bytes=ELEMENT_BYTES,
        )

    def words(self, scope: str, notes: Path, memory: Path) -> list[str]:
        """Return what torchrun starts, without data and event log."""
        stages = self.num_stages
        changes: dict[str, str | int] = {
            "num_layers": stages * max(1, LEAST_LAYERS // stages),
            "seq_length": SEQUENCE,
            "hidden_size": HIDDEN,
            "micro_batch_size": 1,
            "global_batch_size": self.num_microbatches,
            "train_iters": self.kills[-1] + 2,
        }
        program = [*("-m", "benchmarks.slow_stages", "--notes", str(notes)), "--memory-dir"]
        program += [str(memory), "--forward-s", str(self.stage_s[0])]
        flags = [*model_flags(**changes), *layout_flags({"pp": stages})]
        flags += ["--moe-ft-strategy", "sparse", "--moe-ft-window", str(WINDOW)]
        flags += ["--moe-ft-upstream-log", "--moe-ft-breakpoints", "--moe-ft-recovery", scope]
        flags += ["--moe-ft-job-id", "benchmark", "--moe-ft-fault-report-grace-s", "0.2"]
        for iteration in self.kills:
            flags += ["--moe-ft-inject-fault", f"kill:{self.killed}@{iteration}:backward"]
        return [*program, "--backward-s", str(self.stage_s[1]), "--", *flags]


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """Measurements of one job.

    Attributes:
        digests: ``[rank]`` of the last state.
        logs: ``[rank][recovery]`` the boundary logs that the start before has left.
    """

    recoveries: Sequence[Recovery]
    digests: Sequence[tuple[str, str]]
    logs: Sequence[Sequence[Sequence[Mapping[str, int]]]]


Results = Mapping[str, Result]  # by scope


# --- measuring


def run_job(case: Case, scope: str, data: Sequence[str], folder: Path) -> Result:
    """Run a job to its end and read what it has left.

    Raises:
        AssertionError: if the job fails, or a recovery is not what it must be.
    """
    with job_folder(folder) as job:
        run_under_torchrun(
            [*case.words(scope, job.log, job.memory), *data, *event_flags(job.events)],
            case.num_stages,
            max_restarts=case.num_recoveries,
            log_path=job.log / "output",
            keeps=case.keeps,
        )
        ranks = range(case.num_stages)
        logs = [events(job.events, rank) for rank in ranks]
        notes = [_read_notes(notes_path(job.log, rank)) for rank in ranks]
    expected = Expected(
        answer=Answer.RESTART,
        killed=case.killed,
        kills=case.kills,
        is_local=scope == "local",
        num_replays=NUM_REPLAYS,
    )
    check_answers(logs, expected)
    return Result(
        recoveries=read_recoveries(logs, notes, case.killed),
        digests=digests_of(logs),
        logs=[[each["logs"] for each in own] for own in notes],
    )


def _read_notes(path: Path) -> list[Event]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measure(case: Case, data: Sequence[str], folder: Path) -> Results:
    """Return what jobs with local and with global recoveries have measured."""
    found = {}
    for scope in SCOPES:
        found[scope] = run_job(case, scope, data, folder)
        replays = ", ".join(f"{each.replay_s:.2f}" for each in found[scope].recoveries)
        name = f"{case.num_stages} stages, {case.num_microbatches} micro-batches"
        print(f"{name}, {part_of(case)}, {scope}: {replays} s", file=sys.stderr, flush=True)
    return found


def part_of(case: Case) -> str:
    """Return the part that a case belongs to."""
    return PLAIN if not case.keeps else SLEEPING if any(case.stage_s) else COMPUTING


def check_digests(found: Mapping[Case, Results]) -> None:
    """Check that jobs which train the same have ended in the same state.

    Raises:
        AssertionError: if two have not.
    """
    known: dict[tuple[int, int], tuple[str, Sequence[tuple[str, str]]]] = {}
    for case, results in found.items():
        for scope, result in results.items():
            own = f"{part_of(case)}, {scope}"
            key = case.num_stages, case.num_microbatches
            other, digests = known.setdefault(key, (own, result.digests))
            assert digests == result.digests, f"{key}: {own} ends in another state than {other}"


# --- tables


REPLAY_HEADERS = (
    *("S", "M", "stages are", "bubble", "slots, s", "local, s", "global, s", "local / global"),
    *("last, local, s", "last, global, s", "last, local / global", "expected", "on these cores"),
)


def expected_ratio(schedule: Schedule, num_cores: int | None) -> float:
    """Return the time of a stage alone, of that of all stages together on so many cores; None: enough."""
    slots = float(schedule.slots(schedule.num_stages))
    if num_cores is not None:
        slots = max(slots, schedule.num_stages * schedule.num_microbatches / num_cores)
    return schedule.slots(1) / slots


def replay_row(case: Case, results: Results, num_cores: int) -> Row:
    """Return the times of replays, local and global."""
    pairs = list(zip(*(results[scope].recoveries for scope in SCOPES), strict=True))
    replays = [tuple(each.replay_s / NUM_REPLAYS for each in pair) for pair in pairs]
    last = [tuple(each.last_replay_s for each in pair) for pair in pairs]
    schedule, slot_s = case.schedule, sum(case.stage_s)
    slots = schedule.slots(1), schedule.slots(case.num_stages)
    return (
        *(str(case.num_stages), str(case.num_microbatches), part_of(case)),
        f"{schedule.bubble_share:.0%}",
        ", ".join(f"{each * slot_s:.2f}" for each in slots) if slot_s else "-",
        *_compared(replays),
        *_compared(last),
        f"{expected_ratio(schedule, None):.2f}",
        f"{expected_ratio(schedule, None if slot_s else num_cores):.2f}",
    )


def _compared(pairs: Sequence[tuple[float, ...]]) -> Row:
    """Return local and global seconds and the ratio of each pair."""
    return (
        *(spread(seconds, ".2f") for seconds in zip(*pairs, strict=True)),
        spread([local / whole for local, whole in pairs], ".2f"),
    )


LOG_HEADERS = (
    *("S", "M", "stage", "tensors", "of the formula", "bytes", "of the formula"),
    *("file", "of the formula", "most files", "slots"),
)


def log_rows(case: Case, results: Results) -> Iterator[Row]:
    """Yield what ranks of each kind of stage have logged in an iteration, next to the formula."""
    traffic = case.traffic
    for stage, name in stage_names(case.num_stages):
        left = [logs for result in results.values() for logs in result.logs[stage]]
        found = [log for logs in left for log in logs]
        yield (
            *(str(case.num_stages), str(case.num_microbatches), name),
            *(distinct(log["tensors"] for log in found), f"{traffic.num_sends(stage):,}"),
            *(distinct(log["bytes"] for log in found), f"{traffic.sent_bytes(stage):,}"),
            *(distinct(log["file_bytes"] for log in found), f"{traffic.slot_bytes(stage):,}"),
            *(str(max(map(len, left))), str(num_slots(WINDOW, 1))),
        )


def stage_names(num_stages: int) -> list[tuple[int, str]]:
    """Return one stage of each kind, with its name."""
    middle = [(num_stages // 2, "middle")] if num_stages > 2 else []
    return [(0, "first"), *middle, (num_stages - 1, "last")]


PHASE_HEADERS = ("S", "M", "started by", "recovery", *PHASES, "total", "largest")


def phase_rows(case: Case, results: Results) -> Iterator[Row]:
    """Yield the seconds of each phase, local and global."""
    for scope, result in results.items():
        medians = {
            name: median(each.phases_s[name] for each in result.recoveries) for name in PHASES
        }
        total_s = median(each.total_s for each in result.recoveries)
        largest = max(PHASES, key=medians.__getitem__)
        yield (
            *(str(case.num_stages), str(case.num_microbatches)),
            *("keep" if case.keeps else "torchrun", scope),
            *(f"{medians[name]:.2f}" for name in PHASES),
            f"{total_s:.2f}",
            f"{largest}, {medians[largest] / total_s:.0%}",
        )


PAPER_HEADERS = ("MoEvement", "value", "source")
PAPER_ROWS = (
    ("recovery of 1 of 3 stages, less time", "23 %", "section 3.4, Fig. 9"),
    ("ETTR with upstream logging, all models", "0.97", "section 5.6, Fig. 13"),
    ("ETTR gained by upstream logging, 12 stages", "50 %", "section 5.6, Fig. 13, DeepSeek-MoE"),
    ("logs of MoE-LLaVa", "1.9 GB", "Table 6, Y"),
    ("logs of GPT-MoE", "4.2 GB", "Table 6, Y"),
    ("logs of QWen-MoE", "12.4 GB", "Table 6, Y"),
    ("logs of DeepSeek-MoE", "21.1 GB", "Table 6, Y"),
)


def tables(found: Mapping[Case, Results], num_cores: int) -> list[str]:
    """Return all tables, with their titles."""
    kept = {case: results for case, results in found.items() if case.keeps}
    # Slow ranks send the same as fast ones.
    by_size = {(case.num_stages, case.num_microbatches): case for case in reversed(kept)}
    sizes = sorted(by_size.values(), key=lambda case: (case.num_stages, case.num_microbatches))
    phases = [case for case in found if is_in_phases(case, found)]
    return [
        "Replay of an iteration",
        markdown_table(
            [replay_row(case, results, num_cores) for case, results in kept.items()], REPLAY_HEADERS
        ),
        markdown_table(PAPER_ROWS, PAPER_HEADERS),
        "Boundary log of one iteration and rank, read from the files after the kills",
        markdown_table([row for case in sizes for row in log_rows(case, found[case])], LOG_HEADERS),
        "Recovery by phase, in seconds, on the rank that was killed; stages sleep",
        markdown_table(
            [row for case in phases for row in phase_rows(case, found[case])], PHASE_HEADERS
        ),
    ]


def is_in_phases(case: Case, found: Mapping[Case, Results]) -> bool:
    """Return whether phases of a case are shown: those with sleeping stages and the most micro-batches."""
    return any(case.stage_s) and case.num_microbatches == max(c.num_microbatches for c in found)


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """Yield the jobs to run, by stages and micro-batches."""
    slow = options.forward_s, options.backward_s
    for stages, microbatches in itertools.product(options.stages, options.micro_batches):
        case = Case(
            num_stages=stages, num_microbatches=microbatches, num_recoveries=options.repeats
        )
        if SLEEPING in options.parts:
            yield replace(case, stage_s=slow)
        if COMPUTING in options.parts:
            yield case
        is_plain = (stages, microbatches) == (min(options.stages), max(options.micro_batches))
        if PLAIN in options.parts and is_plain:
            yield replace(case, stage_s=slow, keeps=False)


def main() -> None:
    """Run all jobs and print the tables."""
    options = read_options(
        stages=([2, 4, 8], [2]),
        micro_batches=([4, 8, 16], [4]),
        repeats=(3, 1, "recoveries in each job"),
        parts=(list(PARTS), [SLEEPING]),
        forward_s=(0.025, 0.025, "of a sleeping stage"),
        backward_s=(0.05, 0.05, "of a sleeping stage"),
    )
    parts = [
        conditions(
            f"Window {WINDOW}; recoveries a job: {options.repeats}; sleeping stages take "
            f"{options.forward_s:g} s forward and {options.backward_s:g} s backward."
        )
    ]
    found: dict[Case, Results] = {}
    with data_folder() as (folder, data):
        for case in cases_of(options):
            found[case] = measure(case, data, folder)
            check_digests(found)
    show([*parts, *tables(found, os.cpu_count() or 1)], options.output)


if __name__ == "__main__":
    main()
