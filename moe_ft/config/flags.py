"""Turns settings into argparse flags and their help, and what argparse has read back into settings."""

import argparse
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from types import MappingProxyType
from typing import Any, NoReturn, override

from moe_ft.command_lines import FLAG_PREFIX
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import HELP_ALL, STRATEGY, ConfigPart, flag_of
from moe_ft.config.lost_nodes import (
    OLD_ANSWERS,
    OLD_FLAG,
    OLD_WORDS,
    line_on_old_words,
    word_of_today,
)
from moe_ft.errors import ConfigError
from moe_ft.spelling import explained, hint

_OLD = "moe_ft_spare"
_NO_CHOICES: Mapping[str, Sequence[str]] = MappingProxyType({})
# Settings that most jobs give, in the order of their help, and the title of their group.
BASIC = (
    "strategy",
    "interval",
    "repair",
    "job_id",
    "memory_dir",
    "persist_dir",
    "persist_interval",
    "event_log",
)
_BASIC_TITLE = "basic"


def part_types(option_types: Mapping[str, type[ConfigPart]]) -> dict[str, type[ConfigPart]]:
    """Return the types of all parts of the settings by name, in the order of their flags."""
    found: dict[str, type[ConfigPart]] = {}
    for each in fields(MoeFtConfig):
        if each.name == "options":
            found |= option_types
        else:
            assert each.default is not MISSING
            found[each.name] = type(each.default)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """A setting as people read it: on the command line, in a help, on a page.

    Attributes:
        setting: the field.
        part: that has the field.
        choices: values that it may have; none if there are others.
    """

    setting: Any
    part: type[ConfigPart]
    choices: Sequence[str]

    @property
    def name(self) -> str:
        """The flag."""
        return flag_of(self.setting.name)

    @property
    def metavar(self) -> str:
        """Name of its value, or all values that it may have; empty for a switch."""
        if self.setting.default is False:
            return ""
        stated = self.setting.metadata["metavar"]
        return stated or (f"{{{','.join(self.choices)}}}" if self.choices else "VALUE")

    @property
    def default(self) -> str:
        """Value that holds where it is not given, in words."""
        value = self.setting.default
        if self.setting.metadata["unset"]:
            return str(self.setting.metadata["unset"])
        if value is False:
            return "off"
        if value is None or value == ():
            return "none"
        return f"{value:g}" if isinstance(value, float) else str(value)

    @property
    def needs(self) -> str:
        """Settings besides a strategy without which it changes nothing, in words."""
        stated = self.setting.metadata["needs"]
        found = self.part.NEEDS if stated is None else stated
        return " and ".join(_words_of(need) for need in found if need != STRATEGY)

    @property
    def meaning(self) -> str:
        """Meaning of its values."""
        return str(self.setting.metadata["help"])

    @property
    def page(self) -> str:
        """Page of docs/ that says more."""
        return self.setting.metadata["page"] or self.part.PAGE

    def add_to(self, group: Any) -> None:
        """Add it to argparse's flags."""
        default = self.setting.default
        needs = f"; needs {self.needs}" if self.needs else ""
        text = f"{self.meaning} (default: {self.default}{needs})".replace("%", "%%")
        given: dict[str, Any] = {"dest": f"moe_ft_{self.setting.name}", "help": text}
        if default is False:
            group.add_argument(self.name, action="store_true", **given)
            return
        given["metavar"] = self.metavar
        if isinstance(default, tuple):
            group.add_argument(self.name, action="append", default=[], **given)
            return
        choices = self.choices
        if self.setting.name == "without_spare":
            choices = (*choices, *OLD_WORDS)
        kind = str if default is None else type(default)
        group.add_argument(self.name, type=kind, default=default, choices=choices or None, **given)


def _words_of(need: str) -> str:
    """Return a need, as `setting` takes it, in words."""
    words = []
    for choice in need.split("|"):
        name, is_stated, value = choice.partition("=")
        link = " other than" if name.endswith("!") else ""
        words.append(f"{flag_of(name.removesuffix('!'))}{link}{' ' if is_stated else ''}{value}")
    return " or ".join(words)


def groups_of(
    parts: Iterable[type[ConfigPart]], choices: Mapping[str, Sequence[str]] = _NO_CHOICES
) -> dict[str, list[Flag]]:
    """Return the flags of parts by the title of their group; those that most jobs give come first.

    Args:
        choices: by field name, where a field does not know its own.
    """
    groups: dict[str, list[Flag]] = {_BASIC_TITLE: []}
    for part in parts:
        title = part.TITLE or (part.__doc__ or "").strip().rstrip(".")
        found = [
            Flag(setting=each, part=part, choices=choices.get(each.name, each.metadata["choices"]))
            for each in fields(part)
        ]
        groups[_BASIC_TITLE] += [each for each in found if each.setting.name in BASIC]
        groups[title] = [each for each in found if each.setting.name not in BASIC]
    groups[_BASIC_TITLE].sort(key=lambda each: BASIC.index(each.setting.name))
    return {title: found for title, found in groups.items() if found}


def add_flags(
    parser: argparse.ArgumentParser,
    parts: Iterable[type[ConfigPart]],
    choices: Mapping[str, Sequence[str]] = _NO_CHOICES,
    *,
    is_brief: bool = False,
) -> None:
    """Add a group of flags for each part, after one with the basic flags of all.

    Args:
        choices: as for `groups_of`.
        is_brief: whether the parser's help shows the basic ones alone, and names the flag that shows all.
    """
    groups = groups_of(parts, choices)
    for title, found in groups.items():
        group = parser.add_argument_group(f"moe_ft: {title}")
        for each in found:
            each.add_to(group)
        if is_brief and title == _BASIC_TITLE:
            group.add_argument(HELP_ALL, action=_HelpAll, const=lambda: help_of(groups))
        elif is_brief:
            parser._action_groups.remove(group)
    hidden: Any = {"dest": _OLD, "choices": OLD_ANSWERS, "help": argparse.SUPPRESS}
    parser.add_argument(OLD_FLAG, **hidden)


def help_of(groups: Mapping[str, Sequence[Flag]]) -> str:
    """Return the help of flags, as argparse writes it."""
    parser = argparse.ArgumentParser(
        add_help=False, usage=argparse.SUPPRESS, formatter_class=_WholeFlags
    )
    for title, found in groups.items():
        group = parser.add_argument_group(f"moe_ft: {title}")
        for each in found:
            each.add_to(group)
    return parser.format_help()


class _WholeFlags(argparse.HelpFormatter):
    """Format of a help that breaks no flag, so that it can be looked for."""

    @override
    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _HelpAll(argparse.Action):
    """Flag that prints what a function returns, its `const`, and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, const: Callable[[], str]) -> None:
        text = "show all flags of moe_ft, and end"
        super().__init__(option_strings, "help", 0, const, argparse.SUPPRESS, help=text)

    @override
    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        print(self.const(), end="")
        parser.exit()


def config_from(
    args: argparse.Namespace, option_types: Mapping[str, type[ConfigPart]]
) -> MoeFtConfig:
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


def _part_from(args: argparse.Namespace, part: type[ConfigPart]) -> Any:
    values = {}
    for each in fields(part):
        value = getattr(args, f"moe_ft_{each.name}", each.default)
        values[each.name] = tuple(value) if isinstance(value, list) else value
    return part(**values)


def _parsed(
    words: Sequence[str],
    option_types: Mapping[str, type[ConfigPart]],
    choices: Mapping[str, Sequence[str]],
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the flags of moe_ft among some words; return the others too."""

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{explained(message, parser)} docs/flags.md lists the settings.")

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]  # its own prints all of the usage
    add_flags(parser, part_types(option_types).values(), choices)
    found, others = parser.parse_known_args([*words])
    if unknown := [each for each in others if each.startswith(FLAG_PREFIX)]:
        refuse(f"unrecognized arguments: {' '.join(unknown)}")
    return found, others


def config_from_words(
    words: Sequence[str],
    option_types: Mapping[str, type[ConfigPart]],
    choices: Mapping[str, Sequence[str]] = _NO_CHOICES,
) -> tuple[MoeFtConfig, list[str]]:
    """Return the settings that a command line holds, and its other words.

    Args:
        choices: by field name, where a field does not know its own.

    Raises:
        ConfigError: if there is no such flag of moe_ft, or a value is not of its kind.
    """
    found, others = _parsed(words, option_types, choices)
    return config_from(found, option_types), others


def config_from_settings(
    settings: Mapping[str, Any],
    option_types: Mapping[str, type[ConfigPart]],
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
    parts = part_types(option_types).values()
    known = {each.name: each for part in parts for each in fields(part)}
    words: list[str] = []
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(
                f"there is no setting {name}.{hint(str(name), known)} docs/flags.md lists the settings."
            )
        words += _as_words(known[name], value)
    found, _ = _parsed(words, option_types, choices)
    return config_from(found, option_types)


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
