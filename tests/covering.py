"""Pairwise covering arrays: runs chosen so that every pair of circumstances occurs."""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Factors = Mapping[str, tuple[str, ...]]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(values: Mapping[str, str]) -> set[Pair]:
    """Return the pairs of values that a run has."""
    return set(combinations(values.items(), 2))


def all_pairs(factors: Factors) -> set[Pair]:
    """Return every pair of values of two factors."""
    return {
        ((first, a), (second, b))
        for first, second in combinations(factors, 2)
        for a, b in product(factors[first], factors[second])
    }


def covering_array(factors: Factors, seed: int = 0, num_tries: int = 60) -> list[dict[str, str]]:
    """Return runs in which every pair occurs; each is the best of several random runs with a missing pair."""
    generator = random.Random(seed)
    missing, runs = all_pairs(factors), []
    while missing:
        wanted = dict(min(missing))
        tries = [
            {name: wanted.get(name, generator.choice(factors[name])) for name in factors}
            for _ in range(num_tries)
        ]
        best = max(tries, key=lambda values: len(pairs_of(values) & missing))
        runs.append(best)
        missing -= pairs_of(best)
    return runs


def first_runs[Run](
    runs: Sequence[Run],
    count: int,
    values_of: Callable[[Run], Mapping[str, str]],
    cost: Callable[[Run], int],
) -> list[Run]:
    """Return ``count`` of the runs, chosen to hold as many values of all factors as possible."""
    chosen: list[Run] = []
    seen: set[tuple[str, str]] = set()

    def worth(run: Run) -> tuple[int, int]:
        return len(set(values_of(run).items()) - seen), -cost(run)

    while len(chosen) < count:
        best = max((run for run in runs if run not in chosen), key=worth)
        chosen.append(best)
        seen |= set(values_of(best).items())
    return chosen


def coverage(runs: Sequence[Mapping[str, str]], factors: Factors) -> float:
    """Return the fraction of all pairs that the runs hold."""
    covered = set().union(*(pairs_of(values) for values in runs))
    return len(covered) / len(all_pairs(factors))


def parameters[Case](cases: Sequence[Case], some: Sequence[Case]) -> list[Any]:
    """Return cases for pytest; those outside of ``some`` run in `make test-matrix` only."""
    return [pytest.param(each, marks=() if each in some else pytest.mark.matrix) for each in cases]
