"""Repetitions of a run until the mean of its ETTR is known well enough.

course.py has one run. The same seed gives the same failures to every strategy, so that these differ by what
they cost and not by chance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist, fmean

from moe_ft.planning.costs import Costs, RecoveryKind
from moe_ft.planning.time_shares import TimeShares, calculate_shares
from moe_ft.simulate.course import MachinePool, RunCourse, run_course
from moe_ft.simulate.failures import Change, Failures

LEAST, MOST = 10, 1_000  # repetitions
_LEAST_FAILURES = 100  # in all of them: few failures say little, however alike the runs are
_QUANTILE = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All that a simulation takes besides costs.

    Attributes:
        failures: as they are drawn, or as a trace has them.
        tolerance: half of the 95 % confidence interval of ETTR that is good enough, as a fraction of it.
    """

    failures: Failures | Sequence[Change]
    pool: MachinePool
    horizon_s: float
    seed: int = 0
    tolerance: float = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """Mean of many courses of a job with one strategy.

    Attributes:
        kind: of the recoveries.
        shares: of the time; the productive one is ETTR.
        half_width: of the 95 % confidence interval of ETTR; 0 for the one course of a trace.
        calculated: shares that follow from mean costs; None with a trace, or without a failure.
        num_failures, num_fallbacks, lost_iterations: of a course, on average.
        first: the course of the first repetition.
    """

    costs: Costs
    kind: RecoveryKind
    shares: TimeShares
    half_width: float
    num_repetitions: int
    is_converged: bool
    num_failures: float
    num_fallbacks: float
    lost_iterations: float
    calculated: TimeShares | None
    first: RunCourse

    @property
    def ettr(self) -> float:
        """Share of the time in which iterations run for the first time, without what blocks them."""
        return self.shares.productive


def simulate(
    costs: Costs,
    kind: RecoveryKind,
    setting: Setting,
    on_course: Callable[[float], None] = lambda half_width: None,
) -> Simulated:
    """Repeat a run until the confidence interval of its ETTR is as narrow as wanted, or `MOST` times.

    Args:
        on_course: told the relative half-width after each course; infinite at first.
    """
    courses: list[RunCourse] = []
    half_width, is_converged, failures = math.inf, False, setting.failures
    mean = squares = 0.0  # of ETTR so far: its mean, and the sum of squared differences from it
    num_failures = 0
    while not is_converged and len(courses) < MOST:
        random = Random(f"{setting.seed}/{len(courses)}")  # noqa: S311 - no secret
        drawn = (
            failures.draw(setting.pool.num_nodes, random)
            if isinstance(failures, Failures)
            else failures
        )
        course = run_course(costs, kind, setting.pool, drawn, setting.horizon_s)
        if courses:  # only the first is drawn, and spans are what takes room
            course.spans.clear()
        courses.append(course)
        count, ratio = len(courses), courses[-1].shares.productive
        difference, num_failures = ratio - mean, num_failures + courses[-1].num_failures
        mean += difference / count
        squares += difference * (ratio - mean)
        if not isinstance(failures, Failures):
            half_width, is_converged = 0.0, True
        elif count >= LEAST:
            half_width = _student(count - 1) * math.sqrt(squares / (count - 1) / count)
            is_converged = half_width <= setting.tolerance * mean
            is_converged = is_converged and num_failures >= _LEAST_FAILURES
        on_course(half_width)
    return Simulated(
        costs=costs,
        kind=kind,
        shares=TimeShares.mean([each.shares for each in courses]),
        half_width=half_width,
        num_repetitions=len(courses),
        is_converged=is_converged,
        num_failures=fmean(each.num_failures for each in courses),
        num_fallbacks=fmean(each.num_fallbacks for each in courses),
        lost_iterations=fmean(each.lost_iterations for each in courses),
        calculated=(
            calculate_shares(costs, kind, failures.mtbf_s)
            if isinstance(failures, Failures)
            else None
        ),
        first=courses[0],
    )


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's t, from 9 degrees of freedom on within 0.001.

    Source: the expansion of Abramowitz and Stegun, 26.7.5.
    """
    x = _QUANTILE
    return (
        x
        + (x**3 + x) / (4 * degrees)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * degrees**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * degrees**3)
    )
