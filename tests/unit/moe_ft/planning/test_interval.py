"""The interval is the smallest that satisfies both bounds."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from moe_ft.planning.interval import CheckpointCost, choose_interval

# Division in floating point may turn a bound that is met exactly into one that is missed by a bit.
ROUNDING = Fraction(1, 10**9)
SECONDS = st.floats(0, 1e5, allow_nan=False)
POSITIVE_SECONDS = st.floats(1e-4, 1e4)
LIMITS = st.floats(1e-4, 0.99)


@st.composite
def costs(draw: st.DrawFn) -> CheckpointCost:
    return CheckpointCost(
        iteration_s=draw(POSITIVE_SECONDS), overhead_s=draw(SECONDS), completion_s=draw(SECONDS)
    )


def satisfies(cost: CheckpointCost, limit: float, interval: int, slack: Fraction) -> bool:
    time_s = interval * Fraction(cost.iteration_s) * (1 + slack)
    return (
        Fraction(cost.overhead_s) <= Fraction(limit) * time_s
        and Fraction(cost.completion_s) <= time_s
    )


@given(costs(), LIMITS)
def test_interval_of_any_cost_satisfies_both_bounds(cost: CheckpointCost, limit: float) -> None:
    assert satisfies(cost, limit, choose_interval(cost, limit), ROUNDING)


@given(costs(), LIMITS)
def test_interval_of_any_cost_could_not_be_one_shorter(cost: CheckpointCost, limit: float) -> None:
    interval = choose_interval(cost, limit)
    assert interval == 1 or not satisfies(cost, limit, interval - 1, -ROUNDING)


def test_overhead_that_binds_gives_the_interval_worked_by_hand() -> None:
    cost = CheckpointCost(iteration_s=0.5, overhead_s=0.125, completion_s=1.0)
    # 0.125 / (0.0625 x 0.5) = 4 iterations for the overhead, 1.0 / 0.5 = 2 for completion
    assert choose_interval(cost, 0.0625) == 4
