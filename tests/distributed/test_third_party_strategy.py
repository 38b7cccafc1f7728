"""A strategy that this file alone knows trains in the real loop, is killed, and recovers without a loss.

`turns` saves layers in turn. The first snapshot of a window holds every n-th layer in full and of the others
what forward needs. The next one holds the next layers in full, and so on. A recovery replays iterations in
between.
"""

from collections.abc import Collection
from dataclasses import dataclass

import pytest

import pretrain_gpt_moe
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import Bounds, ConfigPart, setting
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from moe_ft.strategies.interface import (
    ModelFacts,
    RankFacts,
    SnapshotPlan,
    Strategy,
    StrategyKind,
    WindowPlan,
)
from moe_ft.units import Level, UnitId
from tests.jobs import CheckpointJob, refusal

Digests = list[tuple[str, str]]
TURNS = ("--moe-ft-strategy", "turns")


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsConfig(ConfigPart):
    """Layers in turn: how many snapshots make a window."""

    num_turns: int = setting(
        2,
        "snapshots that together hold every layer",
        bounds=Bounds(at_least=1),
        remedy="Give a number of snapshots",
    )


class TurnsStrategy(Strategy):
    """Takes windows of a fixed number of snapshots, the same ones every time."""

    def __init__(self, units: Collection[UnitId], num_turns: int) -> None:
        self._units, self._num_turns = units, num_turns
        self._whole_iteration: int | None = None

    @property
    def always(self) -> Collection[UnitId]:
        return self._units

    def plan_window(self, iteration: int, *, is_whole: bool = False) -> WindowPlan:
        """Return the same window every time; at the end of a training, everything."""
        if is_whole:
            whole = SnapshotPlan(levels=dict.fromkeys(self._units, Level.FULL))
            return WindowPlan(snapshots=(whole,), key="whole")
        return WindowPlan(snapshots=tuple(map(self._plan, range(self._num_turns))), key="turns")

    def _plan(self, turn: int) -> SnapshotPlan:
        turns = {unit: unit.layer % self._num_turns for unit in self._units}
        return SnapshotPlan(
            levels={
                unit: Level.FULL if own == turn else Level.COMPUTE
                for unit, own in turns.items()
                if own >= turn
            }
        )

    def possible_windows(self) -> list[WindowPlan]:
        return [self.plan_window(0), self.plan_window(0, is_whole=True)]

    def note_complete(self, plan: WindowPlan, iteration: int) -> None:
        """Note where a window of one snapshot was taken."""
        if len(plan.snapshots) == 1:
            self._whole_iteration = iteration

    def is_whole(self, iteration: int) -> bool:
        return self._whole_iteration == iteration


@dataclass(frozen=True, kw_only=True)
class Turns(StrategyKind):
    """Needs a snapshot of every iteration."""

    def check(self, config: MoeFtConfig, model: ModelFacts) -> None:
        """Raise ConfigError if iterations have no snapshot."""
        if config.strategy.interval != "1":
            raise ConfigError(
                f"--moe-ft-interval={config.strategy.interval} must be 1 with turns. Leave it out."
            )

    def build(self, config: MoeFtConfig, facts: RankFacts) -> Strategy:
        options: TurnsConfig = self.options_in(config)
        return TurnsStrategy(facts.catalog.units, options.num_turns)


KIND = Turns(name="turns", options=TurnsConfig, replays=True)


def train(flags: list[str]) -> None:
    """Run the program that knows the strategy."""
    registry.register(KIND)
    pretrain_gpt_moe.main(flags)


@pytest.mark.usefixtures("settled")
def test_killed_ranks_recover_a_window_from_memory_and_end_as_without_a_failure(
    job: CheckpointJob, expected: Digests
) -> None:
    job.train = train
    job.run_with_faults("kill:1@5:backward", flags=TURNS)
    assert job.recovered() == [(3, 4)]
    for rank in range(2):
        (line,) = job.events("recovery", rank)
        assert set(line["sources"]) == {"memory"}
        assert (line["lost_tokens"], line["replayed_iterations"]) == (0, 1)
    assert job.digests() == expected


@pytest.mark.rest
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--moe-ft-num-turns=0",
            "--moe-ft-num-turns=0 must be at least 1. Give a number of snapsh",
        ),
        ("--moe-ft-interval=2", "--moe-ft-interval=2 must be 1 with turns. Leave it out"),
    ],
)
def test_values_that_the_strategy_does_not_allow_are_refused(
    job: CheckpointJob, flag: str, message: str
) -> None:
    job.train = train
    assert message in refusal(job.run(*TURNS, flag))


@pytest.mark.rest
def test_program_that_does_not_know_the_strategy_refuses_its_name(job: CheckpointJob) -> None:
    assert "--moe-ft-strategy=turns must be one of none, " in refusal(job.run(*TURNS))
