"""The strategy partial in the registry: its traits, the division of experts, and how a rank builds it."""

import pytest

from moe_ft.errors import ConfigError
from moe_ft.strategies.interface import Counting
from moe_ft.strategies.partial.plan import PARTIAL
from moe_ft.strategies.partial.selection import PartialConfig
from moe_ft.units import UnitPart
from tests.unit.moe_ft.strategies.stage import CATALOG, EXPERTS, OTHERS, build, config_of, facts_of


def test_recoveries_lose_tokens_which_are_counted() -> None:
    assert not PARTIAL.is_exact and not PARTIAL.replays and PARTIAL.leaves_out_frozen
    assert PARTIAL.counting(config_of(PARTIAL)) is Counting.TOKENS


@pytest.mark.parametrize(
    ("options", "sharding", "division"),
    [
        (PartialConfig(), "equal", "--moe-ft-partial-covers both"),
        (PartialConfig(), "adaptive", "--moe-ft-partial-covers both"),
        (PartialConfig(), "none", "--moe-ft-partial-covers both --moe-ft-sharding none"),
        (
            PartialConfig(master_always_full=True),
            "equal",
            "--moe-ft-partial-covers both --moe-ft-master-always-full",
        ),
    ],
)
def test_division_names_the_flags_that_decide_where_experts_lie(
    options: PartialConfig, sharding: str, division: str
) -> None:
    # Files hold it: a recovery compares it with that of its own flags.
    assert PARTIAL.division(config_of(PARTIAL, options, sharding=sharding)) == division


@pytest.mark.parametrize(("selection", "is_able"), [("sequential", True), ("load-aware", False)])
def test_only_a_selection_that_is_known_in_advance_divides_adaptively(
    selection: str, is_able: bool
) -> None:
    config = config_of(PARTIAL, PartialConfig(selection=selection))
    assert PARTIAL.can_shard_adaptively(config) is is_able


def test_experts_rotate_and_everything_else_does_not() -> None:
    strategy = build(PARTIAL)
    assert set(strategy.always) == set(OTHERS)
    assert strategy.rotation.units == set(EXPERTS)
    assert strategy.counted_layers == ("layer.0", "layer.1")


def test_master_weights_that_are_always_saved_do_not_rotate() -> None:
    strategy = build(PARTIAL, PartialConfig(master_always_full=True))
    assert {unit.part for unit in strategy.rotation.units} == {UnitPart.MOMENTS}
    assert {unit.part for unit in strategy.always} == {UnitPart.WHOLE, UnitPart.WEIGHTS}


def test_replicated_state_is_divided_for_each_snapshot_with_adaptive_sharding_only() -> None:
    for sharding, shares in (("equal", None), ("adaptive", (500,))):
        config = config_of(PARTIAL, PartialConfig(k_snapshot="1"), sharding=sharding)
        (snapshot,) = PARTIAL.build(config, facts_of(CATALOG)).plan_window(0).snapshots
        assert snapshot.shares == shares


def test_storage_cannot_be_fed_more_experts_than_snapshots_hold() -> None:
    with pytest.raises(
        ConfigError,
        match="--moe-ft-k-persist=3 must be at most --moe-ft-k-snapshot=2: storage is fed from",
    ):
        PartialConfig(k_snapshot="2", k_persist=3).validate(world_size=4)
    for options in (
        PartialConfig(),
        PartialConfig(k_snapshot="2", k_persist=2),
        PartialConfig(k_snapshot="auto", k_persist=8),
    ):
        options.validate(world_size=4)
