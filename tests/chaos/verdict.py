"""Runs the job of a case to its end, and judges it by a run without checkpoints, launcher and faults."""

import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil

from moe_ft.events import event_path
from tests.chaos.cases import NUM_ITERATIONS, NUM_RANKS, Case, Kind
from tests.chaos.job import ChaosJob, HangError
from tests.chaos.strikes import Striker, small_disk
from tests.harness import events
from tests.namespaces import Namespaces
from tests.references import Place

_MOST_STARTS = 8
_GONE_S = 30.0  # for processes to end after the job
_CLOSE, _OTHER_SUMS = 1e-6, 2e-4  # relative differences of losses: same sums, sums in another order


class Verdict(StrEnum):
    """Ends of a case, the worst last."""

    RIGHT = "right"
    RESTARTED = "ended rightly, restart equal"
    NOT_STRUCK = "not struck"
    DRIVER = "driver fault"
    LEFTOVER = "leftover"
    WRONG_END = "wrong end"
    HANG = "hang"
    WRONG_STATE = "wrong state"


GOOD = (Verdict.RIGHT, Verdict.RESTARTED, Verdict.NOT_STRUCK)


@dataclass
class Result:
    """Outcome of a case: the worst verdict, the problems, the strikes that hit, and what was done when."""

    case: Case
    verdict: Verdict = Verdict.RIGHT
    problems: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, problem: str = "") -> None:
        self.verdict = max(self.verdict, verdict, key=list(Verdict).index)
        self.problems += [f"{verdict}: {problem}"] if problem else []


def run_case(case: Case, place: Place, sockets: Path | None = None) -> Result:
    """Run a case in a place of its own; `sockets` is a folder that only its fork servers use."""
    result = Result(case)
    with ExitStack() as stack:
        storage = place.folder / "storage"
        if case.has_disk:
            storage = stack.enter_context(small_disk(storage))
        job = ChaosJob(case, place, storage)
        if case.has_networks:
            job.networks = stack.enter_context(Namespaces(*job.logs))
        stack.enter_context(job)
        result.notes = job.notes
        try:
            place.references.digests(job.base, NUM_RANKS)
            _run(job, result)
            if not result.struck:
                result.add(Verdict.NOT_STRUCK, "no moment or target came")
            _judge_leftovers(job, result, sockets)
        except HangError as error:
            result.add(Verdict.HANG, str(error))
        except Exception:
            result.add(Verdict.DRIVER, traceback.format_exc())
        if result.verdict is not Verdict.DRIVER:
            _judge_state(job, place, result)
    return result


def _run(job: ChaosJob, result: Result) -> None:
    """Start the job, strike, and start it again as often as it ends before its time."""
    job.start()
    striker = Striker(job)
    for strike in job.case.strikes:
        is_hit = striker.strike(strike)
        while not is_hit and job.has_ended():
            if not _starts_again(job, result):
                return
            is_hit = striker.strike(strike)
        result.struck += [strike.kind] if is_hit else []
    while job.wait(job.has_ended) and _starts_again(job, result):
        pass
    if not job.has_ended():
        raise HangError("the job moves, and does not come to an end")


def _starts_again(job: ChaosJob, result: Result) -> bool:
    """Start a job again that has ended before its last iteration; judge how it has ended."""
    is_whole = {*_final_digests(job)} >= {*range(_num_ranks(job))}
    codes = {name: each.agent.poll() for name, each in job.nodes.items() if not each.is_struck}
    job.note(f"ended with {codes}, {'after' if is_whole else 'before'} the last iteration")
    if any(codes.values()) or not (is_whole or "--exit-interval" in job.case.flags):
        result.add(Verdict.RESTARTED)
        if not job.may_end:
            result.add(Verdict.WRONG_END, f"no strike may end the job, and it has: {codes}")
    if is_whole or result.verdict is Verdict.WRONG_END:
        return False
    if job.starts == _MOST_STARTS:
        raise HangError(f"{job.starts} starts have not brought the job to its end")
    job.start()
    return True


def _events(job: ChaosJob, event: str) -> Iterator[dict[str, Any]]:
    for rank in range(NUM_RANKS):
        if event_path(job.events_dir, rank).exists():
            yield from events(job.events_dir, rank, event)


def _final_digests(job: ChaosJob) -> dict[int, set[str]]:
    """Return by rank the digests after the last iteration, which should be one."""
    found: dict[int, set[str]] = {}
    for line in _events(job, "state_digest"):
        if line["iteration"] == NUM_ITERATIONS:
            found.setdefault(line["rank"], set()).add(line["sha256_all"])
    return found


def _num_ranks(job: ChaosJob) -> int:
    """Return the number of ranks of the last start: a smaller job lacks some."""
    lines = [*_events(job, "start")]
    newest = max((line["incarnation"] for line in lines), default=0)
    sizes = (line["world_size"] for line in lines if line["incarnation"] == newest)
    return min(sizes, default=NUM_RANKS)


def _judge_state(job: ChaosJob, place: Place, result: Result) -> None:
    """Compare losses and final digests with those of the reference."""
    digests = place.references.digests(job.base, NUM_RANKS)
    known = place.references.losses(job.base, NUM_RANKS)
    wrong = [rank for rank, found in _final_digests(job).items() if found != {digests[rank][1]}]
    # Sums of fewer ranks, and of micro-batches that peers share, have another order.
    has_other_sums = bool(job.case.fewest) or "share" in job.case.flags
    if wrong and not has_other_sums:
        result.add(Verdict.WRONG_STATE, f"ranks {wrong} have ended in another state")
    losses = [(line["iteration"], line["loss"]) for line in _events(job, "iteration")]
    limit = _OTHER_SUMS if has_other_sums else _CLOSE
    others = [(i, x) for i, x in losses if x is not None and not abs(x / known[i] - 1) <= limit]
    if others:
        problem = f"{len(others)} other losses; the first is {min(others)}"
        result.add(Verdict.WRONG_STATE, problem)


def _judge_leftovers(job: ChaosJob, result: Result, sockets: Path | None) -> None:
    """Find processes, memory and sockets that a job has left whose nodes could clean up."""
    for each in psutil.wait_procs(job.processes(), timeout=_GONE_S)[1]:
        result.add(Verdict.LEFTOVER, f"process {each}")
    kinds = {strike.kind for strike in job.case.strikes}
    # A node whose processes were killed is off: it cleans up when it starts again.
    is_off = bool(kinds & {Kind.KILL_AGENT, Kind.KILL_FORK_SERVER})
    memory = sorted(path.name for path in job.memory_dir.rglob("*") if path.is_file())
    if memory and not (is_off and job.case.ranks_per_node):
        result.add(Verdict.LEFTOVER, f"{len(memory)} files in memory: {memory[:3]}")
    is_off |= Kind.LOSE_NODES in kinds or not job.case.is_real  # forks of ours leave theirs to us
    left = [] if sockets is None or is_off else list(sockets.rglob("*.socket*"))
    if left:
        result.add(Verdict.LEFTOVER, f"sockets: {[path.name for path in left]}")
