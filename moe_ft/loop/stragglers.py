"""The slowest rank of each pipeline stage, if it is slower than its peers beyond doubt. No torch.

Ranks of a stage do equal work, but for the tokens that routers send to their experts. So a rank is compared
with the others of its stage, by its own time: an iteration without what it waited for others in it.
event_fold.py collects the times; metrics.py serves them, and PromQL compares those of all nodes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from statistics import median
from typing import Annotated

import msgspec
from msgspec import Meta

MOST_TIMES = 40  # of a rank: the window
_LEAST_TIMES = 24  # that all ranks of a stage have in common
_BOUND, _EXPERT_BOUND = (
    0.10,
    0.25,
)  # slower than the peers, at least; with experts, whose loads differ
_MOST_SPREADS = 10.0  # between the rank and its peers, of their spread
_MOST_ERRORS = 6.0  # standard errors of the median of what it is slower in each iteration
_MOST_OF_THEM = 0.9  # of the iterations, in which it is slower by half of the bound
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_ERROR_OF_MEDIAN = 1.2533  # of one of many numbers, in those of their mean


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnTimes:
    """Own times of a rank.

    Attributes:
        has_experts: whether the work of the ranks depends on what routers choose.
        seconds: by iteration, at most the last `MOST_TIMES`.
    """

    rank: int
    stage: int
    has_experts: bool
    seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def median_s(self) -> float | None:
        """Their median; None without any."""
        return median(self.seconds.values()) if self.seconds else None


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """Rank that is slower than the others of its stage."""

    rank: Annotated[int, Meta(description="global rank")]
    stage: Annotated[int, Meta(description="its pipeline stage, from 0")]
    own_s: Annotated[float, Meta(description="its own time in an iteration (median)")]
    peers_s: Annotated[float, Meta(description="that of the others of its stage (median)")]
    num_iterations: Annotated[int, Meta(description="that were compared")]

    def __str__(self) -> str:
        own, peers = f"{self.own_s:.3f} s of its own", f"{self.peers_s:.3f} s"
        return f"rank {self.rank} is the slowest of stage {self.stage}: {own} against {peers}"


def find_stragglers(ranks: Iterable[OwnTimes]) -> list[Straggler]:
    """Return at most one rank of each stage: the slowest one, if it is slower beyond doubt.

    It is so if its own time is above that of its peers by all of: the bound; several times the spread of the
    peers; several standard errors, as times vary from iteration to iteration. And in nearly all iterations.
    A stage needs two ranks. docs/watching.md has what this finds, and what it cannot.
    """
    stages: dict[int, list[OwnTimes]] = {}
    for each in ranks:
        if each.seconds:
            stages.setdefault(each.stage, []).append(each)
    found = (_slowest_of(stages[stage]) for stage in sorted(stages))
    return [each for each in found if each is not None]


def _slowest_of(stage: Sequence[OwnTimes]) -> Straggler | None:
    common = sorted(set.intersection(*(set(each.seconds) for each in stage)))[-MOST_TIMES:]
    if len(stage) < 2 or len(common) < _LEAST_TIMES:
        return None
    times = [[max(each.seconds[at], 1e-9) for at in common] for each in stage]
    medians = [*map(median, times)]
    place = medians.index(max(medians))
    slowest, own, own_s = stage[place], times.pop(place), medians.pop(place)
    peers_s = median(medians)
    ratios = [mine / median(others) for mine, *others in zip(own, *times, strict=True)]
    logs = [*map(log, ratios)]
    error = _ERROR_OF_MEDIAN * _spread(logs) / sqrt(len(logs))
    bound = _EXPERT_BOUND if slowest.has_experts else _BOUND
    least = max(bound, _MOST_SPREADS * _spread(medians) / peers_s, _MOST_ERRORS * error)
    share = sum(each >= 1 + bound / 2 for each in ratios) / len(ratios)
    if median(ratios) < 1 + least or share < _MOST_OF_THEM:
        return None
    return Straggler(
        rank=slowest.rank,
        stage=slowest.stage,
        own_s=own_s,
        peers_s=peers_s,
        num_iterations=len(common),
    )


def _spread(values: Sequence[float]) -> float:
    """Return a standard deviation that single values far off do not change."""
    middle = median(values)
    return _SIGMA * median(abs(each - middle) for each in values)
