"""Command line of the simulation: `python -m tests.simulation --help`."""

import argparse
import gc
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.simulation.active import Patches
from tests.simulation.mutations import MUTATIONS
from tests.simulation.schedule import Schedule, draw, shrink
from tests.simulation.simulate import Verdict, installed, simulate


def main() -> None:
    """Run schedules and print which of them break a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--first", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--count", type=int, default=100, help="number of schedules")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="when to stop")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--shrink", action="store_true", help="make failing schedules smaller")
    parser.add_argument("--mutation", choices=MUTATIONS, help="put in a mistake on purpose")
    parser.add_argument("--verbose", action="store_true", help="print what happened")
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable,
            [sys.executable, "-W", "ignore", "-m", "tests.simulation", *sys.argv[1:]],
        )
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # collections between schedules need not look at modules again
    begun, failed, events, recoveries, done = time.monotonic(), 0, 0, 0, 0
    mistakes = Patches()
    if arguments.mutation:
        MUTATIONS[arguments.mutation](mistakes)
    with installed():
        for seed in range(arguments.first, arguments.first + arguments.count):
            if time.monotonic() - begun > arguments.seconds:
                break
            schedule = draw(seed)
            verdict = _try(schedule, arguments.folder)
            done, events = done + 1, events + verdict.num_events
            recoveries += verdict.num_recoveries
            if arguments.verbose or verdict.violations:
                print(schedule, *verdict.log, *verdict.violations, sep="\n")
            if verdict.violations:
                failed += 1
                if arguments.shrink:
                    small = shrink(
                        schedule, lambda each: bool(_try(each, arguments.folder).violations)
                    )
                    print("smaller:", small, *_try(small, arguments.folder).violations, sep="\n")
    spent = time.monotonic() - begun
    print(
        f"{done} schedules, {failed} failures; {recoveries} recoveries, {events} events, "
        f"{done / spent:.1f} schedules/s"
    )
    sys.exit(failed > 0)


def _try(schedule: Schedule, folder: Path) -> Verdict:
    try:
        return simulate(schedule, folder)
    except Exception:
        return Verdict(
            violations=(traceback.format_exc(),),
            log=(),
            num_events=0,
            num_starts=0,
            num_recoveries=0,
        )


main()
