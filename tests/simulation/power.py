"""Proof that the simulation notices mistakes: it looks for a schedule that finds each of them.

A mistake counts as found if a promise is broken with it, and none without it in the same schedule. An error
of the simulation itself finds nothing.
"""

import multiprocessing
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tests.simulation.drawers import (
    draw_aging,
    draw_changing,
    draw_followed,
    draw_parity,
    draw_selective,
    draw_some,
)
from tests.simulation.halves import OF_HALVES, draw_halved
from tests.simulation.layout_mutations import OF_AGES, OF_LAYOUTS
from tests.simulation.near import NEAR, vary
from tests.simulation.peer_mutations import OF_BUDGETS, OF_PARITY, OF_UPDATES
from tests.simulation.repairs.error_mutations import OF_CORRUPT, OF_ERRORS
from tests.simulation.repairs.mutations import OF_ELASTIC, OF_HANGS, OF_NODES, OF_REPAIRS
from tests.simulation.repairs.ring_mutations import OF_RING
from tests.simulation.repairs.schedule import draw as draw_repairs
from tests.simulation.repairs.schedule import (
    draw_bad_batches,
    draw_corrupt,
    draw_elastic,
    draw_hangs,
    draw_with_spares,
)
from tests.simulation.simulate import installed
from tests.simulation.soak import AnySchedule, attempt, mistaken

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


_DRAWERS: tuple[tuple[Collection[str], Callable[[int], AnySchedule]], ...] = (
    ({*OF_NODES, *OF_RING}, draw_with_spares),
    (OF_HANGS, draw_hangs),
    (OF_ELASTIC, draw_elastic),
    (OF_ERRORS, draw_bad_batches),
    (OF_CORRUPT, draw_corrupt),
    (OF_REPAIRS, draw_repairs),
    (OF_UPDATES, draw_followed),
    (OF_BUDGETS, draw_selective),
    (OF_HALVES, draw_halved),
    (OF_PARITY, draw_parity),
    (OF_AGES, draw_aging),
    (OF_LAYOUTS, draw_changing),
)


def drawer_for(
    mutation: str | None, *, is_of_repairs: bool = False
) -> Callable[[int], AnySchedule]:
    """Return what draws the schedules in which a mistake may show."""
    of_nodes = {*OF_NODES, *OF_RING, *OF_HANGS, *OF_ELASTIC, *OF_ERRORS, *OF_CORRUPT}
    if is_of_repairs and mutation not in of_nodes:
        return draw_repairs
    found = (draw for names, draw in _DRAWERS if mutation in names)
    return next(found, draw_some)


def _schedule(name: str, first: int, number: int) -> AnySchedule:
    """Return the schedule of a number: every other one is near the one that is known to show a mistake."""
    near = NEAR.get(name)
    if near is None or number % 2:
        return drawer_for(name)(first + number)
    return vary(near, number) if number else near


def hunt(name: str, first: int = 0, limit: int = LIMIT, folder: Path = Path("/dev/shm")) -> Hunt:
    """Look for a schedule that finds a mistake, from a seed on."""
    torch.set_num_threads(1)
    begun_s = time.process_time()
    found, num_schedules = None, 0
    violations: tuple[str, ...] = ()
    while found is None and num_schedules < limit:
        schedule = _schedule(name, first, num_schedules)
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
