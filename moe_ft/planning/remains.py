"""Remains of a failure: the state, boundary logs and records of one run that can still be read.

Plain values, on rank 0. planning/local_recovery.py plans a recovery from them. Whoever collects them
leaves out everything that the run has left behind (planning/branches.py), torn breakpoints, and the snapshots
of a strategy that does not save every unit in them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe_ft.errors import PlanError
from moe_ft.format.boundary import Direction
from moe_ft.format.identity import History
from moe_ft.format.records import JobNumbers
from moe_ft.planning.couplings import Coupling
from moe_ft.planning.recovery import Version
from moe_ft.planning.scope import KeptRecord, Place, SentLog


def place_of(version: Version) -> Place:
    """Return the place of a state."""
    return version.node, version.path, version.iteration, version.rank


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLink:
    """One direction of a boundary between two stages."""

    sender: int
    receiver: int
    direction: Direction


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundLog:
    """Boundary log of one rank for one iteration, as it was found.

    Attributes:
        rank: the rank that has sent the tensors.
        history: the starts of its run up to the one that wrote it.
        receivers: ranks that got something, each with the direction.
        numbers: of the state that the iteration began with; None if they were not known.
        record_settings: likewise those whose effects are in records, such as learning rates.
    """

    rank: int
    iteration: int
    history: History
    node: str
    path: str
    receivers: tuple[tuple[int, Direction], ...]
    numbers: JobNumbers | None
    replay_settings: str
    record_settings: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Remains:
    """Everything that a failure has left of a run, in any order.

    Attributes:
        versions: states by rank. A window W of 1 is a whole state, such as a breakpoint. A longer one is put
            back at its first iteration, and W - 1 iterations later its ranks have the whole state.
        records: further records; those in the files of versions need not be listed.
        own_record_only: iterations of states from which a rank can continue only with its own record: they
            were evaluated, which draws random numbers, or made with other settings than those of now, such as
            learning rates.
        unreadable: places of logs and records that somebody has tried to read, in vain.
    """

    versions: Sequence[Version]
    logs: Sequence[SentLog] = ()
    records: Sequence[KeptRecord] = ()
    own_record_only: frozenset[int] = frozenset()
    unreadable: frozenset[Place] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineLayout:
    """Layout of a job as the planning of a scope sees it.

    Attributes:
        stages: ``[stage][pipeline]`` global ranks. A rank exchanges tensors with those of its own pipeline in
            the next and the previous stage.
        node_of: ``[rank]`` the node of each rank now.
        is_ring: whether the first and the last stage are neighbours too, as with virtual stages.
        has_common_records: whether a record answers for other stages than its own. It does not if the
            optimizers of the stages have other parts, since found-inf is recorded for each part.
    """

    stages: tuple[tuple[int, ...], ...]
    node_of: tuple[str, ...]
    is_ring: bool = False
    couplings: tuple[Coupling, ...] = ()
    has_common_records: bool = True

    def __post_init__(self) -> None:
        ranks = sorted(rank for stage in self.stages for rank in stage)
        if ranks != list(range(len(self.node_of))) or len(set(map(len, self.stages))) != 1:
            raise PlanError(
                f"stages {self.stages} of {len(self.node_of)} ranks: every rank must be in one stage, and "
                "all stages must have the same number of ranks"
            )
        if any(not set(each.stages) <= set(range(self.num_stages)) for each in self.couplings):
            raise PlanError(
                f"couplings {[each.stages for each in self.couplings]} name stages that do not exist: there "
                f"are {self.num_stages}"
            )

    @property
    def num_stages(self) -> int:
        """Pipeline ranks."""
        return len(self.stages)

    @property
    def links(self) -> tuple[StageLink, ...]:
        """All directions of all boundaries; two stages on a ring have four."""
        pairs = [(stage, stage + 1) for stage in range(self.num_stages - 1)]
        if self.is_ring and self.num_stages > 1:
            pairs.append((self.num_stages - 1, 0))
        return tuple(
            link
            for first, second in pairs
            for link in (
                StageLink(sender=first, receiver=second, direction=Direction.FORWARD),
                StageLink(sender=second, receiver=first, direction=Direction.BACKWARD),
            )
        )

    def wires(self, link: StageLink) -> Iterator[tuple[int, int]]:
        """Yield the sending and the receiving rank of each pipeline."""
        return zip(self.stages[link.sender], self.stages[link.receiver], strict=True)

    def joined(self, stages: frozenset[int]) -> list[frozenset[int]]:
        """Return the sets of these stages that links or couplings join, ordered by their lowest stage."""
        pairs = [frozenset({link.sender, link.receiver}) for link in self.links]
        pairs += [frozenset(each.stages) for each in self.couplings]
        sets = [frozenset({stage}) for stage in stages]
        for pair in pairs:
            if pair <= stages:
                touched = [each for each in sets if each & pair]
                sets = [each for each in sets if each not in touched]
                sets.append(frozenset[int]().union(*touched))
        return sorted(sets, key=min)
