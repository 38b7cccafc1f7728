"""Second count of what lossy recoveries lose, from the states that experts had and the tokens they got.

It knows nothing of how a strategy chooses experts. It finds out which state each expert has come back with by
the bits of that state, and counts the tokens between that and the iteration where training continues.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from moe_ft.strategies.rotating import TokenLoss
from tests.simulation.model import Export
from tests.simulation.rank import Life
from tests.simulation.shape import Shape
from tests.simulation.whole import bits_of, put_together, whole_of

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
        known: versions by expert and its bits, put together from the ranks that have parts of it.
        rests: checksums of everything but the experts, by layout, rank and iteration.
        wholes: the same of the whole job, but for random numbers, by iteration.
        num_other: tokens by which iterations differ in branches whose experts were mixed. Where an expert has
            an iteration of another branch, nobody can say which tokens of the one replace those of the other.
    """

    routed: dict[Expert, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    known: dict[tuple[Expert, str], Version] = field(default_factory=dict)
    rests: dict[tuple[Shape, int, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    wholes: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    missing: dict[Expert, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    num_other: int = 0

    def check(self, shape: Shape, lives: list[Life], newest: Mapping[Expert, int]) -> Iterator[str]:
        """Yield what is wrong with what the ranks of a start have recovered, and follow their training.

        Args:
            newest: iterations of the versions that experts must come back with, where they are known.
        """
        recovered = [life for life in lives if life.outcome is not None]
        if len(recovered) == len(lives) and lives[0].outcome is not None:
            yield from self._check_recovery(shape, lives, lives[0].outcome.iteration, newest)
        self._follow(shape, lives)

    def _check_recovery(
        self, shape: Shape, lives: list[Life], iteration: int, newest: Mapping[Expert, int]
    ) -> Iterator[str]:
        outcome = lives[0].outcome
        assert outcome is not None
        if outcome.record is None:
            self.routed.clear()
            self.missing.clear()
            self.num_other = 0
            return
        for expert in list(self.routed):
            routed = self.routed[expert].items()
            self.routed[expert] = {at: count for at, count in routed if at <= iteration}
        wrong = [
            life.rank
            for life in lives
            if life.rests[iteration] not in self.rests[shape, life.rank, iteration]
        ]
        whole = whole_of(iteration, [life.states[iteration] for life in lives])
        if wrong and (self._is_of(shape) or whole.rest not in self.wholes[iteration]):
            yield f"rank {wrong[0]} has recovered a state that never was at {iteration}"
        found: dict[Expert, Version] = {}
        yield from self._find_versions(lives, iteration, found)
        for expert, version in found.items():
            if version.iteration != newest.get(expert, version.iteration):
                yield f"expert {expert} is of {version.iteration}, and {newest[expert]} is left"
        self.missing = defaultdict(dict)
        for expert, version in found.items():
            kept = {at: count for at, count in version.missing.items() if at <= iteration}
            tokens = self.routed[expert]
            lost = {at: count for at, count in tokens.items() if version.iteration < at}
            self.missing[expert] = {**kept, **lost}
            self.num_other += sum(
                abs(tokens.get(at, 0) - version.routed.get(at, 0))  # one branch may have skipped it
                for at in range(1, min(version.iteration, iteration) + 1)
            )
        total = sum(sum(each.values()) for each in self.missing.values())
        loss = outcome.loss
        said = loss.total_lost_tokens if isinstance(loss, TokenLoss) else None
        if said is None or abs(said - total) > self.num_other:
            yield f"said that {said} tokens are lost, and {total} are"

    def _is_of(self, shape: Shape) -> bool:
        """Return whether all that there was before is of one layout."""
        return all(other == shape for other, _, _ in self.rests)

    def _find_versions(
        self, lives: list[Life], iteration: int, found: dict[Expert, Version]
    ) -> Iterator[str]:
        """Find out which version each expert has come back with; yield what is wrong."""
        experts = _experts_of([life.states[iteration] for life in lives])
        for expert, bits in experts.items():
            version = None if bits is None else self.known.get((expert, bits))
            if version is None:
                yield f"expert {expert} is recovered in a state that it never had"
            else:
                found[expert] = version

    def _follow(self, shape: Shape, lives: list[Life]) -> None:
        fresh: dict[tuple[Expert, int], int] = defaultdict(int)
        for life in lives:
            first = shape.stage_of(life.rank) * shape.layers
            for at, tokens in life.tokens.items():
                for layer, row in enumerate(tokens.tolist(), first):
                    for number, count in enumerate(row):
                        fresh[(layer, number), at] += count
        for (expert, at), count in fresh.items():
            self.routed[expert][at] = count
        for life in lives:
            for at, rest in life.rests.items():
                self.rests[shape, life.rank, at].add(rest)
        self._note_versions(lives)

    def _note_versions(self, lives: list[Life]) -> None:
        for at in sorted({at for life in lives for at in life.states}):
            states = [life.states[at] for life in lives if at in life.states]
            if len(states) == len(lives):
                self.wholes[at].add(whole_of(at, states).rest)
            for expert, bits in _experts_of(states).items():
                if bits is None:
                    continue
                version = Version(
                    at,
                    {each: count for each, count in self.missing[expert].items() if each <= at},
                    {each: count for each, count in self.routed[expert].items() if each <= at},
                )
                self.known.setdefault((expert, bits), version)


def _experts_of(states: list[Export]) -> dict[Expert, str | None]:
    """Return the bits of each expert; None if ranks differ, or some of it is on no rank."""
    held = [each for state in states for each in state.held if each.weight.is_expert]
    whole = put_together(held)
    names = {each.weight.name: each.weight.unit for each in held}
    return {
        (unit.layer, unit.expert): bits_of(whole[name]) if name in whole else None
        for name, unit in names.items()
    }
