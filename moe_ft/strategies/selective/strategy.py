"""The strategy `selective`: as many experts as the budgets of memory and of peers allow (MoEtion).

selection.py chooses them; what it has in common with other strategies is in strategies/rotating.py. Counters
are kept per target. What goes to peers is chosen among the versions in memory, so peers have what memory has
or something older. All ranks of a stage make the same choices, each within its own bytes.

With --moe-ft-replicate gradients peers follow the state outside experts, and the experts with the most
tokens. The step of an expert leads from the version before: so every snapshot holds those that are followed,
and an expert is sent as state once before it is. If a snapshot is left out or a peer lacks something of it,
none is followed until it was sent again, within the budget.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import override

import numpy as np
import numpy.typing as npt

from moe_ft.planning.experts import Counts, Expert, ExpertLayout
from moe_ft.planning.lost_tokens import NEVER, Loss
from moe_ft.strategies.interface import (
    MeasuredBytes,
    PersistPlan,
    Resumed,
    WindowPlan,
)
from moe_ft.strategies.rotating import (
    ExpertVersions,
    PlannedRun,
    RotatingExperts,
    Selection,
    SnapshotMemo,
)
from moe_ft.strategies.selective.selection import (
    PAPER,
    Need,
    RankLoads,
    SelectiveConfig,
    as_selection,
    by_rate,
    select,
)
from moe_ft.units import UnitId

_SNAPSHOTS_BETWEEN_CHANGES = 10
_NOTABLE_CHANGE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class _Following:
    """Experts of a snapshot that peers follow, by their numbers.

    Attributes:
        held: of which peers get the gradients of the step that led here.
        entering: that they get as state, and follow from now on.
        leaving: of those held, what they do not follow any longer.
        wanted: that they would follow if they had them as of this iteration.
    """

    held: tuple[int, ...] = ()
    entering: tuple[int, ...] = ()
    leaving: frozenset[int] = frozenset()
    wanted: frozenset[int] = frozenset()

    @property
    def all(self) -> tuple[int, ...]:
        """Return the experts that memory and peers get in this snapshot."""
        return (*self.held, *self.entering)


class Budget:
    """Bytes of a snapshot for one target: given, or measured and agreed on. Owned by the strategy.

    Attributes:
        num_bytes: None until it is known.
    """

    def __init__(self, given: int | None) -> None:
        self.is_auto = given is None
        self.num_bytes = given
        self._num_snapshots = 0  # since the last change

    def note_snapshot(self) -> None:
        """Note that a snapshot is complete."""
        self._num_snapshots += 1

    def agree(self, least: int) -> bool:
        """Take what all ranks can do, not more often than every few snapshots; return whether that is new.

        Args:
            least: over all ranks, 0 if some have not measured it.
        """
        if least == 0:
            return False
        if self.num_bytes is not None:
            if self._num_snapshots < _SNAPSHOTS_BETWEEN_CHANGES:
                return False
            if abs(least - self.num_bytes) <= _NOTABLE_CHANGE * self.num_bytes:
                return False
        self.num_bytes = least
        self._num_snapshots = 0
        return True


class SelectiveStrategy(RotatingExperts):
    """Owned by the training thread."""

    def __init__(
        self,
        always: Iterable[UnitId],
        rotating: Iterable[UnitId],
        layers: Sequence[str],
        experts: ExpertLayout,
        options: SelectiveConfig,
        run: PlannedRun,
        loads: RankLoads,
        place: int,
        frozen: Collection[Expert] = (),
        *,
        has_peers: bool,
        are_followed: bool = False,
    ) -> None:
        """Make the strategy of one rank at the start of a run.

        Args:
            layers: names of the stage's MoE layers, in the order of the counts.
            place: of this rank among those of the stage.
            are_followed: whether peers get gradients.
        """
        super().__init__(always, rotating, layers, experts, run, frozen)
        self._options = options
        self._loads = loads
        self._place = place
        self.local = Budget(options.local_bytes)
        self.remote = Budget(options.remote_bytes)
        self._has_peers = has_peers
        self._are_followed = are_followed
        self._gradients = loads.as_gradients()
        self._follows = are_followed and options.selective_rule != PAPER
        self._can_follow = True
        self._rates: Counts | None = None  # 1024 times the mean tokens of an iteration
        self._next: frozenset[int] = frozenset()  # whose next step peers follow
        self._next_units: frozenset[UnitId] = frozenset()  # of this rank
        self._sent_iteration = -1  # of the last snapshot, if peers have what it was to bring them
        self._takes_all = self.local.is_auto or run.takes_whole
        # At peers; None until they have whatever memory has.
        self._sent: ExpertVersions | None = None
        self._whole = np.zeros((experts.num_layers, experts.num_experts), np.bool_)
        # Snapshots that hold a whole state together: of this stage, and of the stage that needs most.
        self._own_rounds = self._count_rounds()
        self._most_rounds = 1
        self._num_complete = 0
        self._measured = MeasuredBytes()

    def _count_rounds(self) -> int:
        left, num_rounds = np.flatnonzero(self._loads.has_units), 0
        while len(left) and not self._takes_all:
            rooms = self._rooms(self.local)
            taken = self._loads.fill(left, rooms, np.zeros(len(rooms), np.int64))
            left, num_rounds = np.setdiff1d(left, taken), num_rounds + 1
        return max(1, num_rounds)

    @property
    @override
    def most_rotating(self) -> int:
        if self._takes_all or self.local.num_bytes is None:
            return len(self.rotation.units)
        return self._loads.most_on_rank(self._place, self.local.num_bytes)

    @property
    @override
    def most_retained(self) -> int:
        return len(self.rotation.units) if self._has_peers else 0

    @override
    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        trained = self._ledger.trained
        now = ExpertVersions.of(trained, iteration)
        follow = self._follow(iteration, is_all=not is_whole or self._takes_all)
        whole = self._select_whole(iteration) if is_whole else None
        selection = whole or self._select_local(now, follow)
        remote = self._select_remote(self._saved.replaced(selection, now), follow)
        snapshot = self._snapshot(selection, self._turn)
        if remote is not None:
            units = self._of_this_rank(remote, self._ledger.routed, self._ledger.gaps)
            snapshot = replace(snapshot, remote=frozenset(units))
        memo = SnapshotMemo(
            selection=selection,
            trained=trained,
            remote=remote,
            is_whole=is_whole,
            followed=self._followed_next(follow, selection, remote),
        )
        return WindowPlan(snapshots=(snapshot,), memo=memo)

    def _rooms(self, budget: Budget) -> npt.NDArray[np.int64]:
        """Return ``[rank]`` bytes for experts; until a budget is measured each rank takes one expert."""
        return self._loads.rooms(budget.num_bytes or 0)

    def _follow(self, iteration: int, *, is_all: bool) -> _Following:
        """Return the experts that peers follow; none unless they have what the step began with.

        Args:
            is_all: whether the snapshot has room for all that are followed.
        """
        rooms = self._remote_rooms()
        if rooms is None or self._rates is None or not (self._follows and is_all):
            return _Following()
        held = np.zeros(self._rates.size, np.bool_)
        if self._sent_iteration == iteration - 1:
            held[list(self._next)] = True
        kept, loads = np.flatnonzero(held).tolist(), self._loads
        if not self._can_follow:
            return _Following(held=tuple(kept), leaving=frozenset(kept))
        if (self._saved.iterations == NEVER).ravel()[loads.has_units].any():
            return _Following(held=tuple(kept))  # experts that were never saved come first
        # A place is left for those that take turns.
        local = loads.without_place(self._rooms(self.local), loads)
        remote = loads.without_place(rooms, self._gradients)
        order = by_rate(self._rates.ravel(), held, loads, rooms, self._experts)
        fitting = loads.fill(order, local, np.zeros_like(local), may_exceed=False)
        wanted = self._gradients.fill(fitting, remote, np.zeros_like(remote), may_exceed=False)
        entering = [each for each in wanted if not held[each]]
        entering = loads.fill(entering, remote, self._gradients.bytes_of(kept), may_exceed=False)
        entering = loads.fill(entering, local, loads.bytes_of(kept), may_exceed=False)
        leaving = frozenset(kept).difference(wanted)
        return _Following(
            held=tuple(kept), entering=tuple(entering), leaving=leaving, wanted=frozenset(wanted)
        )

    def _followed_next(
        self, follow: _Following, selection: Selection, remote: Selection | None
    ) -> frozenset[int]:
        """Return the experts that peers follow from a snapshot on: also what happens to be sent of it."""
        sent = frozenset(self._numbers(selection)).intersection(self._numbers(remote or ()))
        return (sent & follow.wanted | frozenset(follow.all)) - follow.leaving

    def _numbers(self, selection: Selection) -> list[int]:
        count = self._experts.num_experts
        return [layer * count + each for layer, chosen in enumerate(selection) for each in chosen]

    def _choose(
        self, need: Need, rooms: npt.NDArray[np.int64], first: Sequence[int] = ()
    ) -> Selection:
        return select(
            need,
            self._loads,
            rooms,
            self._experts,
            self._options.selective_rule,
            age_limit=self._options.age_limit,
            turn=self._num_complete,
            first=first,
        )

    def _select_local(self, now: ExpertVersions, follow: _Following) -> Selection:
        need = Need.between(self._saved, now)
        if self._takes_all and need.is_missing.ravel()[self._loads.has_units].all():
            return self._choose(need, self._loads.rooms(None))  # the first one is full
        # Experts may be saved again in the iteration of their version: a recovery can leave them so.
        need = replace(need, is_new=np.ones_like(need.is_new))
        rooms = self._rooms(self.local) - self._loads.bytes_of(follow.all)
        return self._choose(need, rooms, follow.all)

    def _remote_rooms(self) -> npt.NDArray[np.int64] | None:
        """Return ``[rank]`` bytes of experts that go to peers; None if these get whatever they lack."""
        if not self._has_peers or self._sent is None or self.remote.num_bytes is None:
            return None
        loads = self._gradients if self._are_followed else self._loads
        return loads.rooms(self.remote.num_bytes)

    def _select_remote(self, saved: ExpertVersions, follow: _Following) -> Selection | None:
        """Return the experts that go to peers, of those that memory will have in these versions."""
        rooms = self._remote_rooms()
        if rooms is None or self._sent is None:
            return None
        rooms = (
            rooms - self._gradients.bytes_of(follow.held) - self._loads.bytes_of(follow.entering)
        )
        return self._choose(Need.between(self._sent, saved), rooms, follow.all)

    def _select_whole(self, iteration: int) -> Selection:
        """Return experts that are not of this iteration yet: all, or as many as memory has room for."""
        is_left = np.ones_like(self._whole)
        if iteration == self._whole_iteration:
            is_left = ~self._whole
        numbers = np.flatnonzero(is_left.ravel() & self._loads.has_units)
        rooms = self._loads.rooms(None) if self._takes_all else self._rooms(self.local)
        used = np.zeros(len(rooms), np.int64)
        return as_selection(self._loads.fill(numbers, rooms, used), self._experts)

    @override
    def is_whole(self, iteration: int) -> bool:
        is_done = bool(self._whole.ravel()[self._loads.has_units].all())
        return is_done and super().is_whole(iteration)

    @property
    @override
    def _num_of_whole(self) -> int:
        return self._most_rounds

    @property
    @override
    def followable(self) -> Collection[UnitId]:
        return self.rotation.units if self._follows else ()

    @property
    @override
    def followed(self) -> Collection[UnitId]:
        return self._next_units

    @override
    def note_begun(self, plan: WindowPlan) -> None:
        memo: SnapshotMemo = plan.memo
        if memo.followed != self._next:
            self._next = memo.followed
            chosen = as_selection(sorted(memo.followed), self._experts)
            units = self._of_this_rank(chosen, self._ledger.routed, self._ledger.gaps)
            self._next_units = frozenset(units)

    @override
    def add_tokens(self, counts: Counts) -> None:
        super().add_tokens(counts)
        tokens = counts[: len(self.counted_layers)] * 1024
        before = tokens if self._rates is None else self._rates
        self._rates = before + (tokens - before) // 10

    @override
    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        memo: SnapshotMemo = plan.memo
        if memo.is_whole:
            if iteration != self._whole_iteration:
                self._whole[:] = False
            for layer, experts in enumerate(memo.selection):
                self._whole[layer, list(experts)] = True
        super().note_complete(plan, iteration)
        self._num_complete += 1
        for budget in (self.local, self.remote):
            budget.note_snapshot()
        self._sent_iteration = -1

    @override
    def note_sent(self, plan: WindowPlan) -> None:
        memo: SnapshotMemo = plan.memo
        if memo.remote is None or self._sent is None:
            self._sent = self._saved
        else:
            self._sent = self._sent.replaced(memo.remote, self._saved)
        self._sent_iteration = self._saved_iteration

    @override
    def _targets(self) -> dict[str, ExpertVersions]:
        found = super()._targets()
        return found if self._sent is None else {**found, "peers": self._sent}

    @override
    def plan_persist(self, *, is_whole: bool = False) -> PersistPlan:
        need = Need.between(self._persisted, self._saved)
        takes_all = is_whole or self._takes_all
        rooms = self._loads.rooms(None) if takes_all else self._rooms(self.local)
        return self._persist(self._choose(need, rooms))

    @override
    def note_measured(self, measured: MeasuredBytes) -> None:
        self._measured = measured

    @override
    def values(self) -> list[int]:
        found, measured = [], self._measured
        if self.local.is_auto:
            can = measured.copied_bytes, measured.committed_bytes
            least = None if None in can else min(can[0] or 0.0, (can[1] or 0.0) * self._interval)
            found.append(0 if least is None else max(1, int(least)))
        if self.remote.is_auto and self._has_peers:
            sent = measured.sent_bytes
            found.append(0 if sent is None else max(1, int(sent * self._interval)))
        if self._follows:
            found.append(int(measured.can_follow))
        return [*found, -self._own_rounds]

    @override
    def agree(self, values: list[int]) -> dict[str, int]:
        *left, rounds = values
        self._most_rounds, changes = -rounds, {}
        if self._follows and not left.pop() and self._can_follow:
            self._can_follow, changes["followed"] = False, 0
        for name, budget in (("local", self.local), ("remote", self.remote)):
            if budget.is_auto and left and budget.agree(left.pop(0)):
                changes[f"{name}_budget_bytes"] = budget.num_bytes or 0
        return changes

    @override
    def resume(self, resumed: Resumed) -> Loss:
        self._sent = None
        self._rates = None
        self._sent_iteration = -1
        self._next = frozenset()
        self._next_units = frozenset()
        return super().resume(resumed)
