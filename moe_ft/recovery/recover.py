"""Looks for state, plans, reads, agrees and puts back: one start's recovery on one rank.

The steps are those of `Recoverer.recover`; each has a file of its own.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from moe_ft.config.config import RecoveryConfig
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import PhaseHook
from moe_ft.engine.memory import RankMemory
from moe_ft.engine.peers import PeerConnection
from moe_ft.engine.storage import Storage
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.format.files import (
    FROZEN,
    Identity,
    Index,
    Start,
    differing_settings,
    incomparable_settings,
)
from moe_ft.format.records import IterationRecord
from moe_ft.planning.recovery import (
    RecoveryPlan,
    Rejection,
    Source,
    Tier,
    passed_over,
    plan_recovery,
)
from moe_ft.recovery.attempts import failed_too_often, read_attempts
from moe_ft.recovery.choice import Choice, Wish, choose, follows, without_left
from moe_ft.recovery.conversion import Conversion, Target
from moe_ft.recovery.gather import RestoredSlices, find_gaps
from moe_ft.recovery.inventory import Inventory, look_at_memory, look_patiently
from moe_ft.recovery.preflight import Site
from moe_ft.recovery.restarts import note_launcher
from moe_ft.recovery.restore import FetchedState, Readers, fetch
from moe_ft.recovery.rotating import RotatingState, fetch_rotating
from moe_ft.recovery.sources import MemoryReader, PeerReader, StateReader, StorageReader
from moe_ft.recovery.verdict import Verdict
from moe_ft.state.catalog import Slices, UnitCatalog
from moe_ft.strategies.interface import Strategy
from moe_ft.strategies.registry import chosen
from moe_ft.topology import Topology
from moe_ft.units import UnitId, parse_unit


@dataclass(kw_only=True, slots=True)
class Recovered:
    """What a start recovered on this rank.

    Attributes:
        plan: what was recovered; None if nothing was.
        fetched: units that were put back.
        rotating: versions that the experts of the stage got.
        is_chosen: whether the user has named where this start begins.
        starts: all whose state or name was found anywhere, recovered or not.
        names: of these and of others that they knew of, the later ones last.
        previous: this rank's index in the newest checkpoint on storage, and its path.
        phases_s: seconds by phase.
        problems: what was looked at and rejected, and why.
        conversion: of the window, whose first snapshot was put back; None if nothing was.
    """

    plan: RecoveryPlan | None = None
    is_chosen: bool = False
    starts: frozenset[Start] = frozenset()
    names: Sequence[str] = ()
    fetched: FetchedState = field(default_factory=FetchedState)
    rotating: RotatingState = field(default_factory=RotatingState)
    previous: tuple[str, Index | None] = ("", None)
    phases_s: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    conversion: Conversion | None = None

    def note(self, inventory: Inventory, rejected: Sequence[Rejection]) -> None:
        """Remember what was found and is not used."""
        self.problems += [each.text for each in inventory.problems]
        self.problems += [each.reason for each in rejected]

    @property
    def record(self) -> IterationRecord | None:
        """The record of the state that training goes on from."""
        index = self.fetched.index
        return None if self.plan is None or index is None else index.records[-1]


class Recoverer:
    """Owned by the training thread; `recover` is called by all ranks.

    Attributes:
        tried: what is being put back, or was; None before.
    """

    def __init__(
        self,
        config: RecoveryConfig,
        site: Site,
        storage: Storage | None,
        memory: RankMemory,
        agreement: Agreement,
        stage: StageSum,
        fingerprint: Mapping[str, Any],
        replay_settings: Mapping[str, Any],
        wish: Wish,
        token: str,
    ) -> None:
        self.tried: RecoveryPlan | None = None
        self._most_iteration: int | None = None  # of experts that only some snapshots hold
        self._wish = wish
        self._verdict = Verdict(site, wish, None if storage is None else storage.url)
        self._config, self._site, self._storage, self._memory = config, site, storage, memory
        self._agreement, self._stage = agreement, stage
        self._fingerprint, self._token = fingerprint, token
        self._replay_settings = replay_settings

    def recover(
        self,
        catalog: UnitCatalog,
        strategy: Strategy,
        origins: Mapping[str, str],
        built: tuple[Any, Any, Any],
        groups: Any,
        phase_hook: PhaseHook,
    ) -> Recovered:
        """Find the newest state that all ranks can put back, and put it back.

        Args:
            catalog: of this rank.
            strategy: of this start.
            origins: checksums of the weights that this start has begun with.
            built: model chunks, Megatron's outermost optimizer and its scheduler.
            groups: Megatron's ProcessGroupCollection.
            phase_hook: called in the middle of putting back.

        Raises:
            ConfigError: if what is there is another model's.
            UnrecoverableError: if there is state and it cannot be used, or nothing is there and that is to be
                an end.
        """
        recovered = Recovered(is_chosen=self._wish.is_choice)
        start = time.perf_counter()
        inventory = self._look()
        recovered.phases_s["inventory"] = time.perf_counter() - start
        recovered.starts, recovered.names = frozenset(inventory.starts), inventory.names
        self._note_launcher(inventory)
        if self._wish.ignores_all:
            self._verdict.say_others(inventory, "")
            return recovered
        start = time.perf_counter()
        plans, rejected, choice = self._plan(inventory)
        recovered.phases_s["plan"] = time.perf_counter() - start
        target = Target(catalog=catalog, built=built, groups=groups, phase_hook=phase_hook)
        for plan in choice.plans:
            self._check_all_is_read(plan, inventory)
            self._check_identity(plan, inventory)
            self._check_replay(plan)
            start = time.perf_counter()
            readers = Readers(self._open_source)
            recovered.conversion = self._fetch(
                plan, target, strategy, origins, readers, recovered, rejected
            )
            if recovered.conversion is not None:
                recovered.plan = self.tried = plan
                rejected += passed_over(plan, plans)
                recovered.is_chosen &= not choice.follows
                recovered.note(inventory, rejected)
                self._verdict.say_rejected(plan, inventory, rejected)
                self._verdict.say_others(inventory, plan.lineage)
                recovered.conversion.load(0)
                if not strategy.saves_all:
                    recovered.previous = self._previous(plan, readers)
                readers.close()
                recovered.phases_s["restore"] = time.perf_counter() - start
                return recovered
            readers.close()
        recovered.note(inventory, rejected)
        if choice.prefers_load:
            self._verdict.say_load(plans, recovered.problems)
        elif not choice.ignores_others:
            for _, identity in inventory.identities:
                self._check_settings(identity, inventory)
            self._verdict.check_is_empty(inventory, plans, recovered.problems)
        return recovered

    def _plan(self, inventory: Inventory) -> tuple[list[RecoveryPlan], list[Rejection], Choice]:
        """Return all plans, best first, what is none, and what the flags choose. Called by all ranks."""
        nodes = [info.node for info in self._topology.ranks]
        plans, rejected = plan_recovery(inventory.versions, nodes)
        plans, given_up = self._drop_failed(plans)
        plans, left = without_left(plans, self._wish)
        has_begun = any(
            follows(version.history, self._wish) and version.lineage in inventory.lineages
            for version in inventory.versions
        )
        choice = choose(
            plans,
            self._wish,
            has_begun=has_begun,
            newest_iteration=inventory.newest_iteration,
        )
        self._most_iteration = None if choice.follows else self._wish.only_iteration
        return plans, [*rejected, *given_up, *left], choice

    def _note_launcher(self, inventory: Inventory) -> None:
        """Have each node remember what there was when its launcher started the job for the first time."""
        if self._site.is_lowest_on_node and not self._wish.is_restart:
            note_launcher(self._site.node_dir, os.environ, inventory.names)

    def _drop_failed(
        self, plans: Sequence[RecoveryPlan]
    ) -> tuple[list[RecoveryPlan], list[Rejection]]:
        """Leave out states from which two starts have failed in the same way. Called by all ranks."""
        own = read_attempts(self._site.node_dir) if self._site.is_lowest_on_node else []
        attempts = [each for found in self._agreement.gather(own) for each in found]
        failed = failed_too_often(attempts)
        if self._wish.only_iteration is not None and not self._wish.is_restart:
            return list(plans), []  # the user insists
        rejected = [
            Rejection(
                iteration=plan.iteration,
                start=plan.start,
                reason=f"iteration {plan.iteration}: two starts failed from there in the same way "
                f"({failed[plan.start.name, plan.iteration]})",
            )
            for plan in plans
            if (plan.start.name, plan.iteration) in failed
        ]
        left = [each for each in plans if (each.start.name, each.iteration) not in failed]
        return left, rejected

    @property
    def _topology(self) -> Topology:
        return self._site.topology

    def _look(self) -> Inventory:
        """Look at all nodes' memory and, once, at storage."""
        own, stored = Inventory(), Inventory()
        site = self._site
        if site.is_lowest_on_node:
            own = look_at_memory(site.node_dir, site.node, site.job_id)
        if site.rank == 0 and self._storage is not None:
            stored = look_patiently(self._storage)
        inventory = Inventory()
        # Apart from the gather, which pads what every rank sends to the longest.
        for found in (*self._agreement.gather(own), self._agreement.broadcast(stored)):
            inventory.merge(found)
        return inventory

    def _check_all_is_read(self, plan: RecoveryPlan, inventory: Inventory) -> None:
        """Raise UnrecoverableError if what could not be read may be newer than a plan.

        Going back to an older state would let retention delete it.
        """
        unread = [
            problem.text
            for problem in inventory.problems
            if problem.is_unread
            and (problem.iteration is None or problem.iteration > plan.iteration)
        ]
        if unread and self._wish.only_iteration is None:
            raise UnrecoverableError(
                f"{'; '.join(unread[:3])}: may be newer than iteration {plan.iteration}, which is usable. "
                "Start again when storage answers. To continue from there all the same, add "
                f"--moe-ft-recover-from iter_{plan.iteration}."
            )

    def _check_identity(self, plan: RecoveryPlan, inventory: Inventory) -> None:
        """Raise ConfigError if a plan is the state of another model or layout."""
        for _, identity in inventory.identities:
            if identity.start == plan.start:
                self._check_settings(identity, inventory)

    def _check_settings(self, identity: Identity, inventory: Inventory) -> None:
        """Raise ConfigError if what was found is the state of another model or layout."""
        division = chosen(self._site.config).division(self._site.config)
        where = next(where for where, each in inventory.identities if each is identity)
        if division and identity.division and division != identity.division:
            raise ConfigError(
                f"{where} holds experts that are divided otherwise: '{identity.division}' there, "
                f"'{division}' now. Start with the flags of that run, or ignore it with "
                "--moe-ft-recover-from load."
            )
        unknown = incomparable_settings(self._fingerprint, identity.fingerprint)
        self._verdict.say_incomparable(where, unknown)
        differences = differing_settings(self._fingerprint, identity.fingerprint)
        if differences:
            raise ConfigError(
                f"{where} holds the state of another model, layout or data: "
                f"{'; '.join(differences[:5])}. Start with the settings of that run, name another "
                "--moe-ft-persist-dir or --moe-ft-job-id, remove its memory with `python -m moe_ft "
                "clean`, or ignore it with --moe-ft-recover-from load."
            )

    def _check_replay(self, plan: RecoveryPlan) -> None:
        """Raise ConfigError if a plan needs iterations to be run again that would not be the same."""
        version = plan.sources[0][0].version
        if version.window == 1:
            return
        theirs = msgspec.json.decode(version.replay_settings)
        self._verdict.say_incomparable(
            f"the window of iteration {plan.iteration}",
            incomparable_settings(self._replay_settings, theirs),
        )
        if differences := differing_settings(self._replay_settings, theirs):
            raise ConfigError(
                f"iteration {plan.iteration} is in a window of {version.window} snapshots, and recovering it "
                f"runs iterations again, with settings that have changed: {'; '.join(differences[:5])}. "
                "Start with the settings of that run; to change them, end it first, with --exit-interval "
                "and --moe-ft-persist-dir, where the last state is written as a whole. Or ignore it with "
                "--moe-ft-recover-from load."
            )

    def _fetch(
        self,
        plan: RecoveryPlan,
        target: Target,
        strategy: Strategy,
        origins: Mapping[str, str],
        readers: Readers,
        recovered: Recovered,
        rejected: list[Rejection],
    ) -> Conversion | None:
        """Read a state; return None, and say why in `rejected`, if a rank lacks something of it."""
        rank, catalog = self._site.rank, target.catalog
        always = list(strategy.always)
        fetched = fetch(plan.sources[rank], always, catalog, readers)
        if fetched.index is not None and fetched.index.origins.get(FROZEN) != origins.get(FROZEN):
            fetched.missing.append(
                "copy of the frozen parameters: this start has begun with others (--load?)"
            )
        rotating = RotatingState()
        if not strategy.saves_all:
            if fetched.compute:
                fetched.missing.append(
                    "snapshot with all units: it is a window of several snapshots"
                )
            rotating = fetch_rotating(
                plan.elsewhere.get(rank, ()),
                sorted(strategy.rotating),
                catalog,
                readers,
                origins,
                self._stage.gather,
                self._most_iteration,
                fetched,
            )
        positions, conflicts = self._agree_on_positions(fetched)
        restored = self._gather_slices(fetched.slices(catalog), target.groups)
        missing = [*fetched.missing, *rotating.missing, *conflicts]
        missing += self._find_gaps(catalog, restored, positions, rotating)
        if fetched.index is None:
            missing.append("record")
        everyone = self._agreement.gather(((plan.start, plan.iteration), missing[:4]))
        assert len({tried for tried, _ in everyone}) == 1, "ranks recover different states"
        failures = [
            f"iteration {plan.iteration}: rank {other} has no intact {', '.join(found[:3])}"
            for other, (_, found) in enumerate(everyone)
            if found
        ]
        recovered.problems += readers.problems
        rejected += [
            Rejection(iteration=plan.iteration, start=plan.start, reason=each) for each in failures
        ]
        recovered.fetched, recovered.rotating = fetched, rotating
        return None if failures else Conversion(fetched, restored, positions, target)

    def _agree_on_positions(self, fetched: FetchedState) -> tuple[dict[UnitId, int], list[str]]:
        """Return which snapshot has each unit of the stage at FULL, and where ranks do not agree."""
        own = {each.unit: fetched.position_of(each) for each in fetched.units.values()}
        positions: dict[UnitId, int] = {}
        conflicts = []
        for found in self._stage.gather(own):
            for unit, position in found.items():
                if positions.setdefault(unit, position) != position:
                    conflicts.append(f"window in which all ranks have {unit} in one snapshot")
        return positions, conflicts

    def _find_gaps(
        self,
        catalog: UnitCatalog,
        restored: Sequence[tuple[RestoredSlices, RestoredSlices]],
        positions: Mapping[UnitId, int],
        rotating: RotatingState,
    ) -> list[str]:
        """Name what no rank has read of what several of them hold alike."""
        kept = {
            each.name
            for unit in map(parse_unit, rotating.kept)
            if catalog.has(unit)
            for each in catalog.parameters_of(unit)
        }
        kept |= catalog.frozen_names
        at_full = [full for full, _ in restored]
        gaps = [f"slice of {name}" for name in find_gaps(catalog.parameters, at_full, kept)]
        for position, (_, compute) in enumerate(restored):
            frozen = [each for each in catalog.parameters if positions.get(each.unit, 0) > position]
            gaps += [f"weights of {name}" for name in find_gaps(frozen, [compute], kept)]
        return gaps

    def _gather_slices(
        self, slices: Sequence[tuple[Slices, Slices]], groups: Any
    ) -> list[tuple[RestoredSlices, RestoredSlices]]:
        """Exchange which slices of shared parameters the ranks of the data-parallel groups have."""
        everyone = dict(self._stage.gather((self._site.rank, slices)))
        dp, expt_dp = (
            [everyone[rank] for rank in dist.get_process_group_ranks(group)]
            for group in (groups.dp_cp, groups.expt_dp)
        )
        # A rank that could read nothing has no snapshots; it says so itself.
        length = max(map(len, everyone.values()))

        def at(position: int, level: int) -> RestoredSlices:
            return RestoredSlices(
                dp=[_at(found, position, level) for found in dp],
                expt_dp=[_at(found, position, level) for found in expt_dp],
            )

        return [(at(position, 0), at(position, 1)) for position in range(length)]

    def _previous(self, plan: RecoveryPlan, readers: Readers) -> tuple[str, Index | None]:
        """Return the path and the index of this rank in the newest checkpoint that the run still has."""
        stored = [
            source
            for source in plan.elsewhere.get(self._site.rank, ())
            if source.tier is Tier.STORAGE and source.version.iteration <= plan.iteration
        ]
        for source in sorted(stored, key=lambda each: -each.version.iteration):
            if (reader := readers.open(source)) is not None:
                return source.version.path, reader.index
        return "", None

    def _open_source(self, source: Source) -> StateReader:
        if source.tier is Tier.MEMORY:
            path: Path = self._site.node_dir / source.version.path
            pool = [self._memory.pool] if self._memory.pool is not None else []
            return MemoryReader(path, [*self._memory.regions, *pool])
        if source.tier is Tier.STORAGE:
            assert self._storage is not None
            return StorageReader(self._storage, source.version)
        assert source.version.node is not None
        address = self._topology.lowest_on_node(source.version.node).address
        assert address is not None
        return PeerReader(PeerConnection(address, self._token), source.version)


def _at(slices: Sequence[tuple[Slices, Slices]], position: int, level: int) -> Slices:
    return slices[position][level] if position < len(slices) else {}
