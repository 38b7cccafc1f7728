"""The slowest rank of a stage: found where one is slow; nobody is named for noise or for loads of experts."""

from collections.abc import Callable

import numpy as np
import pytest

from moe_ft.loop.stragglers import MOST_TIMES, OwnTimes, find_stragglers
from tests.shares import share_of

Random = np.random.Generator
NUM_EXPERTS, NUM_LAYERS = 64, 16


def own_times(times: np.ndarray, *, has_experts: bool = False, stage: int = 0) -> list[OwnTimes]:
    """Return ``[rank][iteration]`` times of a stage."""
    return [
        OwnTimes(rank=rank, stage=stage, has_experts=has_experts, seconds=dict(enumerate(row)))
        for rank, row in enumerate(times.tolist())
    ]


def draw(random: Random, num_ranks: int, noise: float, *, has_experts: bool) -> np.ndarray:
    """Return ``[rank][iteration]`` times of ranks none of which is slower by itself.

    Times vary by lognormal noise, and one in thirty takes three times as long, on any rank. With experts half
    of the work is theirs: each of 64 in 16 layers has a load of its own, with a standard deviation of a half.
    """
    work = np.ones(num_ranks)
    if has_experts:
        shape = (num_ranks, max(1, NUM_EXPERTS // num_ranks), NUM_LAYERS)
        loads = np.exp(0.5 * random.standard_normal(shape))
        work = 0.5 + 0.5 * loads.mean((1, 2)) / loads.mean()
    shape_of_times = (num_ranks, MOST_TIMES)
    times = work[:, None] * np.exp(noise * random.standard_normal(shape_of_times))
    return times * np.where(random.random(shape_of_times) < 1 / 30, 3.0, 1.0)


def drawn(random: Random) -> tuple[int, float, bool]:
    return (
        int(random.choice([2, 3, 4, 8, 16, 64], p=[0.2, 0.2, 0.25, 0.2, 0.1, 0.05])),
        float(random.choice([0.01, 0.03, 0.1, 0.3])),
        bool(random.integers(2)),
    )


@pytest.mark.parametrize("num_windows", share_of([500, 10_000], 500))
def test_nobody_is_named_for_noise_and_for_loads_of_experts(num_windows: int) -> None:
    random = np.random.default_rng(num_windows)
    for _ in range(num_windows):
        num_ranks, noise, has_experts = drawn(random)
        times = draw(random, num_ranks, noise, has_experts=has_experts)
        assert find_stragglers(own_times(times, has_experts=has_experts)) == []


# By noise, with and without experts: slowdowns and the least share of windows in which they are found.
POWER = {
    (0.03, False): {0.1: 0.1, 0.2: 0.95, 0.5: 0.95},
    (0.1, False): {0.1: 0.0, 0.2: 0.2, 0.5: 0.95},
    (0.03, True): {0.2: 0.0, 0.5: 0.95, 1.0: 0.95},
    (0.1, True): {0.2: 0.0, 0.5: 0.9, 1.0: 0.95},
}


@pytest.mark.parametrize(("noise", "has_experts"), POWER)
def test_slow_rank_is_named_in_nearly_all_windows_if_it_is_slow_enough(
    noise: float, has_experts: bool
) -> None:
    random = np.random.default_rng(1)
    for slowdown, least in POWER[noise, has_experts].items():
        found = []
        for _ in range(100):
            times = draw(random, 8, noise, has_experts=has_experts)
            times[5] *= 1 + slowdown
            found += [
                each.rank for each in find_stragglers(own_times(times, has_experts=has_experts))
            ]
        assert found.count(5) >= 100 * least, slowdown
        assert found.count(5) == len(found)


def stage_of(*own: float, length: int = 30) -> np.ndarray:
    return np.array(own)[:, None] * np.ones((1, length))


def test_slowest_of_each_stage_is_named_with_its_time_and_that_of_its_peers() -> None:
    first = own_times(stage_of(1.0, 1.0, 1.0))
    second = own_times(stage_of(1.2, 1.8, 1.2, 1.7), stage=1)
    (found,) = find_stragglers([*first, *second])
    assert (found.rank, found.stage, found.num_iterations) == (1, 1, 30)
    text = "rank 1 is the slowest of stage 1: 1.800 s of its own against 1.200 s"
    assert str(found) == text


CASES: dict[str, Callable[[], np.ndarray]] = {
    "alone": lambda: stage_of(2.0),
    "too few iterations": lambda: stage_of(2.0, 1.0, length=20),
    "within the bound": lambda: stage_of(1.09, 1.0, 1.0),
    "as far from each other as from it": lambda: stage_of(1.0, 1.2, 1.4, 1.6),
    "in half of the iterations": lambda: np.vstack(
        [stage_of(1.0, 1.0), np.where(np.arange(30) % 2, 3.0, 1.0)]
    ),
    "in the first iterations": lambda: np.vstack(
        [stage_of(1.0, 1.0), np.where(np.arange(30) < 20, 3.0, 1.0)]
    ),
    "without time": lambda: stage_of(0.0, 0.0),
}


@pytest.mark.parametrize("case", CASES)
def test_nobody_is_named_where_it_is_not_beyond_doubt(case: str) -> None:
    assert find_stragglers(own_times(CASES[case]())) == []


def test_iterations_that_a_rank_lacks_are_not_compared() -> None:
    slow, fast, late = own_times(stage_of(2.0, 1.0, 1.0, length=60))
    late = OwnTimes(rank=2, stage=0, has_experts=False, seconds=dict.fromkeys(range(28, 60), 1.0))
    (found,) = find_stragglers([slow, fast, late])
    assert (found.rank, found.num_iterations) == (0, 32)
