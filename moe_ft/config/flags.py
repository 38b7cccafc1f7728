"""Turns settings into argparse flags, and what argparse has read back into settings."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any, NoReturn

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import Part, flag_of
from moe_ft.config.lost_nodes import (
    OLD_ANSWER,
    OLD_ANSWERS,
    OLD_FLAG,
    line_on_old_words,
    word_of_today,
)
from moe_ft.errors import ConfigError
from moe_ft.spelling import explained, hint

_OLD = "moe_ft_spare"
_NO_CHOICES: Mapping[str, Sequence[str]] = MappingProxyType({})


def part_types(option_types: Mapping[str, type[Part]]) -> dict[str, type[Part]]:
    """Return the types of all parts of the settings by name, in the order of their flags."""
    found: dict[str, type[Part]] = {}
    for each in fields(MoeFtConfig):
        if each.name == "options":
            found |= option_types
        else:
            assert each.default is not MISSING
            found[each.name] = type(each.default)
    return found


def add_flags(
    parser: argparse.ArgumentParser,
    parts: Iterable[type[Part]],
    choices: Mapping[str, Sequence[str]] = _NO_CHOICES,
) -> None:
    """Add a group of flags for each part.

    Args:
        choices: by field name, where a field does not know its own.
    """
    for part in parts:
        group = parser.add_argument_group(f"moe_ft: {(part.__doc__ or '').strip()}")
        for each in fields(part):
            _add_flag(group, each, choices.get(each.name, each.metadata["choices"]))
    hidden: Any = {"dest": _OLD, "choices": OLD_ANSWERS, "help": argparse.SUPPRESS}
    parser.add_argument(OLD_FLAG, **hidden)


def _add_flag(group: Any, each: Any, choices: Sequence[str]) -> None:
    shared = {"dest": f"moe_ft_{each.name}", "help": each.metadata["help"].replace("%", "%%")}
    valued = {**shared, "metavar": each.metadata["metavar"]}
    if isinstance(each.default, bool):
        group.add_argument(flag_of(each.name), action="store_true", **shared)
    elif isinstance(each.default, tuple):
        group.add_argument(flag_of(each.name), action="append", default=[], **valued)
    else:
        kind = str if each.default is None else type(each.default)
        if each.name == "without_spare":
            valued["metavar"], choices = f"{{{','.join(choices)}}}", (*choices, OLD_ANSWER)
        valued |= {"type": kind, "default": each.default, "choices": choices or None}
        group.add_argument(flag_of(each.name), **valued)


def config_from(args: argparse.Namespace, option_types: Mapping[str, type[Part]]) -> MoeFtConfig:
    """Collect the --moe-ft-* values of a parsed command line; a flag that it lacks has its default."""
    given, old, is_elastic = _words_on_lost_nodes(args)
    word = word_of_today(given, old, is_elastic=is_elastic)
    args = argparse.Namespace(**{**vars(args), "moe_ft_without_spare": word})
    parts = {name: _part_from(args, type_) for name, type_ in part_types(option_types).items()}
    options = {name: parts.pop(name) for name in option_types}
    return MoeFtConfig(options=options, **parts)


def lines_on_old_words(args: argparse.Namespace) -> list[str]:
    """Return a line on flags of a parsed command line that have another name now."""
    given, old, is_elastic = _words_on_lost_nodes(args)
    line = line_on_old_words(given, old, is_elastic=is_elastic)
    return [line] if line else []


def _words_on_lost_nodes(args: argparse.Namespace) -> tuple[str, str, bool]:
    given, old = (getattr(args, name, None) or "" for name in ("moe_ft_without_spare", _OLD))
    return given, old, bool(getattr(args, "moe_ft_elastic", False))


def as_arguments(config: MoeFtConfig) -> dict[str, Any]:
    """Return all settings by the names that a parser gives them."""
    parts = config.parts.values()
    return {
        f"moe_ft_{each.name}": getattr(part, each.name) for part in parts for each in fields(part)
    }


def _part_from(args: argparse.Namespace, part: type[Part]) -> Any:
    values = {}
    for each in fields(part):
        value = getattr(args, f"moe_ft_{each.name}", each.default)
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return part(**values)


class _Parser(argparse.ArgumentParser):
    """Parser whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{explained(message, self)} docs/flags.md lists the settings.")


def config_from_settings(
    settings: Mapping[str, Any],
    option_types: Mapping[str, type[Part]],
    choices: Mapping[str, Sequence[str]] = _NO_CHOICES,
) -> MoeFtConfig:
    """Return the settings that a mapping holds, by the names of the flags: ``{"persist_dir": "/scratch"}``.

    Args:
        settings: by name of the flag without --moe-ft-, with underscores. True sets a switch, a list gives a
            flag several times, None leaves a setting at its default.
        choices: by field name, where a field does not know its own.

    Raises:
        ConfigError: if there is no such setting, or a value is not of its kind. `MoeFtConfig.validate` checks
            the rest.
    """
    parts = list(part_types(option_types).values())
    known = {each.name: each for part in parts for each in fields(part)}
    words: list[str] = []
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(
                f"there is no setting {name}.{hint(str(name), known)} docs/flags.md lists the settings."
            )
        words += _as_words(known[name], value)
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser, parts, choices)
    return config_from(parser.parse_args(words), option_types)


def _as_words(each: Any, value: Any) -> list[str]:
    """Return a setting as a command line gives it."""
    flag, kind = flag_of(each.name), type(each.default)
    if value is None:
        return []
    if isinstance(value, bool) != (kind is bool):
        wanted = "True or False" if kind is bool else "a value, not True or False"
        raise ConfigError(f"setting {each.name}={value!r} must be {wanted} ({flag}). Give one.")
    if kind is bool:
        return [flag] if value else []
    if isinstance(value, list | tuple) != (kind is tuple):
        wanted = "a list of texts" if kind is tuple else "one value, not a list"
        raise ConfigError(f"setting {each.name}={value!r} must be {wanted} ({flag}). Give one.")
    return [f"{flag}={item}" for item in (value if kind is tuple else [value])]
