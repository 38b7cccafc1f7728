"""Turns settings into argparse flags, and what argparse has read back into settings."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from types import MappingProxyType
from typing import Any

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import Part, flag_of

_NO_CHOICES: Mapping[str, Sequence[str]] = MappingProxyType({})


def part_types(option_types: Mapping[str, type[Part]]) -> dict[str, type[Part]]:
    """Return the types of all parts of the settings by name, in the order of their flags.

    Args:
        option_types: by name of the strategy.
    """
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
        parser: to add them to.
        choices: by field name, where a field does not know its own.
    """
    for part in parts:
        group = parser.add_argument_group(f"moe_ft: {(part.__doc__ or '').strip()}")
        for each in fields(part):
            _add_flag(group, each, choices.get(each.name, each.metadata["choices"]))


def _add_flag(group: Any, each: Any, choices: Sequence[str]) -> None:
    shared = {"dest": f"moe_ft_{each.name}", "help": each.metadata["help"].replace("%", "%%")}
    valued = {**shared, "metavar": each.metadata["metavar"]}
    if isinstance(each.default, bool):
        group.add_argument(flag_of(each.name), action="store_true", **shared)
    elif isinstance(each.default, tuple):
        group.add_argument(flag_of(each.name), action="append", default=[], **valued)
    else:
        kind = str if each.default is None else type(each.default)
        valued |= {"type": kind, "default": each.default, "choices": choices or None}
        group.add_argument(flag_of(each.name), **valued)


def config_from(args: argparse.Namespace, option_types: Mapping[str, type[Part]]) -> MoeFtConfig:
    """Collect the --moe-ft-* values of a parsed command line; a flag that it lacks has its default.

    Args:
        args: as argparse returns them.
        option_types: by name of the strategy.
    """
    parts = {name: _part_from(args, type_) for name, type_ in part_types(option_types).items()}
    options = {name: parts.pop(name) for name in option_types}
    return MoeFtConfig(options=options, **parts)


def _part_from(args: argparse.Namespace, part: type[Part]) -> Any:
    values = {}
    for each in fields(part):
        value = getattr(args, f"moe_ft_{each.name}", each.default)
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return part(**values)
