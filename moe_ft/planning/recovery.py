"""Plans of a recovery: the newest state that every rank can read, and where each reads it.

Pure: the same inventory gives the same plans. planning/branches.py orders the starts,
recovery/inventory.py finds the versions, recovery/fetch.py reads them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import override

from moe_ft.format.entries import FileEntry
from moe_ft.format.identity import Family, History, Start
from moe_ft.planning.branches import is_alive, known_names, order_starts, order_written
from moe_ft.planning.scope import EVERYBODY, Scope
from moe_ft.planning.tiers import MEMORY, STORAGE, Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """One rank's state at one iteration, in one place.

    Attributes:
        iteration: Megatron's counter; that of the last snapshot for a window.
        history: the starts of its run up to the one that wrote it.
        node: the node that holds it; None if all nodes read the same.
        path: its index, relative to the directory of its tier.
        tier: as its own node sees it.
        is_replica: whether it lies in memory that a peer keeps for the rank.
        is_breakpoint: whether the rank wrote it on its way out, which the others may not have done.
        replay_settings: settings that the replay of a window must have, as JSON.
        superseded: names of starts that the writer knew of and did not continue.
        began_with: flags that loaded the run's first weights; empty without.
        file: its entry in the manifest; None in memory.
        layout: name of the layout that its writer had; empty for that of this start.
        world_size: ranks of its writer's job, if that had another layout; else 0.
    """

    rank: int
    iteration: int
    lineage: str
    history: History
    node: str | None
    path: str
    tier: Tier = MEMORY
    is_replica: bool = False
    is_breakpoint: bool = False
    window: int = 1
    replay_settings: str = ""
    superseded: tuple[str, ...] = ()
    began_with: str = ""
    file: FileEntry | None = None
    layout: str = ""
    world_size: int = 0

    @property
    def start(self) -> Start:
        """The start that wrote it."""
        return self.history[-1]

    @property
    def family(self) -> Family:
        """Family of the version, see `Identity.family`."""
        return self.iteration, -self.window, self.start

    @property
    def place(self) -> str:
        """The place that has it, for people."""
        return self.tier.name if self.node is None else f"{self.tier.name} of node {self.node}"

    def seen_from(self, node: str) -> "Source":
        """Return it as a source of the ranks of a node."""
        is_near = node == self.node
        tier = self.tier if is_near else self.tier.from_afar or self.tier
        return Source(tier=tier, version=self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A version and the tier that it is in for its reader."""

    tier: Tier
    version: Version

    @property
    def place(self) -> str:
        """The node that it is read from, or the tier that all nodes read alike, such as "storage"."""
        return self.version.node or self.tier.name


class Ordered(Mapping[int, tuple[Source, ...]]):
    """Sources by rank, best first, put in order when they are asked for: rank 0 asks for few of them.

    Attributes:
        versions: by rank, in any order. Of another layout all ranks have one list.
        breakpoints_first: whether these come first, or last; None for neither.
    """

    def __init__(
        self,
        versions: Mapping[int, Sequence[Version]],
        node_of: Mapping[int, str] | Sequence[str],
        breakpoints_first: bool | None = None,
    ) -> None:
        self.versions = versions
        self._node_of = node_of
        self.breakpoints_first = breakpoints_first

    @override
    def __getitem__(self, rank: int) -> tuple[Source, ...]:
        found = order_sources(self.versions[rank], self._node_of[rank])
        if (first := self.breakpoints_first) is None:
            return found
        return tuple(sorted(found, key=lambda each: each.version.is_breakpoint is not first))

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self.versions)

    @override
    def __len__(self) -> int:
        return len(self.versions)


def versions_of(sources: Mapping[int, tuple[Source, ...]], rank: int) -> Sequence[Version]:
    """Return the versions among the sources of a rank, in any order."""
    if isinstance(sources, Ordered):
        return sources.versions[rank]
    return [each.version for each in sources[rank]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """The way of one pipeline stage from stored state to the iteration at which training continues.

    Attributes:
        target: iteration of the state that the stage ends with.
        replay_from: iteration of the state that is put back first; the iterations from there to the target
            are replayed.
        sources: for every rank of the stage the places where it can read its state, best first. A state of
            another layout is that of all its ranks.
    """

    target: int
    replay_from: int
    sources: Mapping[int, tuple[Source, ...]]

    @property
    def num_replays(self) -> int:
        """Iterations that the stage runs again."""
        return self.target - self.replay_from


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """State that a plan rests on, over all ranks.

    Attributes:
        version: rank 0's version. Unless the recovery is local, all ranks' are of the same family.
        states: writers and iterations.
        is_on_storage: whether some rank's state can be read on storage alone.
        is_on_breakpoints: whether all that some rank has of it is its breakpoint.
    """

    version: Version
    states: frozenset[tuple[Start, int]]
    is_on_storage: bool
    is_on_breakpoints: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One way to recover a job.

    Attributes:
        history: starts of that run up to its newest, the base of the next one's.
        stages: the way of each pipeline stage. All have the same target.
        elsewhere: for every rank everything that the run has left, of any iteration, in the same order. Units
            that the snapshots of this iteration lack may be there.
        scopes: stages that recover together, ordered by their lowest. A local recovery has none if nothing is
            run again.
        noted: of a plan that has the sources of one rank alone, see planning/shares.py.
    """

    iteration: int
    lineage: str
    history: History
    start: Start
    stages: Mapping[int, StagePlan]
    elsewhere: Mapping[int, tuple[Source, ...]] = field(default_factory=dict)
    scopes: tuple[Scope, ...] = (EVERYBODY,)
    noted: Basis | None = None

    def sources_of(self, rank: int) -> tuple[Source, ...]:
        """Return the places where a rank can read its state, best first."""
        return next(stage.sources[rank] for stage in self.stages.values() if rank in stage.sources)

    @property
    def basis(self) -> Basis:
        """State that it rests on."""
        if self.noted is not None:
            return self.noted
        found = {
            id(versions): versions
            for stage in self.stages.values()
            for versions in (versions_of(stage.sources, rank) for rank in stage.sources)
        }  # a list that all ranks read once
        copies: list[list[Version]] = []
        for versions in found.values():
            by_writer: dict[int, list[Version]] = defaultdict(list)
            for version in versions:
                by_writer[version.rank].append(version)
            copies += by_writer.values()
        return Basis(
            version=self.version,
            states=frozenset((each.start, each.iteration) for same in copies for each in same),
            is_on_storage=any(all(each.tier == STORAGE for each in same) for same in copies),
            is_on_breakpoints=any(all(each.is_breakpoint for each in same) for same in copies),
        )

    @property
    def is_other_layout(self) -> bool:
        """True if the state must be divided again among the ranks of this start."""
        return bool(self.version.layout)

    @property
    def is_local(self) -> bool:
        """True if stages outside of every scope keep the state that they have."""
        return EVERYBODY not in self.scopes

    @property
    def stages_alone(self) -> tuple[int, ...]:
        """Stages that run iterations again without the others, ascending."""
        return tuple(sorted(stage for each in self.scopes for stage in each.stages))

    def scope_of(self, stage: int) -> Scope | None:
        """Return the scope that a stage is in; None if it runs nothing again."""
        around = (each for each in self.scopes if each == EVERYBODY or stage in each.stages)
        return next(around, None)

    @property
    def replay_from(self) -> int:
        """The first iteration that a stage runs again; that of the state if none does."""
        return min(stage.replay_from for stage in self.stages.values())

    @property
    def version(self) -> Version:
        """Rank 0's version of the state."""
        return self.sources_of(0)[0].version if self.noted is None else self.noted.version

    @property
    def began_with(self) -> str:
        """Flags that loaded the run's first weights; empty without."""
        return self.version.began_with

    @property
    def num_replays(self) -> int:
        """Most iterations that a stage runs again."""
        return max(stage.num_replays for stage in self.stages.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejection:
    """State that no plan, or a later plan, uses.

    Attributes:
        reason: for people; names the iteration.
    """

    iteration: int
    start: Start
    reason: str


def plan_recovery(
    versions: Sequence[Version],
    node_of: Sequence[str],
    stage_of: Sequence[int] | None = None,
) -> tuple[list[Plan], list[Rejection]]:
    """Return the ways to recover, best first, and the states that are incomplete.

    The work of each start is a candidate of its own. The latest start with a complete state comes first, with
    its newest state.

    Args:
        versions: everything that was found, in any order.
        node_of: ``[rank]`` the node of each rank now.
        stage_of: ``[rank]`` the pipeline stage of each rank; None if there is only one.
    """
    stages = [0] * len(node_of) if stage_of is None else stage_of
    families: dict[Start, dict[Family, dict[int, list[Version]]]] = defaultdict(dict)
    for version in versions:
        members = families[version.start].setdefault(version.family, defaultdict(list))
        members[version.rank].append(version)
    complete: dict[Start, list[Family]] = {}
    rejected: list[Rejection] = []
    for start, found in families.items():
        for key in sorted(found, reverse=True):
            (first, *_), *_ = found[key].values()
            num_ranks = first.world_size or len(node_of)
            if missing := [rank for rank in range(num_ranks) if rank not in found[key]]:
                reason = f"iteration {key[0]}: no state of {_name_ranks(missing)} in any tier"
                rejected.append(Rejection(iteration=key[0], start=start, reason=reason))
            else:
                complete.setdefault(start, []).append(key)
    known = _known_names(versions)
    progress = {start: max(found)[0] for start, found in complete.items()}
    histories = order_histories(versions)
    left: dict[tuple[History, str], Mapping[int, tuple[Source, ...]]] = {}
    plans = []
    for start in order_starts(progress, known):
        for family in complete[start]:
            by_rank = families[start][family]
            own = by_rank[0][0]
            # Later starts may have nothing complete except for single units.
            run = next(each for each in histories if is_alive(own.iteration, own.history, each))
            if (run, own.layout) not in left:
                left[run, own.layout] = left_of(run, versions, node_of, own.layout)
            plans.append(
                Plan(
                    iteration=own.iteration,
                    lineage=own.lineage,
                    history=run,
                    start=start,
                    stages=_plan_stages(own, by_rank, node_of, stages),
                    elsewhere=left[run, own.layout],
                )
            )
    return plans, rejected


def _plan_stages(
    version: Version,
    by_rank: Mapping[int, Sequence[Version]],
    node_of: Sequence[str],
    stage_of: Sequence[int],
) -> dict[int, StagePlan]:
    """Return the plan of every stage: all put back the same window and replay it to its end.

    Snapshots may have divided among the ranks what several of them hold in another way than breakpoints do,
    so these come first only where all ranks have one and some rank has nothing else. Of a state of another
    layout every rank may need something of all ranks.
    """
    if version.layout:
        everything = [each for found in by_rank.values() for each in found]
        by_rank = dict.fromkeys(range(len(node_of)), everything)
    lists = {id(found): found for found in by_rank.values()}  # a list that all ranks read once
    kinds = [{each.is_breakpoint for each in found} for found in lists.values()]
    comes_first = all(True in each for each in kinds) and any(False not in each for each in kinds)
    ranks: dict[int, dict[int, Sequence[Version]]] = defaultdict(dict)
    for rank, stage in enumerate(stage_of):
        ranks[stage][rank] = by_rank[rank]
    return {
        stage: StagePlan(
            target=version.iteration,
            replay_from=version.iteration - version.window + 1,
            sources=Ordered(ranks[stage], node_of, comes_first),
        )
        for stage in sorted(ranks)
    }


def _known_names(versions: Sequence[Version]) -> dict[Start, frozenset[str]]:
    """Return by start the names of the starts that it knew of."""
    writers = {each.start: each for each in versions}
    return {start: known_names(each.history, each.superseded) for start, each in writers.items()}


def order_histories(versions: Sequence[Version]) -> list[History]:
    """Return the histories of everything that was found, complete or not, the latest first."""
    return order_written((each.iteration, each.history, each.superseded) for each in versions)


def left_of(
    run: History, versions: Sequence[Version], node_of: Sequence[str], layout: str = ""
) -> Mapping[int, tuple[Source, ...]]:
    """Return for every rank everything that a run has left in a layout, best first.

    Of the layout of this start that is what a rank of the same number has left, of another that of all ranks.
    """
    alive: dict[int, list[Version]] = defaultdict(list)
    is_left: dict[tuple[int, Start], bool] = {}
    for version in versions:
        key = version.iteration, version.start
        if key not in is_left:
            is_left[key] = is_alive(version.iteration, version.history, run)
        if is_left[key] and version.layout == layout:
            alive[-1 if layout else version.rank].append(version)
    return Ordered({rank: alive[-1 if layout else rank] for rank in range(len(node_of))}, node_of)


def plan_to_keep(plan: Plan, plans: Sequence[Plan]) -> Plan | None:
    """Return the state that must stay in memory until a new window is complete, None if there is none.

    A breakpoint is in no other node's memory. If a node is lost after a recovery from breakpoints, the next
    recovery needs the newest state of snapshots before them, which peers may have. After a local recovery the
    ranks have restored states of several iterations, and keep one that all of them have.
    """
    if not plan.basis.is_on_breakpoints and not plan.is_local:
        return plan
    older = (
        each
        for each in plans
        if not each.basis.is_on_breakpoints
        and not each.is_local
        and each.lineage == plan.lineage
        and is_alive(each.iteration, each.version.history, plan.history)
    )
    return next(older, None)


def order_sources(versions: Sequence[Version], node: str) -> tuple[Source, ...]:
    """Order the sources of a rank of a node: by their tiers, then newer starts first."""
    return tuple(
        sorted(
            (version.seen_from(node) for version in versions),
            key=lambda source: (
                source.tier.preference,
                source.version.is_replica,
                -source.version.start.number,
                -source.version.iteration,
                source.version.node or "",
                source.version.path,
            ),
        )
    )


def _name_ranks(ranks: Sequence[int], limit: int = 8) -> str:
    names = ", ".join(map(str, ranks[:limit])) + (", ..." if len(ranks) > limit else "")
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names} ({len(ranks)} in all)"
