"""Building blocks of the configuration: fields that become flags, and checks of their values.

A field states its choices or its range once: argparse offers the choices, and `ConfigPart.validate` checks
both.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from moe_ft.command_lines import as_flag
from moe_ft.errors import ConfigError

HELP_ALL = "--moe-ft-help-all"
# Needs of several settings, as `setting` takes them.
STRATEGY, PEERS, REPAIR = "strategy", "replication_factor!=0", "repair=auto|repair=try"


def flag_of(field_name: str) -> str:
    """Return the command-line flag of a config field."""
    return as_flag(f"moe_ft_{field_name}")


def parse_size(flag: str, text: str) -> int:
    """Return the bytes that a size such as 1.5GiB, 200GB or 4096 means.

    Raises:
        ConfigError: if it is no size.
    """
    match = re.fullmatch(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKMGT]i?B|B)?", text.strip())
    if match is None:
        raise ConfigError(f"{flag}={text} must be a size in bytes. Write it like 512GiB.")
    unit = match["unit"] or "B"
    power = "BKMGT".index(unit[0].upper())
    return int(float(match["number"]) * (1024 if "i" in unit else 1000) ** power)


def size_text(num_bytes: int) -> str:
    """Return a size for people, in the unit that fits it."""
    power = min(max(0, num_bytes.bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.{2 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Range of a number.

    Attributes:
        at_least, at_most: may be reached.
        above, below: may not.
    """

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def contain(self, value: float) -> bool:
        """Return whether a number is in the range; NaN is in none."""
        return (
            value == value
            and (self.at_least is None or value >= self.at_least)
            and (self.at_most is None or value <= self.at_most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def rule(self) -> str:
        """The range in words."""
        if self.above is not None and self.below is not None:
            return f"must be a fraction between {self.above} and {self.below}"
        if self.at_least is not None and self.at_most is not None:
            return f"must be between {self.at_least} and {self.at_most}"
        upper = "" if self.below is None else f" and less than {self.below}"
        return f"must be at least {self.at_least}{upper}"


def setting(
    default: Any,
    help_text: str,
    *,
    metavar: str = "",
    unset: str = "",
    choices: Sequence[str] = (),
    bounds: Bounds | None = None,
    reason: str = "",
    remedy: str = "",
    needs: tuple[str, ...] | None = None,
    page: str = "",
) -> Any:
    """Return a dataclass field that becomes a flag.

    Args:
        default: a text, a number, False for a switch, a tuple for a flag that may be repeated.
        unset: what holds by default, where the default does not say it.
        bounds: of the number; a text with bounds is a number or `auto`.
        reason: why these are the bounds, for the error message.
        remedy: what to do about a value outside them, as a sentence without its period.
        needs: settings without which this one changes nothing, as `unmet_needs` reads them; None for those
            of its part.
        page: in docs/, with more on it; empty for that of its part.
    """
    return field(
        default=default,
        metadata={
            "help": help_text,
            "metavar": metavar,
            "unset": unset,
            "choices": choices,
            "bounds": bounds,
            "reason": reason,
            "remedy": remedy,
            "needs": needs,
            "page": page,
        },
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigPart:
    """Base of the parts of the settings, whose fields become flags.

    Attributes:
        TITLE: of the group of its flags.
        PAGE, NEEDS: of its fields that state none themselves, see `setting`.
    """

    TITLE: ClassVar[str] = ""
    PAGE: ClassVar[str] = ""
    NEEDS: ClassVar[tuple[str, ...]] = ()

    def validate(self, world_size: int) -> None:
        """Raise ConfigError if a value is none of its choices, out of its range, or against a rule."""
        for each in fields(self):
            self._check_value(each)
        self.check(world_size)

    def check(self, world_size: int) -> None:
        """Raise ConfigError if a rule is broken that is not a matter of one field's choices or range."""

    def _check_value(self, each: Any) -> None:
        value, rule = getattr(self, each.name), each.metadata
        if rule["choices"]:
            one_of(each.name, value, rule["choices"])
        if rule["bounds"] is None:
            return
        if isinstance(value, str):
            self.number_or_auto(each.name)
        elif not rule["bounds"].contain(value):
            reason = f": {rule['reason']}" if rule["reason"] else ""
            raise ConfigError(
                f"{flag_of(each.name)}={value} {rule['bounds'].rule}{reason}. {rule['remedy']}."
            )

    def number_or_auto(self, field_name: str) -> int | None:
        """Return the whole number in a text field, None for `auto`.

        Raises:
            ConfigError: if it is neither, or less than the field allows.
        """
        text = getattr(self, field_name)
        if text == "auto":
            return None
        (field_,) = (each for each in fields(self) if each.name == field_name)
        least = field_.metadata["bounds"].at_least
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(
                f"{flag_of(field_name)}={text} must be a whole number, at least {least}, or auto. "
                "Give one of them."
            )
        return int(text)


def one_of(field_name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless a value is one of the choices."""
    if value not in choices:
        raise ConfigError(
            f"{flag_of(field_name)}={value} must be one of {', '.join(choices)}. Name one of them."
        )


def checked_name(field_name: str, source: str, name: str) -> str:
    """Return a name that becomes a directory's.

    Args:
        field_name: of the setting that is named.
        source: the flag or environment variable that gave the name.

    Raises:
        ConfigError: if it cannot be a directory's.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}", name):
        raise ConfigError(
            f"{source}={name!r} becomes a directory's name: it must consist of letters, digits, '.', '_' and "
            "'-', at most 101 of them, and not begin with '.' or '-'. Give another one: "
            f"{flag_of(field_name)} NAME."
        )
    return name
