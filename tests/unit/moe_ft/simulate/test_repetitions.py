"""Means of many courses against closed forms."""

import math

import pytest

from moe_ft.planning.costs import RecoveryCosts, RecoveryKind
from moe_ft.planning.time_shares import Spent
from moe_ft.simulate.course import MachinePool
from moe_ft.simulate.failures import Change, Failures
from moe_ft.simulate.repetitions import LEAST, Setting, Simulated, simulate
from tests.unit.moe_ft.simulate.costs import costs

MTBF_S = 600.0
POOL = MachinePool(num_nodes=64, num_spares=1_000, return_s=3600.0)


def simulated(
    interval: float, recovery_s: float, blocked_s: float = 0.0, seed: int = 0, **values: float
) -> Simulated:
    found = costs(
        interval=interval, blocked_s=blocked_s, recovery=RecoveryCosts(processes_s=recovery_s)
    )
    setting = Setting(
        failures=Failures(mtbf_s=MTBF_S, **values),  # type: ignore[arg-type]
        pool=POOL,
        horizon_s=100_000.0,
        seed=seed,
        tolerance=0.005,
    )
    return simulate(found, RecoveryKind.RESTART, setting)


@pytest.mark.parametrize(
    ("interval", "recovery_s", "blocked_s"), [(10, 60, 0.0), (100, 60, 0.05), (200, 100, 0.1)]
)
def test_poisson_failures_give_the_ettr_of_the_closed_form(
    interval: float, recovery_s: float, blocked_s: float
) -> None:
    # Daly, 2006: a segment takes M e^(R/M) (e^(tau/M) - 1), failures during recoveries included.
    segment_s = interval * (1 + blocked_s)
    mean_s = MTBF_S * math.exp(recovery_s / MTBF_S) * math.expm1(segment_s / MTBF_S)
    found = simulated(interval, recovery_s, blocked_s)
    assert found.is_converged and found.half_width <= 0.005 * found.ettr
    assert found.ettr == pytest.approx(interval / mean_s, rel=0.01)


def test_calculated_ettr_is_the_simulated_one_where_failures_are_rare() -> None:
    found = simulated(2, 3, 0.25)
    assert found.calculated is not None
    for use in Spent:
        assert found.shares[use] == pytest.approx(found.calculated[use], abs=0.002)


def test_bursts_of_failures_cost_less_than_as_many_that_come_apart() -> None:
    # Of a burst, most strike during the recovery from the first.
    assert simulated(10, 60, weibull_shape=0.5).ettr > simulated(10, 60).ettr + 0.015


def test_seed_decides_everything() -> None:
    assert simulated(10, 60) == simulated(10, 60)
    assert simulated(10, 60).first != simulated(10, 60, seed=1).first


def test_few_failures_are_not_taken_for_a_narrow_interval() -> None:
    setting = Setting(failures=Failures(mtbf_s=1e5), pool=POOL, horizon_s=1e4)
    found = simulate(costs(), RecoveryKind.RESTART, setting)
    assert found.num_repetitions > 50 * LEAST
    assert found.half_width > 0


def test_trace_has_one_course() -> None:
    trace = (Change(time_s=105, struck=(0,)),)
    setting = Setting(failures=trace, pool=POOL, horizon_s=1000)
    found = simulate(costs(), RecoveryKind.RESTART, setting)
    assert (found.num_repetitions, found.half_width, found.calculated) == (1, 0, None)
    assert found.ettr == pytest.approx(0.965)
