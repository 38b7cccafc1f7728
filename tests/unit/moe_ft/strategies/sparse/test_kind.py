"""The strategy sparse in the registry: its traits, and how a rank builds it."""

import pytest

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.errors import ConfigError
from moe_ft.strategies.interface import Counting
from moe_ft.strategies.sparse.plan import SPARSE
from moe_ft.strategies.sparse.strategy import SparseConfig
from moe_ft.strategies.sparse.windows import MEASURES
from tests.unit.moe_ft.strategies.stage import CATALOG, OTHERS, Catalog, build, config_of, facts_of


@pytest.mark.parametrize(
    ("order", "counting"),
    [
        ("count", Counting.TOKENS),
        ("decayed", Counting.TOKENS),
        ("soft-count", Counting.PROBABILITIES),
    ],
)
def test_measure_of_popularity_decides_what_routers_count(order: str, counting: Counting) -> None:
    assert SPARSE.counting(config_of(SPARSE, SparseConfig(unit_order=order))) is counting


def test_windows_are_as_long_as_the_flag_says_and_hold_all_units() -> None:
    strategy = build(SPARSE, SparseConfig(window="3"))
    assert len(strategy.plan_window(0).snapshots) == 3
    assert set(strategy.always) == set(CATALOG.units)
    assert strategy.counted_layers == ("layer.0", "layer.1")


def test_model_without_experts_counts_nothing() -> None:
    catalog = Catalog(dict.fromkeys(OTHERS, 100))
    config = config_of(SPARSE, SparseConfig(window="2"))
    strategy = SPARSE.build(config, facts_of(catalog, num_experts=0))
    assert strategy.counted_layers == ()
    assert len(strategy.plan_window(0).snapshots) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SparseConfig(window="-2"), "--moe-ft-window=-2 must be a whole number, at least 1"),
        (SparseConfig(popularity_decay=-0.1), "--moe-ft-popularity-decay=-0.1 must be at least 0"),
        (
            SparseConfig(reorder_change=-0.1),
            "--moe-ft-reorder-change=-0.1 must be at least 0. Write 0.1 for ten percent",
        ),
        (
            SparseConfig(reorder_fraction=1.1),
            "--moe-ft-reorder-fraction=1.1 must be between 0 and 1. Write 0.25 for a quarter",
        ),
    ],
)
def test_wrong_setting_of_windows_is_named_with_its_rule(
    config: SparseConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.validate(world_size=4)


@pytest.mark.parametrize(
    "config",
    [
        SparseConfig(),
        SparseConfig(window="1"),
        SparseConfig(max_window=1),
        SparseConfig(window="12"),  # auto's limit does not limit a fixed window
        SparseConfig(unit_order="decayed", popularity_decay=0.0),
        SparseConfig(reorder_change=0.0, reorder_fraction=0.0),
        SparseConfig(reorder_change=2.0, reorder_fraction=1.0),
        *(SparseConfig(unit_order=order) for order in MEASURES),
    ],
)
def test_settings_at_the_border_of_their_range_are_accepted(config: SparseConfig) -> None:
    sparse = StrategyConfig(strategy="sparse")
    MoeFtConfig(strategy=sparse, options={"sparse": config}).validate(world_size=4)
