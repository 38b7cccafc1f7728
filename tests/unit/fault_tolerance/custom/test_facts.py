"""Facts of a run are checked, and what is kept as JSON comes back as it was."""

from typing import Any

import pytest

from megatron.fault_tolerance.custom.facts import RunFacts, copy_of_json
from moe_ft.errors import ConfigError


def facts(**changes: Any) -> RunFacts:
    numbers = {"train_iterations": 9, "samples_per_iteration": 4, "sequence_length": 32}
    return RunFacts(**{"settings": {"seed": 1}, **numbers, **changes})


def test_facts_of_an_ordinary_run_are_accepted() -> None:
    facts(iteration=3, consumed_samples=12, replay_settings={"dropout": 0.5}).check()


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("train_iterations", 0, 1),
        ("samples_per_iteration", 1.5, 1),
        ("sequence_length", True, 1),
        ("iteration", -1, 0),
        ("consumed_samples", None, 0),
    ],
)
def test_number_out_of_its_range_is_refused(name: str, value: Any, least: int) -> None:
    with pytest.raises(ConfigError, match=f"RunFacts.{name}={value} must be .* at least {least}"):
        facts(**{name: value}).check()


@pytest.mark.parametrize("name", ["settings", "replay_settings"])
def test_settings_that_no_file_can_hold_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"RunFacts.{name} cannot be kept as JSON: Object of"):
        facts(**{name: {"data": {1, 2}}}).check()


def test_copy_shares_nothing_with_the_original() -> None:
    values = {"epoch": 1, "shards": ["a", None, True], "rates": {"x": 0.5}}
    copied = copy_of_json("state", values)
    assert copied == values
    values["shards"].append("b")  # type: ignore[union-attr, attr-defined]
    assert copied["shards"] == ["a", None, True]


@pytest.mark.parametrize(
    "values",
    [{"tuple": (1, 2)}, {1: "a"}],
)
def test_values_that_would_change_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match="state would not come back from JSON as it is. Use"):
        copy_of_json("state", values)


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes"])
def test_values_that_json_lacks_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="state cannot be kept as JSON: "):
        copy_of_json("state", {"value": value})
