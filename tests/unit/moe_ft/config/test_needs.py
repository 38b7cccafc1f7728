"""Settings that change nothing without others: every flag is tried, and those without a need are listed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import pytest

from moe_ft.config.fields import flag_of
from moe_ft.config.flags import config_from_settings, part_types
from moe_ft.config.rules import unmet_needs
from moe_ft.errors import ConfigError
from moe_ft.strategies.registry import names, option_types

# They change something whatever the others are, or name the job and its places.
WITHOUT_NEEDS = {
    *(
        "strategy",
        "allow_untested",
        "check_iterations",
        "check_weights",
        "event_log",
        "hang_limit",
        "log_format",
        "fault_report_grace_s",
        "expert_slots",
    ),
    *("memory_dir", "job_id", "node_id"),
}
# Values of texts other than their defaults, where any would not do.
VALUES: Mapping[str, Any] = {
    "allow_untested": "repair",
    "failure_domain": "slurm",
    "host_memory_limit": "1GiB",
    "inject_fault": ["kill:0@1"],
    "interval": "5",
    "local_budget": "1GiB",
    "memory_dir": "/dev/shm/x",
    "metrics_port": 9400,
    "recover_from": "iter_4",
    "remote_budget": "1GiB",
    "staging_bytes": "1GiB",
    "state_dtype": "exp_avg=bf16",
    "strategy": "dense",
}
SETTINGS = {
    each.name: (name, part, each)
    for name, part in part_types(option_types()).items()
    for each in fields(part)
}


def other_value(each: Any) -> Any:
    """Return a value of a setting that is not its default."""
    if each.name in VALUES:
        return VALUES[each.name]
    if choices := each.metadata["choices"]:
        return next(value for value in choices if value != each.default)
    if isinstance(each.default, bool):
        return True
    if each.default == "auto":
        return "2"
    if isinstance(each.default, int):
        return each.default + 1
    return each.default / 2 if isinstance(each.default, float) and each.default else "0.5"


def needs_of(name: str) -> list[str]:
    part_name, part, each = SETTINGS[name]
    stated = each.metadata["needs"]
    own = [f"strategy={part_name}"] if part_name in option_types() else []
    return [*own, *(part.NEEDS if stated is None else stated)]


def met(need: str) -> dict[str, Any]:
    """Return a setting that meets a need; nothing for one that its default meets."""
    name, is_stated, value = need.partition("|")[0].partition("=")
    if name.endswith("!"):
        return {}
    if is_stated:
        return {name: value}
    return {name: other_value(SETTINGS[name][2])}


def with_needs(name: str) -> dict[str, Any]:
    """Return a setting with all that it needs, and what these need."""
    given: dict[str, Any] = {}
    missing = {name: other_value(SETTINGS[name][2])}
    while missing:
        given |= missing
        needs = [met(need) for each in missing for need in needs_of(each)]
        missing = {key: value for each in needs for key, value in each.items() if key not in given}
    return given


def void(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the refusals of settings that change nothing, by flag."""
    config = config_from_settings(given, option_types(), {"strategy": names()})
    lines = unmet_needs(config.parts, config.options)
    return {re.split("[= ]", line)[0]: line for line in lines}


def in_need() -> Iterator[tuple[str, str]]:
    yield from ((name, need) for name in SETTINGS for need in needs_of(name))


def test_every_setting_has_a_need_or_is_known_to_have_none() -> None:
    assert {name for name in SETTINGS if not needs_of(name)} == WITHOUT_NEEDS
    named = {choice.partition("=")[0] for _, need in in_need() for choice in need.split("|")}
    assert {name.removesuffix("!") for name in named} <= SETTINGS.keys()


@pytest.mark.parametrize(("name", "need"), in_need())
def test_setting_without_what_it_needs_is_named_with_value_and_remedy(name: str, need: str) -> None:
    given = with_needs(name)
    target, _, wanted = need.partition("|")[0].partition("=")
    given.pop(target, None)
    if target.endswith("!"):
        given[target[:-1]] = wanted
    elif wanted == SETTINGS[target][2].default:
        given[target] = other_value(SETTINGS[target][2])
    line, flag = void(given)[flag_of(name)], flag_of(name)
    rule, _, remedy = line.partition(" changes nothing ")[2].partition(". ")
    assert flag_of(target.removesuffix("!")) in rule and flag_of(target.removesuffix("!")) in remedy
    assert remedy.endswith(f"or leave {flag} out.")


def test_first_setting_that_changes_nothing_is_refused_before_work_starts() -> None:
    config = config_from_settings({"persist_dir": "/x"}, option_types())
    line = "--moe-ft-persist-dir=/x changes nothing without --moe-ft-strategy. Add --moe-ft-strategy NAME, or"
    with pytest.raises(ConfigError, match=line):
        config.validate(2)
    config.validate(2, allows_void=True)


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_with_what_it_needs_is_not_void(name: str) -> None:
    assert not void(with_needs(name))


def test_defaults_that_were_given_where_they_are_void_are_named() -> None:
    config = config_from_settings({}, option_types())
    lines = config.warnings(None, SETTINGS)
    void_ones = {name for name in SETTINGS if needs_of(name)}
    assert {re.split("[= ]", line)[0] for line in lines} == set(map(flag_of, void_ones))


ZERO = [
    name
    for name, (_, _, each) in SETTINGS.items()
    if each.metadata["bounds"] is not None and each.metadata["bounds"].contain(0)
    if isinstance(each.default, int | str) or each.default == 0 or "grace" in name
]


def test_settings_that_may_be_zero_are_found() -> None:
    assert {"persist_interval", "persist_dense_interval", "replication_factor"} < {*ZERO}
    assert len(ZERO) == 12


@pytest.mark.parametrize("name", ZERO)
def test_zero_has_one_meaning_that_the_help_states(name: str) -> None:
    each = SETTINGS[name][2]
    assert "0 = " in each.metadata["help"]
    given = {**with_needs(name), name: 0}
    config_from_settings(given, option_types(), {"strategy": names()}).validate(2)
    assert not isinstance(each.default, int) or each.default in (0, 10)
