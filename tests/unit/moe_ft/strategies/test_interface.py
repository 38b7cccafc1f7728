"""Every strategy keeps the promises of the interface, above all that its questions change nothing."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.config.fields import ConfigPart
from moe_ft.strategies.interface import (
    JobLoss,
    MeasuredBytes,
    Resumed,
    Strategy,
    StrategyKind,
    WindowPlan,
)
from moe_ft.strategies.partial.selection import PartialConfig
from moe_ft.strategies.registry import kinds
from moe_ft.strategies.selective.selection import SelectiveConfig
from moe_ft.strategies.sparse.strategy import SparseConfig
from moe_ft.units import Level
from tests.unit.moe_ft.strategies.stage import CATALOG, NUM_EXPERTS, NUM_LAYERS, build

OPTIONS: dict[str, tuple[ConfigPart, ...]] = {
    "partial": (
        PartialConfig(k_snapshot="1"),
        PartialConfig(k_snapshot="2", k_persist=2, selection="load-aware", dynamic_k=True),
        PartialConfig(k_snapshot="auto", master_always_full=True),
    ),
    "selective": (
        SelectiveConfig(local_budget="11000", remote_budget="10500", age_limit=3),
        SelectiveConfig(local_budget="12000", selective_rule="paper"),
    ),
    "sparse": (
        SparseConfig(window="3"),
        SparseConfig(max_window=4, unit_order="decayed"),
        SparseConfig(reorder_fraction=0.01, reorder_change=0.01),
    ),
}
STRATEGIES = [
    pytest.param(kind, options, id=f"{kind.name}-{number}")
    for kind in kinds()
    for number, options in enumerate((None, *OPTIONS.get(kind.name, ())))
]


class Run:
    """A run of one rank that is alone, and agrees with itself. What a step cannot do, it leaves out."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy, self.iteration = strategy, 0
        self.begun: list[WindowPlan] = []
        self.complete: list[WindowPlan] = []

    def train(self, seed: int) -> None:
        """Train an iteration."""
        self.iteration += 1
        if self.strategy.counted_layers:
            shape = (NUM_LAYERS, NUM_EXPERTS)
            self.strategy.add_tokens(np.random.default_rng(seed).integers(0, 99, shape))
        budget = None if seed % 5 == 0 else float(1000 + seed % 9000)
        self.strategy.note_measured(
            MeasuredBytes(
                copied_bytes=budget, flow_bytes=budget, committed_bytes=budget, sent_bytes=budget
            )
        )
        self.strategy.agree(self.strategy.values())

    def begin(self, seed: int) -> None:
        """Begin a window; an earlier one that is not complete is given up."""
        plan = self.strategy.plan_window(self.iteration, is_whole=seed % 7 == 0)
        self.strategy.note_begun(plan)
        self.begun = [plan]

    def end(self, seed: int) -> None:
        """Have all ranks complete the window that was begun."""
        for plan in self.begun:
            self.iteration += len(plan.snapshots) - 1
            self.strategy.note_complete(plan, self.iteration)
            self.complete.append(plan)
        self.begun = []

    def persist(self, seed: int) -> None:
        """Write a checkpoint, which perhaps fails."""
        plan = self.strategy.plan_persist(is_whole=seed % 7 == 0)
        if seed % 3:
            self.strategy.note_persisted(plan)

    def recover(self, seed: int) -> None:
        """Go back to the last complete window."""
        progress = self.complete[-1].snapshots[-1].progress if self.complete else None
        loss = self.strategy.resume(
            Resumed(
                iteration=self.iteration,
                window=1 + seed % 3,
                progress=None if progress is None else progress(),
            )
        )
        self.strategy.settle_losses([loss])

    def ask(self) -> list[Any]:
        """Return the answers to all questions, comparable."""
        strategy = self.strategy
        windows = [
            *(
                strategy.plan_window(self.iteration, is_whole=is_whole)
                for is_whole in (False, True)
            ),
            *strategy.possible_windows(),
        ]
        return [
            [(window, [_progress(each) for each in window.snapshots]) for window in windows],
            *(strategy.plan_persist(is_whole=is_whole).units for is_whole in (False, True)),
            [strategy.is_whole(iteration) for iteration in range(self.iteration + 2)],
            strategy.values(),
            (list(strategy.always), strategy.rotation.units, strategy.most_rotating),
            (strategy.rotation.is_empty, strategy.counted_layers, strategy.memory_margin),
        ]


def _progress(snapshot: Any) -> Any:
    return None if snapshot.progress is None else snapshot.progress()


def answers(run: Run) -> list[Any]:
    """Return the answers without functions, which are only equal to themselves."""
    found = run.ask()
    found[0] = [
        (
            [(each.levels, each.rotating, each.shares) for each in window.snapshots],
            (window.key, window.facts, window.hint),
            progress,
        )
        for window, progress in found[0]
    ]
    return found


STEPS = st.tuples(
    st.sampled_from(["train", "begin", "end", "persist", "recover"]), st.integers(0, 10**6)
)


@pytest.mark.parametrize(("kind", "options"), STRATEGIES)
@settings(max_examples=40)
@given(st.lists(STEPS, max_size=12), st.integers(1, 3))
def test_questions_change_no_later_answer_however_often_and_whenever_they_are_asked(
    kind: StrategyKind, options: ConfigPart | None, steps: list[tuple[str, int]], times: int
) -> None:
    quiet, asked = (Run(build(kind, options)) for _ in range(2))
    for step, seed in steps:
        for _ in range(times):
            asked.ask()
        getattr(quiet, step)(seed)
        getattr(asked, step)(seed)
    assert answers(quiet) == answers(asked)


@pytest.mark.parametrize(("kind", "options"), STRATEGIES)
@settings(max_examples=40)
@given(st.lists(STEPS, max_size=8))
def test_every_window_holds_what_it_always_holds_in_full_at_some_snapshot(
    kind: StrategyKind, options: ConfigPart | None, steps: list[tuple[str, int]]
) -> None:
    run = Run(build(kind, options))
    for step, seed in steps:
        getattr(run, step)(seed)
    always = set(run.strategy.always)
    for is_whole in (False, True):
        snapshots = run.strategy.plan_window(run.iteration, is_whole=is_whole).snapshots
        full = [
            unit for each in snapshots for unit, level in each.levels.items() if level is Level.FULL
        ]
        assert sorted(full) == sorted(always)
        assert set(snapshots[0].levels) == always


@pytest.mark.parametrize(("kind", "options"), STRATEGIES)
def test_what_always_and_rotating_leave_out_is_nothing(
    kind: StrategyKind, options: ConfigPart | None
) -> None:
    strategy = build(kind, options)
    held = [*strategy.always, *strategy.rotation.units]
    assert len(held) == len(set(held))
    assert {(unit.kind, unit.layer, unit.expert) for unit in held} == {
        (unit.kind, unit.layer, unit.expert) for unit in CATALOG.units
    }
    assert strategy.rotation.is_empty == (not strategy.rotation.units)


@pytest.mark.parametrize(("kind", "options"), STRATEGIES)
def test_windows_after_the_end_of_training_come_to_hold_everything(
    kind: StrategyKind, options: ConfigPart | None
) -> None:
    run = Run(build(kind, options))
    for number in range(3):
        run.train(number)
        run.begin(1)
        run.end(1)
    for number in itertools.count():
        assert number < 2 * NUM_EXPERTS, "windows never end"
        run.begin(0)  # the last ones
        run.end(0)
        if run.strategy.is_whole(run.iteration):
            return


@pytest.mark.parametrize(("kind", "options"), STRATEGIES)
def test_recovery_costs_something_with_strategies_that_are_not_exact_only(
    kind: StrategyKind, options: ConfigPart | None
) -> None:
    strategy = build(kind, options)
    loss = strategy.resume(Resumed(iteration=4, window=2))
    cost = strategy.settle_losses([loss])
    assert (loss is None) == (cost is None) == kind.is_exact
    fields = (cost or JobLoss()).fields()
    assert (fields["lost_tokens"], fields["plt"]) == (0, 0.0)
