"""Proof that the simulation notices mistakes: it looks for a schedule that finds each of them.

A mistake counts as found if a promise is broken with it, and none without it in the same schedule. An error
of the simulation itself finds nothing.
"""

import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tests.simulation.schedule import draw
from tests.simulation.simulate import installed
from tests.simulation.soak import attempt, mistaken

LIMIT = 300  # schedules
_WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class Hunt:
    """Search for one mistake.

    Attributes:
        seed: of the schedule that finds it; None if there is none.
        num_schedules: that were run with it.
        violations: with it, in the last schedule.
        cpu_s: seconds of a core.
    """

    name: str
    seed: int | None
    num_schedules: int
    violations: tuple[str, ...]
    cpu_s: float


def hunt(name: str, first: int = 0, limit: int = LIMIT, folder: Path = Path("/dev/shm")) -> Hunt:
    """Look for a schedule that finds a mistake, from a seed on."""
    torch.set_num_threads(1)
    begun_s = time.process_time()
    found, num_schedules = None, 0
    violations: tuple[str, ...] = ()
    while found is None and num_schedules < limit:
        schedule = draw(first + num_schedules)
        num_schedules += 1
        with mistaken(name), installed():
            verdict = attempt(schedule, folder)
        if violations := verdict.violations:
            with installed():
                is_caused = not attempt(schedule, folder).violations
            found = schedule.seed if is_caused and not verdict.is_crash else None
    return Hunt(
        name=name,
        seed=found,
        num_schedules=num_schedules,
        violations=violations,
        cpu_s=time.process_time() - begun_s,
    )


def run(names: Sequence[str], first: int, limit: int, jobs: int) -> int:
    """Look for all of some mistakes, print a table, and return the exit code."""
    width, num_found = max(map(len, names)), 0
    print(f"{'mistake':{width}}  schedules  CPU s  promise that is broken first")
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        for each in pool.imap_unordered(partial(hunt, first=first, limit=limit), names):
            what = each.violations[0] if each.violations else ""
            if each.seed is None:
                what = f"NOT FOUND {what}"
            first_line = what.partition("\n")[0][:_WIDTH]
            row = f"{each.name:{width}}  {each.num_schedules:9}  {each.cpu_s:5.1f}  {first_line}"
            print(row, flush=True)
            num_found += each.seed is not None
    print(f"{num_found} of {len(names)} mistakes are found")
    return int(num_found < len(names))
