"""Second count of what lossy recoveries lose, from the states that experts had and the tokens they got.

It knows nothing of how a strategy chooses experts. It finds out which state each expert has come back with by
the bits of that state, and counts the tokens between that and the iteration where training continues.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from moe_ft.strategies.partial.strategy import PartialLoss
from moe_ft.units import UnitId, UnitKind
from tests.simulation.rank import Life
from tests.simulation.shape import Shape, weights_of

Expert = tuple[int, int]  # layer, number


@dataclass(frozen=True)
class Version:
    """State that an expert had at some time.

    Attributes:
        iteration: of the state.
        missing: iterations whose updates it lacks, with the tokens that it got in them.
        routed: tokens by the iteration that they led to, those of `missing` included.
    """

    iteration: int = 0
    missing: dict[int, int] = field(default_factory=dict)
    routed: dict[int, int] = field(default_factory=dict)


@dataclass
class Recount:
    """Count of one job.

    Attributes:
        routed: tokens by expert and the iteration that they led to, in the branch that is alive.
        known: versions by rank, unit and the bits of the rank's part.
        rests: checksums of everything but the experts, by rank and iteration.
        num_other: tokens by which iterations differ in branches whose experts were mixed. Where an expert has
            an iteration of another branch, nobody can say which tokens of the one replace those of the other.
    """

    shape: Shape
    routed: dict[Expert, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    known: dict[tuple[int, str, str], Version] = field(default_factory=dict)
    rests: dict[tuple[int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    missing: dict[Expert, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    num_other: int = 0

    def check(self, lives: list[Life]) -> Iterator[str]:
        """Yield what is wrong with what the ranks of a start have recovered, and follow their training."""
        recovered = [life for life in lives if life.outcome is not None]
        if len(recovered) == len(lives) and lives[0].outcome is not None:
            yield from self._check_recovery(lives, lives[0].outcome.iteration)
        self._follow(lives)

    def _check_recovery(self, lives: list[Life], iteration: int) -> Iterator[str]:
        outcome = lives[0].outcome
        assert outcome is not None
        if outcome.record is None:
            self.routed.clear()
            self.missing.clear()
            self.num_other = 0
            return
        for expert in list(self.routed):
            tokens = self.routed[expert].items()
            self.routed[expert] = {at: count for at, count in tokens if at <= iteration}
        for life in lives:
            if life.rests[iteration] not in self.rests[life.rank, iteration]:
                yield f"rank {life.rank} has recovered a state that never was at {iteration}"
        found: dict[Expert, Version] = {}
        yield from self._find_versions(lives, iteration, found)
        self.missing = defaultdict(dict)
        for expert, version in found.items():
            kept = {at: count for at, count in version.missing.items() if at <= iteration}
            tokens = self.routed[expert].items()
            lost = {at: count for at, count in tokens if version.iteration < at <= iteration}
            self.missing[expert] = {**kept, **lost}
            self.num_other += sum(
                abs(count - version.routed[at]) for at, count in tokens if at in version.routed
            )
        total = sum(sum(each.values()) for each in self.missing.values())
        loss = outcome.loss
        said = loss.total_lost_tokens if isinstance(loss, PartialLoss) else None
        if said is None or abs(said - total) > self.num_other:
            yield f"said that {said} tokens are lost, and {total} are"

    def _find_versions(
        self, lives: list[Life], iteration: int, found: dict[Expert, Version]
    ) -> Iterator[str]:
        """Find out which version each expert has come back with; yield what is wrong."""
        for life in lives:
            for name, bits in life.units[iteration].items():
                unit = _unit(self.shape, life.rank, name)
                version = self.known.get((life.rank, name, bits))
                if version is None:
                    yield f"rank {life.rank} has recovered {name} in a state that it never had"
                    continue
                other = found.setdefault((unit.layer, unit.expert), version)
                if other.iteration != version.iteration:
                    yield f"ranks have recovered {name} of {version.iteration} and {other.iteration}"

    def _follow(self, lives: list[Life]) -> None:
        fresh: dict[tuple[Expert, int], int] = defaultdict(int)
        for life in lives:
            first = self.shape.stage_of(life.rank) * self.shape.layers
            for at, tokens in life.tokens.items():
                for layer, row in enumerate(tokens.tolist(), first):
                    for number, count in enumerate(row):
                        fresh[(layer, number), at] += count
        for (expert, at), count in fresh.items():
            self.routed[expert][at] = count
        for life in lives:
            for at, rest in life.rests.items():
                self.rests[life.rank, at].add(rest)
            for at, units in life.units.items():
                for name, bits in units.items():
                    unit = _unit(self.shape, life.rank, name)
                    missing = self.missing[unit.layer, unit.expert]
                    routed = self.routed[unit.layer, unit.expert]
                    version = Version(
                        at,
                        {each: count for each, count in missing.items() if each <= at},
                        {each: count for each, count in routed.items() if each <= at},
                    )
                    self.known.setdefault((life.rank, name, bits), version)


def _unit(shape: Shape, rank: int, name: str) -> UnitId:
    return next(
        each.unit
        for each in weights_of(shape, rank)
        if each.unit.kind is UnitKind.EXPERT and str(each.unit) == name
    )
