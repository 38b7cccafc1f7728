"""Settings as flags: every field is one, and comes back with the value that was given."""

import argparse
import re
from dataclasses import dataclass, fields

import pytest

from moe_ft.config.config import MoeFtConfig, StorageConfig
from moe_ft.config.fields import HELP_ALL, Bounds, ConfigPart, flag_of, setting
from moe_ft.config.flags import (
    BASIC,
    add_flags,
    config_from,
    config_from_settings,
    part_types,
)
from moe_ft.errors import ConfigError
from moe_ft.strategies.registry import names, option_types


@dataclass(frozen=True, kw_only=True, slots=True)
class Options(ConfigPart):
    """Options of a strategy: for this test."""

    depth: int = setting(2, "100% of it", bounds=Bounds(at_least=1), remedy="Give a depth")
    color: str = setting("red", "one of two", choices=("red", "blue"))
    share: float = setting(
        0.5, "part", metavar="FRACTION", bounds=Bounds(above=0, below=1), remedy="Write 0.5"
    )
    every: str = setting("auto", "how often", bounds=Bounds(at_least=1))
    is_deep: bool = setting(False, "a switch")
    tags: tuple[str, ...] = setting((), "may be repeated")


def parse(*command_line: str) -> MoeFtConfig:
    types = {**option_types(), "test": Options}
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, part_types(types).values(), {"strategy": (*names(), "test")})
    return config_from(parser.parse_args(command_line), types)


def test_command_line_without_flags_gives_the_defaults() -> None:
    config = parse()
    assert config.options == {
        **{name: type_() for name, type_ in option_types().items()},
        "test": Options(),
    }
    for name in ("strategy", "precision", "memory", "storage", "recovery", "fault"):
        assert getattr(config, name) == getattr(MoeFtConfig(), name)


def test_given_flags_reach_their_settings() -> None:
    config = parse(
        *("--moe-ft-strategy", "test", "--moe-ft-keep", "5", "--moe-ft-depth=7"),
        *("--moe-ft-color", "blue", "--moe-ft-share", "0.25", "--moe-ft-every", "3"),
        *("--moe-ft-is-deep", "--moe-ft-tags", "a", "--moe-ft-tags", "b"),
    )
    assert config.strategy.strategy == "test"
    assert config.storage == StorageConfig(keep=5)
    assert config.options["test"] == Options(
        depth=7, color="blue", share=0.25, every="3", is_deep=True, tags=("a", "b")
    )


def test_flag_that_the_command_line_does_not_know_has_its_default() -> None:
    args = argparse.Namespace(moe_ft_keep=3)
    assert config_from(args, {}).storage == StorageConfig(keep=3)


@pytest.mark.parametrize(
    ("flag", "value"), [("--moe-ft-color", "green"), ("--moe-ft-strategy", "hope")]
)
def test_value_that_is_none_of_the_choices_is_refused_while_parsing(flag: str, value: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=f"{flag}: invalid choice: '{value}'"):
        parse(flag, value)


def test_every_setting_has_a_help_text_and_a_flag_of_its_own() -> None:
    settings = [each for part in part_types(option_types()).values() for each in fields(part)]
    assert all(each.metadata["help"] for each in settings)
    flags = [flag_of(each.name) for each in settings]
    assert len(flags) == len(set(flags))


def test_every_flag_with_a_value_names_it() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, part_types(option_types()).values(), {"strategy": names()})
    own = [each for each in parser._actions if each.help != argparse.SUPPRESS and each.nargs != 0]
    assert all(each.metavar and each.metavar != "VALUE" for each in own)


def test_brief_help_has_the_basic_flags_and_a_flag_that_shows_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, usage="")
    parts = part_types({"test": Options}).values()
    add_flags(parser, parts, {"strategy": (*names(), "test")}, is_brief=True)
    flags = re.findall(r"^  (--moe-ft-[\w-]+)", parser.format_help(), re.MULTILINE)
    assert flags == [*map(flag_of, BASIC), HELP_ALL]
    with pytest.raises(SystemExit, match="0"):
        parser.parse_args([HELP_ALL])
    text = capsys.readouterr().out
    assert text.startswith("moe_ft: basic:\n  --moe-ft-strategy {none,")
    assert "moe_ft: Options of a strategy: for this test:\n" in text
    assert "  --moe-ft-depth VALUE  100% of it (default: 2)\n" in text
    assert config_from(parser.parse_args(["--moe-ft-depth=7"]), {"test": Options}).options == {
        "test": Options(depth=7)
    }


def test_value_out_of_its_bounds_is_named_with_flag_rule_and_remedy() -> None:
    for options, message in (
        (Options(depth=0), "--moe-ft-depth=0 must be at least 1. Give a depth."),
        (Options(share=1.0), "--moe-ft-share=1.0 must be a fraction between 0 and 1"),
        (Options(share=float("nan")), "--moe-ft-share=nan must be a fraction between 0 and 1"),
        (Options(color="green"), "--moe-ft-color=green must be one of red, blue. Name one of"),
        (Options(every="0"), "--moe-ft-every=0 must be a whole number, at least 1, or auto"),
    ):
        with pytest.raises(ConfigError, match=message):
            options.validate(1)


def from_settings(**settings: object) -> MoeFtConfig:
    types = {**option_types(), "test": Options}
    return config_from_settings(settings, types, {"strategy": (*names(), "test")})


def test_settings_by_name_are_those_of_the_flags() -> None:
    config = from_settings(
        strategy="test", keep=5, depth="7", share=0.25, every=3, is_deep=True, tags=["a", "b"]
    )
    assert config.strategy.strategy == "test"
    assert config.storage == StorageConfig(keep=5)
    assert config.options["test"] == Options(
        depth=7, share=0.25, every="3", is_deep=True, tags=("a", "b")
    )


def test_settings_that_are_none_or_false_are_left_out() -> None:
    assert from_settings(keep=None, is_deep=False, tags=[], job_id=None) == from_settings()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kep": 1}, "there is no setting kep. Did you mean keep? docs/flags.md lists"),
        ({"zzz": 1}, "there is no setting zzz. docs/flags.md lists the settings."),
        (
            {"color": "green"},
            "--moe-ft-color=green must be one of red, blue. Name one of them. docs/",
        ),
        ({"keep": "many"}, "--moe-ft-keep: invalid int value: 'many'"),
        ({"keep": True}, "setting keep=True must be a value, not True or False (--moe-ft-keep)"),
        ({"is_deep": "yes"}, "setting is_deep='yes' must be True or False (--moe-ft-is-deep)"),
        ({"tags": "a"}, "setting tags='a' must be a list of texts (--moe-ft-tags)"),
        ({"every": [1]}, "setting every=[1] must be one value, not a list (--moe-ft-every)"),
    ],
)
def test_settings_that_are_none_of_the_flags_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_settings(**settings)
