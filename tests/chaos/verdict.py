"""Runs the job of a case to its end, and judges it by an undisturbed run of the same model.

The reference trains without checkpoints and without a launcher, so no mistake can be in both.
"""

import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.chaos.cases import EXITS_EVERY, NUM_ITERATIONS, NUM_RANKS, Case, Kind, Launcher
from tests.chaos.job import ChaosJob, HangError
from tests.chaos.strikes import Striker, small_disk
from tests.harness import events
from tests.namespaces import Namespaces
from tests.references import Place

_MOST_STARTS = 6
_GONE_S = 30.0  # for processes to end after the job
_CLOSE, _OTHER_SUMS = 1e-6, 2e-4  # relative differences of losses: same sums, sums in another order


class Verdict(StrEnum):
    """Ends of a case, the worst last."""

    RIGHT = "right"
    RESTARTED = "ended rightly, restart equal"
    NOT_STRUCK = "not struck"
    DRIVER = "fault of the driver"
    LEFTOVER = "leftover"
    WRONG_END = "wrong end"
    HANG = "hang"
    WRONG_STATE = "wrong state"


GOOD = (Verdict.RIGHT, Verdict.RESTARTED, Verdict.NOT_STRUCK)


@dataclass(kw_only=True)
class Result:
    """Outcome of a case."""

    case: Case
    verdict: Verdict = Verdict.RIGHT
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)

    def blame(self, verdict: Verdict, problem: str) -> None:
        """Note a problem; the worst one decides."""
        order = list(Verdict)
        self.verdict = max(self.verdict, verdict, key=order.index)
        self.problems.append(f"{verdict}: {problem}")

    def line(self) -> dict[str, Any]:
        """Return what the report has of it."""
        return asdict(self)


def run_case(case: Case, place: Place, sockets: Path | None = None) -> Result:
    """Run a case in a place of its own.

    Args:
        sockets: folder that only this job's fork servers use, if there is one.
    """
    result = Result(case=case)
    with ExitStack() as stack:
        storage = place.folder / "storage"
        if case.has_disk:
            storage = stack.enter_context(small_disk(storage))
        names = [f"n{number}" for number in range(case.num_nodes + case.num_spares)]
        networks = stack.enter_context(Namespaces(*names)) if case.has_networks else None
        job = stack.enter_context(ChaosJob(case, place, storage, networks))
        try:
            place.references.digests(job.base, NUM_RANKS)
            _run(job, result)
            _judge_state(job, place, result)
            _judge_leftovers(job, result, sockets)
        except HangError as error:
            result.blame(Verdict.HANG, str(error))
            _judge_state(job, place, result)
        except Exception:
            result.blame(Verdict.DRIVER, traceback.format_exc())
        result.notes = job.notes
    return result


def _run(job: ChaosJob, result: Result) -> None:
    """Start the job, strike, and start it again as often as it ends before its time, and may."""
    job.start()
    striker = Striker(job)
    for strike in job.case.strikes:
        if job.has_ended() and not _starts_again(job, result):
            break
        if striker.strike(strike):
            result.struck.append(str(strike.kind))
    else:
        while job.wait(job.has_ended, poll_s=0.05) is None or _starts_again(job, result):
            if not job.has_ended():
                raise HangError("the job has moved, and not come to an end")
    if not result.struck and result.verdict is Verdict.RIGHT:
        result.blame(Verdict.NOT_STRUCK, "no moment or target came")


def _starts_again(job: ChaosJob, result: Result) -> bool:
    """Start a job again that has ended before its last iteration; judge how it has ended."""
    codes, is_whole = job.codes(), _is_whole(job)
    failed = {name: code for name, code in codes.items() if code}
    job.note(f"ended with {codes}, {'at' if is_whole else 'before'} the last iteration")
    if failed and not job.may_end:
        result.blame(Verdict.WRONG_END, f"exit codes {failed}, and no strike may end the job")
    if is_whole:
        return False
    exits = job.case.exits and (job.iteration() + 1) % EXITS_EVERY == 0
    if not failed and not exits and not job.may_end:
        result.blame(Verdict.WRONG_END, f"exit codes {codes} before the last iteration")
    if job.starts >= _MOST_STARTS:
        result.blame(Verdict.WRONG_END, f"{job.starts} starts have not ended the job")
        return False
    if failed:
        result.verdict = max(result.verdict, Verdict.RESTARTED, key=list(Verdict).index)
    job.start()
    return True


def _is_whole(job: ChaosJob) -> bool:
    return {*_final_digests(job)} | _played(job) >= {*range(NUM_RANKS)}


def _final_digests(job: ChaosJob) -> dict[int, set[str]]:
    """Return by rank the digests after the last iteration, which should be one."""
    found: dict[int, set[str]] = {}
    for rank, line in _events(job, "state_digest"):
        if line["iteration"] == NUM_ITERATIONS:
            found.setdefault(rank, set()).add(line["sha256_all"])
    return found


def _events(job: ChaosJob, event: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for rank in range(NUM_RANKS):
        if (job.events_dir / f"rank_{rank:05d}.jsonl").exists():
            yield from ((rank, line) for line in events(job.events_dir, rank, event))


def _played(job: ChaosJob) -> set[int]:
    """Return the ranks whose roles others play since the last repair, or that a smaller job lacks."""
    repairs = [line for _, line in _events(job, "repair")]
    last = max(repairs, key=lambda line: line["time"], default={"played": {}})
    lacking = set()
    if job.case.fewest:
        starts = [line for _, line in _events(job, "start")]
        size = max(starts, key=lambda line: line["time"], default={"world_size": NUM_RANKS})
        lacking = {*range(size["world_size"], NUM_RANKS)}
    return {int(rank) for rank in last["played"]} | lacking


def _judge_state(job: ChaosJob, place: Place, result: Result) -> None:
    """Compare losses and final digests with those of the reference."""
    digests = place.references.digests(job.base, NUM_RANKS)
    if not job.case.fewest:  # sums of fewer ranks have another order
        for rank, found in sorted(_final_digests(job).items()):
            if found != {digests[rank][1]}:
                result.blame(Verdict.WRONG_STATE, f"rank {rank} has ended in another state")
    losses = place.references.losses(job.base, NUM_RANKS)
    most = _OTHER_SUMS if job.case.fewest else _CLOSE
    wrong = {
        line["iteration"]: f"{line['loss']} is not {losses[line['iteration']]}"
        for _, line in _events(job, "iteration")
        if line["loss"] is not None
        if abs(line["loss"] / losses[line["iteration"]] - 1) > most
    }
    if wrong:
        first = min(wrong)
        problem = f"losses of {len(wrong)} iterations, first of {first}: {wrong[first]}"
        result.blame(Verdict.WRONG_STATE, problem)


def _judge_leftovers(job: ChaosJob, result: Result, sockets: Path | None) -> None:
    """Find processes, memory and sockets that a job has left whose nodes could clean up."""
    job.wait_gone(_GONE_S)
    for each in job.processes():
        result.blame(Verdict.LEFTOVER, f"process {each.pid} {each.name()} {each.cmdline()[:8]}")
    kinds = {strike.kind for strike in job.case.strikes}
    # A node whose processes were killed is off: it cleans up when it starts again.
    killed = kinds & {Kind.KILL_AGENT, Kind.KILL_ZYGOTE}
    memory = [path for path in job.memory_dir.rglob("*") if path.is_file()]
    if memory and not (killed and job.case.launcher is Launcher.NODES):
        shown = [str(path.relative_to(job.memory_dir)) for path in sorted(memory)[:3]]
        result.blame(Verdict.LEFTOVER, f"{len(memory)} files in memory: {shown}")
    left = [] if sockets is None or not job.case.is_real else list(sockets.rglob("*.socket*"))
    if left and not killed and Kind.LOSE_NODES not in kinds:
        result.blame(Verdict.LEFTOVER, f"sockets: {[path.name for path in left]}")
