"""Options of partial experts: a wrong one is named with its flag, its value, the rule and the remedy."""

import pytest

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.strategies.partial.config import PartialConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            PartialConfig(k_snapshot="0"),
            "--moe-ft-k-snapshot=0 must be a whole number, at least 1, or auto",
        ),
        (
            PartialConfig(k_snapshot="all"),
            "--moe-ft-k-snapshot=all must be a whole number, at least 1, or auto",
        ),
        (
            PartialConfig(k_persist=0),
            "--moe-ft-k-persist=0 must be at least 1: an expert that never goes to storage is lost",
        ),
        (
            PartialConfig(k_snapshot="2", k_persist=3),
            "--moe-ft-k-persist=3 must be at most --moe-ft-k-snapshot=2: storage is fed from",
        ),
        (
            PartialConfig(selection="random"),
            "--moe-ft-selection=random must be one of sequential, load-aware",
        ),
        (
            PartialConfig(plt_limit=0.0),
            "--moe-ft-plt-limit=0.0 must be a fraction between 0 and 1. Write 0.0375 for 3.75 perc",
        ),
        (
            PartialConfig(plt_limit=float("nan")),
            "--moe-ft-plt-limit=nan must be a fraction",
        ),
    ],
)
def test_wrong_option_is_named_with_its_rule(options: PartialConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.validate(world_size=4)
    with pytest.raises(ConfigError, match=message):
        MoeFtConfig(options={"any": options}).validate(world_size=4)


@pytest.mark.parametrize(
    "options",
    [
        PartialConfig(),
        PartialConfig(k_snapshot="2", k_persist=2),
        PartialConfig(k_snapshot="auto", k_persist=8),
    ],
)
def test_options_that_go_together_are_accepted(options: PartialConfig) -> None:
    options.validate(world_size=4)


@pytest.mark.parametrize(("text", "k"), [("auto", None), ("1", 1), ("16", 16)])
def test_experts_in_a_snapshot_are_a_number_or_automatic(text: str, k: int | None) -> None:
    assert PartialConfig(k_snapshot=text).k_in_memory == k
