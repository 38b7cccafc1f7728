"""Settings that all strategies share."""

import pytest

from moe_ft.config.strategy import StrategyConfig


@pytest.mark.parametrize(("name", "is_on"), [("none", False), ("dense", True), ("any", True)])
def test_every_name_but_one_takes_checkpoints(name: str, is_on: bool) -> None:
    assert StrategyConfig(strategy=name).is_on is is_on


@pytest.mark.parametrize(("text", "interval"), [("auto", None), ("1", 1), ("250", 250)])
def test_interval_is_a_number_or_automatic(text: str, interval: int | None) -> None:
    assert StrategyConfig(interval=text).interval_iterations == interval
