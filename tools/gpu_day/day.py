"""The runner of a day: each step in processes of its own, within a budget of seconds. steps.py has the steps.

A step that fails or hangs does not stop the others. After each one the results are complete in their folder,
since the machine may be taken away: `summary.md` for people, `result.json` for programs, `logs.tar.gz`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tools.gpu_day.results import ROOT, WORK, result_path
from tools.gpu_day.steps import Step, Turn

_MARK = "GPU_DAY_STEP"  # in the environment of all processes of a step
_ENDING_S = 6.0  # to kill a step and write results
_REHEARSED_S = 25.0  # of any step, with the small model
_STACKS = "\nstacks:\n"
_MOST_BYTES = 15 << 20  # of logs.tar.gz
_MOST_LOG_BYTES = 3 << 20
_KEPT = (".log", ".json", ".jsonl")


class Result(StrEnum):
    """End of a step."""

    PASSED = "passed"
    FAILED = "FAILED"
    DIFFERS = "DIFFERS"
    LATE = "TOO LATE"
    NOT_BEGUN = "not begun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Line of the summary."""

    name: str
    result: Result
    line: str
    seconds: int = 0


class Runner:
    """Runs steps and writes what is known so far. `run` is called once, by the main thread.

    Args:
        folder: gets the results; at most three files.
        env: further environment of all steps.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        *,
        budget_s: float,
        folder: Path,
        env: Mapping[str, str],
        together: int,
        is_rehearsal: bool,
        title: str,
    ) -> None:
        self._steps = steps
        self._folder = folder
        self._env = dict(env)
        self._together = together
        self._is_rehearsal = is_rehearsal
        self._title = title
        self._start_s = time.monotonic()
        self._end_s = self._start_s + budget_s
        self._outcomes: dict[str, Outcome] = {}
        self._lock = threading.Lock()  # of the outcomes and of the files of results

    def run(self) -> bool:
        """Run all steps; return whether each one passed."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        by_turn = {turn: [each for each in self._steps if each.turn is turn] for turn in Turn}
        for step in by_turn[Turn.FIRST]:
            self._take(step)
        together, alone = by_turn[Turn.TOGETHER], by_turn[Turn.ALONE]
        if self._is_rehearsal:  # no figure counts
            together, alone = [*together, *alone], []
        with ThreadPoolExecutor(self._together) as pool:
            list(pool.map(self._take, together))
        for step in alone:
            self._take(step)
        return all(each.result is Result.PASSED for each in self._compared())

    def _stop(self, number: int, _: object) -> None:
        """End what runs, with all results in place: something has ended this process."""
        kill_marked(f"{os.getpid()} ")
        with suppress(OSError):
            self._write()
        os._exit(128 + number)

    def _take(self, step: Step) -> None:
        left_s = self._end_s - time.monotonic()
        usual_s = min(step.usual_s, _REHEARSED_S) if self._is_rehearsal else step.usual_s
        before = self._outcomes.get(step.after)
        obstacle = ""
        if left_s < usual_s + _ENDING_S:
            obstacle = f"{max(left_s, 0):.0f} s were left, it takes about {usual_s:.0f}"
        elif before is not None and before.result is not Result.PASSED:
            obstacle = f"{step.after} has not passed"
        if obstacle:
            outcome = Outcome(name=step.name, result=Result.NOT_BEGUN, line=obstacle)
        else:
            outcome = self._run(step, min(step.most_s, left_s - _ENDING_S))
        with self._lock:
            self._outcomes[step.name] = outcome
            passed_s = time.monotonic() - self._start_s
            print(f"{passed_s:4.0f} s  {step.name}: {outcome.result}: {outcome.line}", flush=True)
            self._write()

    def _run(self, step: Step, most_s: float) -> Outcome:
        """Run a step in processes of its own, and end all of them."""
        forget(step.name)
        log = WORK / "logs" / f"{step.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        mark = f"{os.getpid()} {step.name} {time.time_ns()}"
        words = step.rehearsed if self._is_rehearsal and step.rehearsed else step.words
        begin_s = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                (sys.executable, *words),
                cwd=ROOT,
                env={**self._env, **self._found(step), **step.env, _MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(most_s)
            except subprocess.TimeoutExpired:
                code = None
                output.write(stacks(process.pid, self._env))
            finally:
                kill_marked(mark)
                process.wait()
        result, line = self._judge(step, log, code, most_s)
        seconds = round(time.monotonic() - begin_s)
        return Outcome(name=step.name, result=result, line=line, seconds=seconds)

    def _found(self, step: Step) -> dict[str, str]:
        """Return variables that the step before has found out."""
        return dict(read_result(step.after).get("env", {})) if step.after else {}

    def _judge(self, step: Step, log: Path, code: int | None, most_s: float) -> tuple[Result, str]:
        text = log.read_text(errors="replace").partition(_STACKS)[0]
        lines = [line for line in text.splitlines() if line.strip()]
        last = lines[-1].strip("= ")[:260] if lines else ""
        if code is None:
            return Result.LATE, f"killed after {most_s:.0f} s: {last}"
        if step.is_tests:
            failed = [line[:220] for line in lines if line.startswith(("FAILED", "ERROR"))]
            is_good = code == 0 and (" passed" in last or self._is_rehearsal)
            return Result.PASSED if is_good else Result.FAILED, "; ".join([last, *failed[:3]])
        found = read_result(step.name)
        line = found.get("line", last)
        if code or not found.get("is_good"):
            return Result.FAILED, f"{line} (exit code {code})" if code else line
        return Result.PASSED, line

    def _compared(self) -> list[Outcome]:
        """Return all outcomes; a reference may have ended after what is compared with it."""
        return [
            self._compare(step, self._outcomes[step.name])
            for step in self._steps
            if step.name in self._outcomes
        ]

    def _compare(self, step: Step, outcome: Outcome) -> Outcome:
        is_other = self._is_rehearsal and step.rehearsed  # which trained nothing
        if not step.of or is_other or outcome.result is not Result.PASSED:
            return outcome
        expected, found = (read_result(name).get("digest") for name in (step.of, step.name))
        result = Result.PASSED
        if not expected:
            result, verdict = Result.FAILED, f"no digests of {step.of} to compare with"
        elif found == expected:
            verdict = "BITWISE EQUAL"
        elif found and [each[0] for each in found] == [each[0] for each in expected]:
            result = Result.DIFFERS
            verdict = "weights and moments equal, the rest differs (RNG, buffers, scalars)"
        else:
            result, verdict = Result.DIFFERS, "weights and moments differ"
        return Outcome(
            name=step.name,
            result=result,
            line=f"{verdict}; {outcome.line}",
            seconds=outcome.seconds,
        )

    def _write(self) -> None:
        """Write all results; each file is complete at any time."""
        outcomes = {each.name: each for each in self._compared()}
        rows = [
            self._title,
            "",
            "| step | result | s | question | answer |",
            "|---|---|---|---|---|",
        ]
        for step in self._steps:
            if (each := outcomes.get(step.name)) is not None:
                cells = (each.name, each.result, str(each.seconds), step.question, each.line)
                rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
        replace(self._folder / "summary.md", "\n".join(rows) + "\n")
        figures = {
            name: {**asdict(each), "figures": read_result(name)} for name, each in outcomes.items()
        }
        replace(self._folder / "result.json", json.dumps(figures, indent=1))
        self._pack_logs()

    def _pack_logs(self) -> None:
        path = self._folder / "logs.tar.gz"
        temporary = path.with_suffix(".new")
        num_bytes = 0
        try:
            with tarfile.open(temporary, "w:gz", compresslevel=3) as archive:
                for each in sorted(WORK.rglob("*")):
                    if each.suffix in _KEPT and each.stat().st_size < _MOST_LOG_BYTES:
                        num_bytes += each.stat().st_size
                        if num_bytes < 4 * _MOST_BYTES:
                            archive.add(each, each.relative_to(WORK))
            if temporary.stat().st_size < _MOST_BYTES:
                temporary.replace(path)
        except OSError as error:  # a step that runs has removed one; the next archive is whole
            print(f"logs.tar.gz is not renewed: {error}", flush=True)
        finally:
            temporary.unlink(missing_ok=True)


def read_result(name: str) -> dict[str, Any]:
    """Return what a step has left; empty if nothing."""
    path = result_path(name)
    return dict(json.loads(path.read_text())) if path.exists() else {}


def forget(name: str) -> None:
    """Remove an earlier run of a step.

    A fault happens once in an event log, memory may hold the state of another model, and an old result must
    not stand for a new one.
    """
    for each in (WORK / "jobs" / name, memory_of(name)):
        shutil.rmtree(each, ignore_errors=True)
    result_path(name).unlink(missing_ok=True)


def memory_of(name: str) -> Path:
    """Return the folder in host memory of a step's job."""
    return Path("/dev/shm") / f"gpu_day_{os.getuid()}_{name}"


def replace(path: Path, text: str) -> None:
    """Write a file that is whole at any time."""
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)


def stacks(pid: int, env: Mapping[str, str]) -> bytes:
    """Return where a step that is late stands, if py-spy is there."""
    program = shutil.which("py-spy", path=env.get("PATH"))
    if program is None:
        return b""
    command = (program, "dump", "--subprocesses", "--pid", str(pid))
    try:
        done = subprocess.run(command, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{_STACKS}none: {error}\n".encode()
    return _STACKS.encode() + done.stdout[-8000:] + done.stderr[-500:]


def kill_marked(mark: str) -> None:
    """Kill what a step has started, also ranks in sessions of their own: the next step needs the GPU."""
    wanted = f"{_MARK}={mark}".encode()
    while True:
        is_found = False
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with suppress(OSError):  # it has ended, or is another user's
                    variables = (folder / "environ").read_bytes().split(b"\0")
                    if any(each.startswith(wanted) for each in variables):
                        os.kill(int(folder.name), signal.SIGKILL)
                        is_found = True
        if not is_found:
            return
        time.sleep(0.05)
