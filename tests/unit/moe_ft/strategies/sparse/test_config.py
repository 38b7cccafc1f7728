"""Options of sparse windows: a wrong one is named with its flag, its value, the rule and the remedy."""

import pytest

from moe_ft.config.config import MoeFtConfig, StrategyConfig
from moe_ft.errors import ConfigError
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.popularity import MEASURES

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            SparseConfig(window="0"),
            "--moe-ft-window=0 must be a whole number, at least 1, or auto. Give one of them",
        ),
        (SparseConfig(window="-2"), "--moe-ft-window=-2 must be a whole number, at least 1"),
        (SparseConfig(window="2.0"), "--moe-ft-window=2.0 must be a whole number, at least 1"),
        (
            SparseConfig(window=""),
            "--moe-ft-window= (must be a whole number, at least 1, or auto|is empty)",
        ),
        (SparseConfig(window="Auto"), "--moe-ft-window=Auto must be a whole number, at least 1"),
        (
            SparseConfig(max_window=0),
            "--moe-ft-max-window=0 must be at least 1. Give a number of snapshots",
        ),
        (SparseConfig(max_window=-1), "--moe-ft-max-window=-1 must be at least 1"),
        (
            SparseConfig(unit_order="random"),
            "--moe-ft-unit-order=random must be one of count, soft-count, decayed",
        ),
        (
            SparseConfig(popularity_decay=1.0),
            "--moe-ft-popularity-decay=1.0 must be at least 0 and less than 1. Write 0.9",
        ),
        (SparseConfig(popularity_decay=-0.1), "--moe-ft-popularity-decay=-0.1 must be at least 0"),
        (SparseConfig(popularity_decay=NAN), "--moe-ft-popularity-decay=nan must be at least 0"),
        (
            SparseConfig(reorder_change=-0.1),
            "--moe-ft-reorder-change=-0.1 must be at least 0. Write 0.1 for ten percent",
        ),
        (SparseConfig(reorder_change=NAN), "--moe-ft-reorder-change=nan"),
        (
            SparseConfig(reorder_fraction=1.1),
            "--moe-ft-reorder-fraction=1.1 must be between 0 and 1. Write 0.25 for a quarter",
        ),
        (SparseConfig(reorder_fraction=-0.1), "--moe-ft-reorder-fraction=-0.1 must be between 0"),
        (SparseConfig(reorder_fraction=NAN), "--moe-ft-reorder-fraction=nan must be between 0"),
        (SparseConfig(reorder_fraction=INFINITY), "--moe-ft-reorder-fraction=inf must be between"),
    ],
)
def test_wrong_setting_of_windows_is_named_with_its_rule(
    config: SparseConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config.validate(world_size=4)
    with pytest.raises(ConfigError, match=message):
        MoeFtConfig(options={"sparse": config}).validate(world_size=4)


@pytest.mark.parametrize(
    "config",
    [
        SparseConfig(),
        SparseConfig(window="1", max_window=1),
        SparseConfig(window="12"),  # auto's limit does not limit a fixed window
        SparseConfig(popularity_decay=0.0, reorder_change=0.0, reorder_fraction=0.0),
        SparseConfig(reorder_change=2.0, reorder_fraction=1.0),
        *(SparseConfig(unit_order=order) for order in MEASURES),
    ],
)
def test_settings_at_the_border_of_their_range_are_accepted(config: SparseConfig) -> None:
    sparse = StrategyConfig(strategy="sparse")
    MoeFtConfig(strategy=sparse, options={"sparse": config}).validate(world_size=4)


@pytest.mark.parametrize(("text", "window"), [("auto", None), ("1", 1), ("16", 16)])
def test_window_is_a_number_or_automatic(text: str, window: int | None) -> None:
    assert SparseConfig(window=text).window_snapshots == window


@pytest.mark.parametrize("order", MEASURES)
def test_only_one_order_sums_probabilities(order: str) -> None:
    assert SparseConfig(unit_order=order).is_soft == (order == "soft-count")
