"""Arguments of `python -m tests.simulation`, and the schedules that they ask for."""

import argparse
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from tests.simulation import power
from tests.simulation.drawers import draw_changing, draw_parity
from tests.simulation.mutations import MUTATIONS
from tests.simulation.repairs.mutations import OF_REPAIRS
from tests.simulation.repairs.schedule import RepairSchedule, draw_elastic, draw_with_spares
from tests.simulation.schedule import Schedule
from tests.simulation.soak import AnySchedule, Campaign

_SEEDS = 1 << 40  # that a random one is drawn from


def main(words: list[str]) -> int:
    """Run what the command line asks for; return the exit code."""
    parser = _parser()
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    jobs = arguments.jobs or len(os.sched_getaffinity(0))
    if arguments.power is not None:
        if unknown := set(arguments.power) - set(MUTATIONS):
            parser.error(
                f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(MUTATIONS)}"
            )
        names = arguments.power or list(MUTATIONS)
        return power.run(names, arguments.first or 0, arguments.count or power.LIMIT, jobs)
    seconds = float("inf") if arguments.seconds is None else arguments.seconds
    campaign = Campaign(arguments, jobs=jobs, seconds=seconds)
    return campaign.run(_schedules(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description="Simulate jobs with faults."
    )
    which = parser.add_argument_group("schedules")
    which.add_argument("--first", type=int, help="seed of the first schedule (default 0)")
    which.add_argument("--random", action="store_true", help="begin with a random seed instead")
    which.add_argument(
        "--count", type=int, help="number of schedules (default 100; without end with --seconds)"
    )
    which.add_argument("--seconds", type=float, help="when to stop; inf for never")
    which.add_argument("--seed", type=int, help="this one alone")
    which.add_argument(
        "--schedule", type=Path, help="the one in this file alone, as --keep writes it"
    )
    which.add_argument("--repairs", action="store_true", help="of repairs in place")
    which.add_argument("--spares", action="store_true", help="of repairs with spare nodes, all")
    which.add_argument("--elastic", action="store_true", help="of jobs with --nodes MIN:N, all")
    which.add_argument(
        "--layouts",
        action="store_true",
        help="of jobs whose starts have several layouts, all of them",
    )
    which.add_argument("--parity", action="store_true", help="of jobs that keep parity, all")
    how = parser.add_argument_group("how they are run")
    how.add_argument(
        "--jobs", type=int, default=1, help="processes; 0 for one per core (default 1)"
    )
    how.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="for files, on a tmpfs")
    how.add_argument("--mutation", choices=MUTATIONS, help="put in a mistake on purpose")
    how.add_argument("--shrink", action="store_true", help="make failing schedules smaller")
    how.add_argument("--verbose", action="store_true", help="print all that happens")
    how.add_argument("--keep", type=Path, help="folder for failing schedules")
    how.add_argument(
        "--power",
        nargs="*",
        metavar="MUTATION",
        help="look for a schedule that finds each of these mistakes, or of all; `--count` at most",
    )
    return parser


def _schedules(arguments: argparse.Namespace) -> Iterator[AnySchedule]:
    is_of_repairs = arguments.repairs or arguments.spares or arguments.elastic
    is_of_repairs = is_of_repairs or arguments.mutation in OF_REPAIRS
    make = power.drawer_for(arguments.mutation, is_of_repairs=is_of_repairs)
    if arguments.layouts or arguments.spares:
        make = draw_changing if arguments.layouts else draw_with_spares
    if arguments.parity:
        make = draw_parity
    if arguments.elastic:
        make = draw_elastic
    if arguments.schedule is not None:
        kind = RepairSchedule if is_of_repairs else Schedule
        yield msgspec.json.decode(arguments.schedule.read_bytes(), type=kind)
        return
    if arguments.seed is not None:
        yield make(arguments.seed)
        return
    first = random.SystemRandom().randrange(_SEEDS) if arguments.random else arguments.first or 0
    print(f"first seed {first}", flush=True)
    count = arguments.count
    if count is None and arguments.seconds is None:
        count = 100
    yield from map(make, itertools.count(first) if count is None else range(first, first + count))
