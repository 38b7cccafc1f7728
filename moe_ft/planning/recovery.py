"""Which state to recover from: the newest iteration that every rank can read, and where each reads it.

Pure: the same inventory gives the same plans on all ranks. Finding what exists is recovery/inventory.py,
reading it recovery/restore.py.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

History = tuple[tuple[int, int], ...]


class Tier(StrEnum):
    """Where state lies, seen from the rank that reads it, in the order of preference."""

    MEMORY = "memory"  # host memory of its own node
    PEER = "peer"  # host memory of another node
    STORAGE = "storage"


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One rank's state at one iteration, in one place.

    Attributes:
        rank: global rank whose state it is.
        iteration: Megatron's counter; of a window its last one.
        lineage: the training run it belongs to; later fresh starts sort behind earlier ones.
        history: (incarnation, iteration that it went on from), of all incarnations up to its own.
        node: the node whose memory holds it, None for storage.
        path: its index, relative to the node's memory directory or the persist directory.
        is_replica: whether it lies in memory that a peer keeps for the rank.
        window: number of snapshots.
        replay_settings: with more than one, those that the replay needs, as JSON.
    """

    rank: int
    iteration: int
    lineage: str
    history: History
    node: str | None
    path: str
    is_replica: bool = False
    window: int = 1
    replay_settings: str = ""

    @property
    def incarnation(self) -> int:
        """The incarnation that wrote it."""
        return self.history[-1][0]

    @property
    def family(self) -> tuple[int, int, int]:
        """What versions of several ranks must have in common to be used together; see `family_of`."""
        return family_of(self.iteration, self.window, self.history)


def family_of(iteration: int, window: int, history: History) -> tuple[int, int, int]:
    """Return what versions of several ranks must have in common to be used together, the best last.

    The units that a snapshot of a window has at FULL must be the same on all ranks, and incarnations may
    have grouped them differently.

    Args:
        iteration: of the state.
        window: number of snapshots.
        history: of the run up to the incarnation that wrote it.
    """
    return iteration, -window, history[-1][0] if window > 1 else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A version and the tier that it is in for its reader."""

    tier: Tier
    version: Version


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryPlan:
    """One way to recover.

    Attributes:
        iteration: where training goes on.
        lineage: the run that is continued.
        history: that of its newest incarnation so far, the base of the next one's.
        sources: for every rank where it can read its state, best first.
        elsewhere: for every rank all that the run has left, of any iteration, in the same order: where
            units may be that the snapshots of this iteration do not hold.
    """

    iteration: int
    lineage: str
    history: History
    sources: Mapping[int, tuple[Source, ...]]
    elsewhere: Mapping[int, tuple[Source, ...]] = field(default_factory=dict)


def plan_recovery(
    versions: Sequence[Version], node_of: Sequence[str], only_iteration: int | None = None
) -> tuple[list[RecoveryPlan], list[str]]:
    """Return the ways to recover, best first, and why other iterations are none.

    Versions of one lineage only are combined, the newest lineage is tried first, and in it the newest
    iteration. Versions from beyond the point where a later incarnation resumed are dead.

    Args:
        versions: everything that was found, in any order.
        node_of: ``[rank]`` its node now.
        only_iteration: consider no other iteration.
    """
    plans: list[RecoveryPlan] = []
    rejected: list[str] = []
    by_lineage: dict[str, list[Version]] = defaultdict(list)
    for version in versions:
        by_lineage[version.lineage].append(version)
    for lineage in sorted(by_lineage, reverse=True):
        _plan_lineage(by_lineage[lineage], node_of, only_iteration, plans, rejected)
    return plans, rejected


def _plan_lineage(
    versions: list[Version],
    node_of: Sequence[str],
    only_iteration: int | None,
    plans: list[RecoveryPlan],
    rejected: list[str],
) -> None:
    history = max((version.history for version in versions), key=lambda each: (len(each), each))
    families: dict[tuple[int, int, int], dict[int, list[Version]]]
    families = defaultdict(lambda: defaultdict(list))
    for version in versions:
        if reason := _why_dead(version, history):
            rejected.append(reason)
        else:
            families[version.family][version.rank].append(version)
    elsewhere: dict[int, tuple[Source, ...]] = {}
    for rank, node in enumerate(node_of):
        alive = [found[rank] for found in families.values() if rank in found]
        elsewhere[rank] = _order([version for versions in alive for version in versions], node)
    for family in sorted(families, reverse=True):
        iteration, found = family[0], families[family]
        missing = [rank for rank in range(len(node_of)) if rank not in found]
        if only_iteration is not None and iteration != only_iteration:
            rejected.append(f"iteration {iteration}: not the one that --moe-ft-recover-from names")
        elif missing:
            rejected.append(
                f"iteration {iteration}: no state of {_name_ranks(missing)} in any tier"
            )
        else:
            sources = {rank: _order(found[rank], node_of[rank]) for rank in range(len(node_of))}
            plans.append(
                RecoveryPlan(
                    iteration=iteration,
                    lineage=versions[0].lineage,
                    history=history,
                    sources=sources,
                    elsewhere=elsewhere,
                )
            )


def _why_dead(version: Version, history: History) -> str | None:
    """Say why a version does not belong to the run as its newest incarnation continued it."""
    where = f"iteration {version.iteration} of rank {version.rank}"
    if version.history != history[: len(version.history)]:
        return f"{where}: incarnation {version.incarnation} is of another branch of the run"
    for incarnation, resumed_at in history[len(version.history) :]:
        if version.iteration > resumed_at:
            return f"{where}: incarnation {incarnation} went on from iteration {resumed_at}"
    return None


def _order(versions: list[Version], node: str) -> tuple[Source, ...]:
    """Order the sources of one rank: memory, peers, storage; newer incarnations first."""
    sources = [Source(tier=_tier(version, node), version=version) for version in versions]
    tiers = list(Tier)
    return tuple(
        sorted(
            sources,
            key=lambda source: (
                tiers.index(source.tier),
                source.version.is_replica,
                -source.version.incarnation,
                -source.version.iteration,
                source.version.node or "",
                source.version.path,
            ),
        )
    )


def _tier(version: Version, node: str) -> Tier:
    if version.node is None:
        return Tier.STORAGE
    return Tier.MEMORY if version.node == node else Tier.PEER


def _name_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    names = ", ".join(map(str, ranks[:limit])) + (", ..." if len(ranks) > limit else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names} ({len(ranks)} in all)"
