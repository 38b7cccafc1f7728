"""Steps of a first day on a GPU, in order of value, and a small runner that needs nobody.

    python -m tools.gpu_day [STEP...] [--folder DIR] [--dry-run]

Each step is a command of at most nine minutes, which needs no other step. Its output is DIR/STEP.log, its
tables are DIR/STEP.md, and a summary there has a line for each. A step that fails, or hangs, does not stop
the rest. Steps that are named run alone, so that a machine that is lent for minutes can do one at a time.
Without a GPU the command shows what would have run. docs/first_day_on_a_gpu.md says what a person has to look
at.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

import psutil
from tabulate import tabulate

ROOT = Path(__file__).resolve().parents[1]
MOST_MINUTES = 9
TESTS_PASSED = r"\b\d+ passed\b"  # a run whose tests were all skipped also ends with 0
TABLE = r"^\|[-|]+\|$"
MARK = "MOE_FT_GPU_DAY"  # in the environment of all processes of a step
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


class Need(StrEnum):
    """Something that a machine may lack."""

    GPU = "a GPU"
    TWO_GPUS = "two GPUs"
    TRANSFORMER_ENGINE = "Transformer Engine"


class Result(StrEnum):
    """End of a step."""

    PASSED = "passed"
    FAILED = "FAILED"
    NOTHING = "NOTHING RAN"
    LATE = "TOO LATE"
    LACKING = "not run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A command and what it shows.

    Attributes:
        words: after `python`.
        expected: pattern in its output, without which nothing was shown.
        minutes: after which it is killed.
    """

    name: str
    shows: str
    words: tuple[str, ...]
    expected: str
    needs: tuple[Need, ...] = (Need.GPU,)
    minutes: float = MOST_MINUTES
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The command, for people."""
        words = (f"'{word}'" if " " in word else word for word in self.words)
        return " ".join(["python", *words])


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Line of the summary."""

    name: str
    result: str
    seconds: int
    detail: str


def tests(name: str, shows: str, *words: str, needs: tuple[Need, ...] = (Need.GPU,)) -> Step:
    """Return a step that runs tests."""
    options = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    return Step(
        name=name, shows=shows, words=(*options, *words), expected=TESTS_PASSED, needs=needs
    )


def table(
    name: str,
    shows: str,
    *words: str,
    needs: tuple[Need, ...] = (Need.GPU,),
    env: Mapping[str, str] | None = None,
) -> Step:
    """Return a step that runs a benchmark."""
    return Step(
        name=name, shows=shows, words=("-m", *words), expected=TABLE, needs=needs, env=env or {}
    )


_RECOVERY = "tests/gpu/test_gpu_recovery.py"
_REPAIR = "tests/gpu/test_gpu_repair.py"
_TWO = (Need.TWO_GPUS,)
_TE = (Need.GPU, Need.TRANSFORMER_ENGINE)
_STRATEGIES = ("dense", "partial", "sparse", "packed-dense", "split-sparse")
_FEW_BITS = (
    *("fp16-fp16+fp16", "fp32-fp32+fp32", "fp16-fp32+fp32", "fp16-fp8+fp16"),
    *("fp32-bf16+bf16", "own-fp16+fp8", "fp8-delayed", "fp8-fp16-fp8+fp16", "grouped"),
)

STEPS = (
    *(
        tests(
            f"recovery-{name}",
            "a killed run ends with the bits of one that was not",
            f"{_RECOVERY}::test_run_that_is_killed_on_a_gpu_ends_in_the_state_of_one_that_was_not[{name}]",
        )
        for name in _STRATEGIES
    ),
    tests(
        "training",
        "deterministic runs are equal; sends are logged before their memory is used again",
        "tests/gpu/test_gpu_training.py",
        "tests/gpu/test_gpu_boundary_log.py",
    ),
    # The state of this benchmark is in host memory: GPUs would only disturb what stands for them.
    table(
        "stall",
        "what a checkpoint costs training, next to its peers, on the cores of this machine",
        *("benchmarks.stall", "--rounds", "3", "--work", "sleep"),
        needs=(),
        env=_NO_GPU,
    ),
    tests(
        "kernel-bits",
        "kernels and staging give the bits of the reference",
        *("tests/unit/kernels", "tests/gpu/test_gpu_packing.py"),
    ),
    table(
        "kernel-speed",
        "kernels against copies, snapshots through staging against one copy per tensor",
        "benchmarks.kernels",
    ),
    table(
        "kernel-code",
        "registers, spills, widths; for comparison with the speed",
        "benchmarks.kernel_code",
        needs=(),
    ),
    tests(
        "repair-nccl",
        "groups of one rank are aborted and renewed 20 times; groups that only pretend",
        *(_REPAIR, "-k", "groups_of_nccl"),
    ),
    tests(
        "repair-gloo",
        "a rank that is killed is replaced, two ranks on one GPU over gloo",
        *(_REPAIR, "-k", "over_gloo"),
    ),
    *(
        tests(
            f"te-{name.replace('+', '-')}",
            "Transformer Engine: a killed run ends with the bits of one that was not",
            f"{_RECOVERY}::test_state_of_transformer_engine_is_recovered_bitwise[{name}]",
            needs=_TE,
        )
        for name in _FEW_BITS
    ),
    *(
        tests(
            f"repair-two-{strategy}-{phase}",
            "a rank that is killed is replaced over NCCL, in four layouts",
            *(_REPAIR, "-k", f"same_bits and {strategy} and {phase}"),
            needs=_TWO,
        )
        for strategy in ("dense", "sparse")
        for phase in ("forward", "backward", "in-step", "after-step")
    ),
    tests(
        "repair-two-kept",
        "survivors keep their state before the step, and go back after it",
        *(_REPAIR, "-k", "keep_their_state"),
        needs=_TWO,
    ),
    tests(
        "breakpoints-two",
        "ranks that leave abort NCCL, and the state that they leave is continued from",
        *(_REPAIR, "-k", "leave_a_breakpoint"),
        needs=_TWO,
    ),
    tests(
        "repair-two-silent",
        "a rank that stands still is killed and replaced, one that others wait for ends itself",
        *(_REPAIR, "-k", "stopped or time_out"),
        needs=_TWO,
    ),
)


def find_lacks() -> dict[Need, bool]:
    """Return what this machine lacks."""
    import torch

    num_gpus = torch.cuda.device_count()
    has_te = importlib.util.find_spec("transformer_engine") is not None
    return {
        Need.GPU: num_gpus < 1,
        Need.TWO_GPUS: num_gpus < 2,
        Need.TRANSFORMER_ENGINE: not has_te,
    }


def run_step(step: Step, folder: Path, lacks: Mapping[Need, bool]) -> Outcome:
    """Run a step in processes of its own; write its log, its tables and its outcome."""
    missing = [need.value for need in step.needs if lacks.get(need)]
    log, tables = folder / f"{step.name}.log", folder / f"{step.name}.md"
    start = time.monotonic()
    if missing:
        result, detail = Result.LACKING, f"needs {' and '.join(missing)}"
    else:
        log.write_text(f"$ {step.command}\n")
        result, detail = _run(step, log)
        lines = log.read_text(errors="replace").splitlines()[1:]
        if step.expected == TABLE and any(re.match(TABLE, line) for line in lines):
            tables.write_text("\n".join(lines) + "\n")
    seconds = round(time.monotonic() - start)
    outcome = Outcome(name=step.name, result=result.value, seconds=seconds, detail=detail)
    (folder / f"{step.name}.json").write_text(json.dumps(asdict(outcome)))
    return outcome


def _run(step: Step, log: Path) -> tuple[Result, str]:
    mark = f"{os.getpid()} {step.name} {time.time_ns()}"
    with log.open("ab") as output:
        process = subprocess.Popen(
            (sys.executable, *step.words),
            cwd=ROOT,
            env={**os.environ, **step.env, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            code = process.wait(60 * step.minutes)
        except subprocess.TimeoutExpired:
            return Result.LATE, f"killed after {step.minutes} minutes"
        finally:
            _end_processes(mark)
            process.wait()
    if code:
        return Result.FAILED, f"exit code {code}"
    text = log.read_text(errors="replace").partition("\n")[2]
    if not re.search(step.expected, text, re.MULTILINE):
        return Result.NOTHING, "the log says why"
    return Result.PASSED, ""


def _end_processes(mark: str) -> None:
    """Kill what a step has started, also ranks in sessions of their own: the next step needs the GPU."""
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                is_alive = process.status() != psutil.STATUS_ZOMBIE
                if is_alive and process.environ().get(MARK) == mark:
                    process.kill()
                    found.append(process)
        if not found:
            return
        psutil.wait_procs(found, timeout=1)


def summarize(steps: Iterable[Step], folder: Path) -> str:
    """Write the table of all steps that have an outcome, also of earlier commands; return it."""
    rows = []
    for step in steps:
        path = folder / f"{step.name}.json"
        if path.exists():
            each = Outcome(**json.loads(path.read_text()))
            rows.append((each.name, each.result, each.seconds, each.detail, step.shows))
    text: str = tabulate(rows, ("step", "result", "seconds", "why", "shows"), "github")
    (folder / "summary.md").write_text(text + "\n")
    return text


def run_all(
    steps: Sequence[Step], folder: Path, lacks: Mapping[Need, bool], of: Sequence[Step] = ()
) -> int:
    """Run steps one after the other.

    Args:
        of: all steps, whose earlier outcomes the summary keeps.

    Returns:
        1 if a step has shown a mistake, or nothing, although it could run; else 0.
    """
    folder.mkdir(parents=True, exist_ok=True)
    is_good = True
    for step in steps:
        print(f"{step.name}: {step.command}", flush=True)
        outcome = run_step(step, folder, lacks)
        print(f"  {outcome.result} {outcome.detail}, {outcome.seconds} s", flush=True)
        is_good &= outcome.result in (Result.PASSED, Result.LACKING)
        summarize(of or steps, folder)  # now: the machine may be taken away
    print(summarize(of or steps, folder))
    return 0 if is_good else 1


def describe(steps: Sequence[Step]) -> str:
    """Return what would run, in this order."""
    rows = [
        (each.name, " and ".join(each.needs) or "-", each.minutes, each.command) for each in steps
    ]
    text: str = tabulate(rows, ("step", "needs", "minutes at most", "command"), "github")
    minutes = sum(each.minutes for each in steps)
    return f"{text}\n\n{len(steps)} steps would have run, in at most {minutes} minutes."


def main(words: Sequence[str] | None = None) -> int:
    """Run the steps that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="*", metavar="STEP", help="names; all by default")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu_day", metavar="DIR")
    parser.add_argument("--dry-run", action="store_true", help="show what would run")
    options = parser.parse_args(words)
    unknown = set(options.steps) - {step.name for step in STEPS}
    if unknown:
        parser.error(f"no such steps: {', '.join(sorted(unknown))}; --dry-run lists them")
    chosen = [step for step in STEPS if not options.steps or step.name in options.steps]
    lacks = find_lacks()
    if options.dry_run or lacks[Need.GPU]:
        reason = "" if options.dry_run else "No GPU was found: this is a dry run.\n\n"
        print(f"{reason}{describe(chosen)}")
        return 0
    return run_all(chosen, options.folder.resolve(), lacks, of=STEPS)


if __name__ == "__main__":
    raise SystemExit(main())
