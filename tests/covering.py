"""Pairwise covering arrays: runs chosen so that all circumstances that can meet do meet in some run.

The circumstances themselves are in covering_array.py.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement, product

Values = Mapping[str, str]
# Two circumstances of a run. One circumstance alone is a pair with itself.
Pair = tuple[tuple[str, str], tuple[str, str]]
_NUM_TRIES = 200


def pairs_of(view: Values) -> set[Pair]:
    return set(combinations_with_replacement(sorted(view.items()), 2))


@dataclass(frozen=True, kw_only=True)
class Space:
    """Runs that there could be.

    Attributes:
        factors: the values of each factor of a run.
        is_possible: returns False if some of the values given exclude each other.
        views: returns what a run shows, once for each of its steps. Pairs are of values in one view.
        cost: returns the relative time of a run.
    """

    factors: Mapping[str, tuple[str, ...]]
    is_possible: Callable[[Values], bool]
    views: Callable[[Values], Sequence[Values]]
    cost: Callable[[Values], float]

    def shown_by(self, runs: Iterable[Values]) -> set[Pair]:
        return {pair for run in runs for view in self.views(run) for pair in pairs_of(view)}

    @cached_property
    def examples(self) -> dict[Pair, Values]:
        """The pairs that some run can show, and values with which every run shows them."""
        generator, found = random.Random(0), dict[Pair, Values]()
        met: set[Pair] = set()  # in one run, whether or not in one view of it
        for one, other in combinations_with_replacement(sorted(self.factors), 2):
            for a, b in product(self.factors[one], self.factors[other]):
                wanted = {one: a, other: b}
                if wanted[one] != a:  # another value of the same factor
                    continue
                if ((one, a), (other, b)) not in met:
                    run = self.complete(wanted, generator)
                    if run is None:
                        continue
                    met |= pairs_of(run)
                found.update(dict.fromkeys(self.shown_by([wanted]), wanted))
        return found

    def complete(self, values: Values, generator: random.Random) -> Values | None:
        """Return a random possible run with these values, None if there is none."""
        if not self.is_possible(values):
            return None
        name = next((name for name in self.factors if name not in values), None)
        if name is None:
            return values
        for value in generator.sample(self.factors[name], len(self.factors[name])):
            run = self.complete({**values, name: value}, generator)
            if run is not None:
                return run
        return None

    def cover(self, wanted: Iterable[Pair], chosen: Sequence[Values] = ()) -> list[Values]:
        """Return runs that show the wanted pairs that the chosen runs do not show.

        Each is the one of several random runs with a missing pair that shows most missing pairs for its cost.
        """
        generator, runs = random.Random(0), list[Values]()
        missing = set(wanted) - self.shown_by(chosen)
        while missing:
            example = self.examples[min(missing)]
            tries = (self.complete(example, generator) for _ in range(_NUM_TRIES))
            best = max(
                (run for run in tries if run is not None),
                key=lambda run: len(self.shown_by([run]) & missing) / self.cost(run),
            )
            runs.append(best)
            missing -= self.shown_by([best])
        return runs

    def choose(self, wanted: Iterable[Pair], runs: Sequence[Values]) -> list[Values]:
        """Return a few of the runs that together show the wanted pairs.

        How many they are counts more than their costs: each brings its faults and checks.
        """
        shown, missing = [self.shown_by([run]) for run in runs], set(wanted)
        found = list[Values]()
        while missing:
            best = max(
                range(len(runs)), key=lambda n: len(shown[n] & missing) / self.cost(runs[n]) ** 0.3
            )
            found.append(runs[best])
            missing -= shown[best]
        return found
