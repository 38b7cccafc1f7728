"""Simulated training runs with partial snapshots, faults and a played-back routing trace.

Accounting is that of moe_ft/planning/lost_tokens.py and of the strategy `partial`: a recovery at iteration q
takes the routed tokens back to those of q, and the versions that experts get decide what they lack. These are
then also the versions in memory. Snapshots and persists are complete at the end of their iteration; at
iteration 0 memory and storage hold everything. A run has either process faults or node faults: a Poisson
process in executed iterations, repeated ones included. All settings see the same faults.

Many runs are simulated at once, one per row. The rules of strategies/partial/selection.py choose for one run.
This file has the same rules for all runs at once; `check_against_planning` compares the two.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.routing_trace import Faults
from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.planning.lost_tokens import expected_plt, next_k, plt
from moe_ft.strategies.partial.selection import (
    select_load_aware,
    select_sequential,
    select_to_persist,
)

EP_SIZE = 16
NUM_NODES = 4
PERSIST_INTERVAL = 10  # snapshots
PLT_LIMIT = 0.0375
MEANS = (50, 200, 1000)

Mask = npt.NDArray[np.bool_]
Percent = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Contents of snapshots, and the kind of faults.

    Attributes:
        k: experts per layer in a snapshot, and in a persist unless `k_persist` is given.
        interval: iterations between snapshots.
        is_load_aware: instead of sequential.
        loses_node: a fault takes a node with its memory, instead of a process.
        k_persist: experts per layer in a persist, 0 for k.
        limit_of: Dynamic-K: "each k" has its share of the limit, "all k" have one; "" for a k that is fixed.
    """

    k: int
    interval: int
    is_load_aware: bool = False
    loses_node: bool = False
    k_persist: int = 0
    limit_of: str = ""


def distance_from(experts: ExpertLayout, cursors: Counts) -> Counts:
    """Return ``[run, layer, expert]`` how far behind the cursors experts are in interleaved order."""
    position = np.empty(experts.num_experts, dtype=np.int64)
    position[[experts.expert_at(each) for each in range(experts.num_experts)]] = np.arange(
        experts.num_experts
    )
    return (position - cursors[:, :, None]) % experts.num_experts


def take_most_unsaved(distance: Counts, unsaved: Counts, k: Counts) -> Mask:
    """Return what `select_load_aware` selects in every run; ``k`` is ``[run]``."""
    num_experts = unsaved.shape[2]
    keys = unsaved * num_experts - distance
    ranking = np.sort(keys, axis=2)
    least = np.take_along_axis(ranking, (num_experts - k)[:, None, None], axis=2)
    mask: Mask = keys >= least
    return mask


def take_to_persist(
    distance: Counts, saved_at: Counts, persisted_at: Counts, unpersisted: Counts | None, k: Counts
) -> Mask:
    """Return what `select_to_persist` selects in every run; ``k`` is ``[run]``."""
    has_nothing_new = saved_at <= persisted_at
    by_load = [] if unpersisted is None else [-unpersisted]
    order = np.lexsort([distance, -saved_at, persisted_at, *by_load, has_nothing_new])
    rank = np.argsort(order, axis=2)
    return (rank < k[:, None, None]) & ~has_nothing_new


def check_against_planning(experts: ExpertLayout) -> None:
    """Compare the rules for many runs with those of the package, on states with many equals."""
    generator = np.random.default_rng(0)
    shape = (8, experts.num_layers, experts.num_experts)
    k = generator.integers(1, experts.num_experts + 1, size=shape[0])
    cursors = generator.integers(experts.num_experts, size=shape[:2])
    first, second = (generator.integers(5, size=shape) for _ in range(2))
    tokens = generator.integers(-2, 3, size=shape)  # negative: versions from beyond the iteration
    distance = distance_from(experts, cursors)
    masks = (
        distance < k[:, None, None],
        take_most_unsaved(distance, tokens, k),
        take_to_persist(distance, first, second, None, k),
        take_to_persist(distance, first, second, tokens, k),
    )
    for run, num in enumerate(k.tolist()):
        at, saved_at, persisted_at = cursors[run].tolist(), first[run], second[run]
        choices = (
            select_sequential(experts, at, num),
            select_load_aware(experts, at, tokens[run], num),
            select_to_persist(experts, at, saved_at, persisted_at, None, num),
            select_to_persist(experts, at, saved_at, persisted_at, tokens[run], num),
        )
        for mask, choice in zip(masks, choices, strict=True):
            assert [np.flatnonzero(layer).tolist() for layer in mask[run]] == [*map(list, choice)]


class Runs:
    """Training runs with the same setting, side by side; rows are runs.

    A period is what is between two snapshots. Every run stands at the end of a period: a fault within one
    takes it back to the end of this one or, if a node is lost, of the last that was persisted.
    """

    def __init__(self, setting: Setting, faults: Faults, routed: Counts) -> None:
        self.setting, self.faults = setting, faults
        self.num_iterations = len(routed) - 1
        self.tokens_per_iteration = round(
            float(routed[-1].sum(axis=1).mean()) / self.num_iterations
        )
        ends = np.append(np.arange(0, self.num_iterations, setting.interval), self.num_iterations)
        self.num_periods = len(ends) - 1
        # The row behind the last is for runs that do not go on.
        self.lengths = np.append(np.diff(ends), 0)
        self.routed_at = routed[ends]
        self.experts = ExpertLayout(
            num_layers=routed.shape[1], num_experts=routed.shape[2], ep_size=EP_SIZE
        )
        self.node_of = np.array(
            [self.experts.rank_of(e) * NUM_NODES // EP_SIZE for e in range(routed.shape[2])]
        )
        num_runs = len(faults.times)
        self.period = np.zeros(num_runs, dtype=np.int64)
        self.clock = np.zeros(num_runs)
        self.num_faults = np.zeros(num_runs, dtype=np.int64)
        self.k = np.full(num_runs, setting.k)
        self.num_copied = np.zeros(num_runs, dtype=np.int64)  # experts per layer, all snapshots
        self.num_snapshots = np.zeros(num_runs, dtype=np.int64)
        self.accumulated = np.zeros(num_runs)  # PLT by the recoveries so far
        cursors = self.experts.first_cursors(setting.k)
        self.cursors = np.tile(np.array(cursors, dtype=np.int64), (num_runs, 1))
        # Two counters of the experts' versions and of the live state, whose routed one is of its period.
        shape = (num_runs, *routed.shape[1:])
        self.memory, self.memory_lost, self.storage, self.storage_lost, self.lost, self.repeated = (
            np.zeros(shape, dtype=np.int64) for _ in range(6)
        )
        self.saved_at, self.persisted_at = (np.zeros(shape, dtype=np.int64) for _ in range(2))
        self.persisted_period = np.zeros(num_runs, dtype=np.int64)
        self.persisted_cursors = self.cursors.copy()

    def finish(self) -> "Runs":
        """Train all runs to their end."""
        while (is_active := self.period < self.num_periods).any():
            self._train_period(is_active)
        return self

    def _train_period(self, is_active: Mask) -> None:
        lengths = self.lengths[self.period]
        fault_time = self.faults.times[np.arange(len(self.period)), self.num_faults]
        fails = is_active & (self.clock + lengths > fault_time)
        goes_on = is_active & ~fails
        self.clock = np.where(fails, fault_time, self.clock + lengths)
        self.period += goes_on
        self._snapshot(goes_on)
        if self.setting.loses_node:
            self._persist(np.flatnonzero(goes_on & (self.period % PERSIST_INTERVAL == 0)))
        if fails.any():
            self._recover(np.flatnonzero(fails))

    def _snapshot(self, goes_on: Mask) -> None:
        distance = distance_from(self.experts, self.cursors)
        routed = self.routed_at[self.period]
        if self.setting.is_load_aware:
            unsaved = routed - self.lost - (self.memory - self.memory_lost)
            mask = take_most_unsaved(distance, unsaved, self.k)
        else:
            mask = distance < self.k[:, None, None]
        mask &= goes_on[:, None, None]
        np.copyto(self.memory, routed, where=mask)
        np.copyto(self.memory_lost, self.lost, where=mask)
        if self.setting.loses_node:
            np.copyto(self.saved_at, self.period[:, None, None], where=mask)
        taken = self.k * goes_on
        self.cursors = (self.cursors + taken[:, None]) % self.experts.num_experts
        self.num_copied += taken
        self.num_snapshots += goes_on

    def _persist(self, runs: Counts) -> None:
        if not len(runs):
            return
        saved_at, persisted_at = self.saved_at[runs], self.persisted_at[runs]
        saved = self.memory[runs] - self.memory_lost[runs]
        unpersisted = saved - (self.storage[runs] - self.storage_lost[runs])
        mask = take_to_persist(
            distance_from(self.experts, self.cursors[runs]),
            saved_at,
            persisted_at,
            unpersisted if self.setting.is_load_aware else None,
            np.full(len(runs), self.setting.k_persist) if self.setting.k_persist else self.k[runs],
        )
        self.storage[runs] = np.where(mask, self.memory[runs], self.storage[runs])
        self.storage_lost[runs] = np.where(mask, self.memory_lost[runs], self.storage_lost[runs])
        self.persisted_at[runs] = np.where(mask, saved_at, persisted_at)
        self.persisted_period[runs] = self.period[runs]
        self.persisted_cursors[runs] = self.cursors[runs]

    def _recover(self, runs: Counts) -> None:
        if self.setting.loses_node:
            self._lose_node(runs)
        routed = self.routed_at[self.period[runs]]
        # Counts do for gaps here: with one kind of faults no run goes back behind an earlier loss.
        behind = routed - self.memory[runs]
        self.lost[runs] = self.memory_lost[runs] + np.maximum(behind, 0)
        self.repeated[runs] += np.maximum(-behind, 0)
        self.num_faults[runs] += 1
        if self.setting.limit_of:
            self._adapt_k(runs)

    def _lose_node(self, runs: Counts) -> None:
        """Go back to the newest persist; the experts of the lost node get their versions on storage."""
        node = self.faults.nodes[runs, self.num_faults[runs]]
        is_gone = (self.node_of == node[:, None])[:, None, :]
        self.memory[runs] = np.where(is_gone, self.storage[runs], self.memory[runs])
        self.memory_lost[runs] = np.where(is_gone, self.storage_lost[runs], self.memory_lost[runs])
        self.period[runs] = self.persisted_period[runs]
        self.cursors[runs] = self.persisted_cursors[runs]
        # Versions from beyond: what is saved from here on counts as newer.
        iteration = self.period[runs][:, None, None]
        saved_at = np.where(is_gone, self.persisted_at[runs], self.saved_at[runs])
        self.saved_at[runs] = np.minimum(saved_at, iteration)
        self.persisted_at[runs] = np.minimum(self.persisted_at[runs], iteration)

    def _adapt_k(self, runs: Counts) -> None:
        planned = self.num_iterations * self.tokens_per_iteration
        num_experts, interval = self.experts.num_experts, self.setting.interval

        def expected(k: int) -> float:
            return expected_plt(num_experts, k, interval, self.tokens_per_iteration, planned)

        for run in runs.tolist():
            k, lost = int(self.k[run]), plt(self.lost[run], planned)
            last, self.accumulated[run] = lost - self.accumulated[run], lost
            if self.setting.limit_of == "each k":
                self.k[run] = next_k(k, num_experts, lost, last, expected, PLT_LIMIT)
            else:
                while k < num_experts and lost + expected(k) > PLT_LIMIT:
                    k = min(2 * k, num_experts)
                self.k[run] = k

    def plt_percent(self) -> npt.NDArray[np.float64]:
        """Return ``[mean between faults, seed]``."""
        planned = self.num_iterations * self.tokens_per_iteration
        values = [100 * plt(lost, planned) for lost in self.lost]
        return np.array(values).reshape(len(MEANS), -1)

    def repeated_percent(self) -> npt.NDArray[np.float64]:
        """Return ``[mean between faults]``, of the tokens of the whole run, the median over seeds."""
        planned = self.num_iterations * self.tokens_per_iteration
        values = np.array([100 * plt(repeated, planned) for repeated in self.repeated])
        medians: Percent = np.median(self.by_mean(values), axis=1)
        return medians

    def share_percent(self, is_hot: Mask) -> npt.NDArray[np.float64]:
        """Return ``[mean between faults]`` how much of all lost tokens some experts lost."""
        lost = self.lost.reshape(len(MEANS), -1, *is_hot.shape).sum(axis=1)
        total = lost.sum(axis=(1, 2))
        return 100 * (lost * is_hot).sum(axis=(1, 2)) / np.where(total, total, 1)

    def by_mean(self, values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
        """Return values of the runs as ``[mean between faults, seed]``."""
        return values.astype(np.float64).reshape(len(MEANS), -1)
