"""Second count of the tokens that experts are owed after lossy recoveries, and of what is made up of them.

It follows the debts of each stage from what a recovery says that it lost, which lossy.py counts, and from the
tokens that its ranks must process above capacities while it owes some. Ranks continue with the debts of the
start that wrote the state which they recover, not with those of a start that came to the same iteration and
was thrown away.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moe_ft.planning.lost_tokens import Debts
from moe_ft.recovery.checkpointing import RecoveryOutcome
from moe_ft.strategies.rotating import TokenLoss
from tests.simulation.rank import Life
from tests.simulation.shape import Shape

BOOST_ITERATIONS = 3
Owed = tuple[tuple[tuple[str, int, int], ...], int]  # layer, expert and tokens; iterations left
_NOTHING: Owed = ((), 0)


@dataclass
class Owing:
    """Debts of one job.

    Attributes:
        possible: that a stage can have by the number of a start, and after an iteration of it. Starts that
            could not see each other may have one number.
    """

    possible: dict[tuple[int, int, int], set[Owed]] = field(
        default_factory=lambda: defaultdict(set)
    )

    def check(self, shape: Shape, lives: list[Life]) -> Iterator[str]:
        """Yield what is wrong with the debts of the ranks of a start, and follow them."""
        outcome = lives[0].outcome
        if outcome is None or any(life.outcome is None for life in lives):
            return
        loss = outcome.loss
        lost = loss.per_expert if isinstance(loss, TokenLoss) else {}
        if outcome.record is None:
            self.possible.clear()
        for stage in range(shape.stages):
            ranks = [lives[rank] for rank in shape.ranks_of(stage)]
            layers = [f"layer.{stage * shape.layers + each}" for each in range(shape.layers)]
            before = self.possible[outcome.writer, stage, outcome.iteration] or {_NOTHING}
            expected = {_after_loss(each, layers, lost) for each in before}
            yield from self._follow(stage, ranks, layers, outcome, expected)

    def _follow(
        self,
        stage: int,
        ranks: list[Life],
        layers: list[str],
        outcome: RecoveryOutcome,
        expected: set[Owed],
    ) -> Iterator[str]:
        at = outcome.iteration
        while noted := [life.debts[at] for life in ranks if at in life.debts]:
            owed = {_owed(each, layers) for each in noted if each is not None}
            if len(owed) > 1:
                yield f"ranks of stage {stage} do not owe the same after iteration {at}: {owed}"
            if not owed <= expected:
                yield f"stage {stage} owes {owed} after iteration {at}, not one of {expected}"
            self.possible[outcome.start, stage, at] |= owed
            for life in ranks:
                if len(owed) == 1 and at + 1 in life.tokens:
                    (debt,) = owed
                    yield from _check_made_up(life, at + 1, layers, debt, len(ranks))
            made_up = [life.made_up[at + 1] for life in ranks if at + 1 in life.made_up]
            # An iteration that was skipped leaves the debts as they are.
            expected = owed if not made_up else {_paid(each, made_up) for each in owed}
            self.possible[outcome.start, stage, at + 1] |= expected
            at += 1


def _check_made_up(
    life: Life, at: int, layers: list[str], owed: Owed, num_ranks: int
) -> Iterator[str]:
    """Yield where a rank has made up other tokens than its part of a debt, up to half of what it has."""
    counts = {(name, n): count for name, n, count in owed[0]}
    for name, row in zip(layers, life.tokens[at].tolist(), strict=True):
        parts = [-(-counts.get((name, n), 0) // num_ranks) for n in range(len(row))]
        due = [min(has // 2, part) for has, part in zip(row, parts, strict=True)]
        found = life.made_up[at].get(name, [0] * len(row))
        if found != due:
            yield f"rank {life.rank} has made up {found} tokens of {name} in iteration {at}, not {due}"


def _owed(debts: Debts, layers: list[str]) -> Owed:
    if not debts.num_left:
        return _NOTHING
    rows = zip(layers, debts.tokens.tolist(), strict=True)
    return (
        tuple((name, n, count) for name, row in rows for n, count in enumerate(row) if count),
        debts.num_left,
    )


def _after_loss(owed: Owed, layers: list[str], lost: Mapping[str, tuple[int, ...]]) -> Owed:
    """Return the debts after a recovery that has lost tokens."""
    counts = {(name, n): count for name, n, count in owed[0]}
    for name in layers:
        for n, count in enumerate(lost.get(name, ())):
            counts[name, n] = counts.get((name, n), 0) + count
    has_lost = any(any(lost.get(name, ())) for name in layers)
    return _sorted(counts), BOOST_ITERATIONS if has_lost else owed[1]


def _paid(owed: Owed, made_up: list[dict[str, list[int]]]) -> Owed:
    """Return the debts after an iteration in which the ranks have made up tokens."""
    counts = {
        (name, n): max(0, count - sum(each[name][n] for each in made_up if name in each))
        for name, n, count in owed[0]
    }
    left = _sorted(counts)
    return (left, owed[1] - 1) if left and owed[1] > 1 else _NOTHING


def _sorted(counts: Mapping[tuple[str, int], int]) -> tuple[tuple[str, int, int], ...]:
    return tuple((*key, counts[key]) for key in sorted(counts, key=_place) if counts[key])


def _place(key: tuple[str, int]) -> tuple[int, int]:
    return int(key[0].rpartition(".")[2]), key[1]
