"""What the parts of the configuration are made of: fields that become flags, and checks of their values."""

import re
from collections.abc import Sequence
from dataclasses import field
from typing import Any

from moe_ft.errors import ConfigError

FLAG_PREFIX = "--moe-ft-"


def flag_of(field_name: str) -> str:
    """Return the command-line flag of a config field."""
    return FLAG_PREFIX + field_name.replace("_", "-")


def parse_size(field_name: str, text: str) -> int:
    """Return the bytes that a size such as 1.5GiB, 200GB or 4096 means.

    Raises:
        ConfigError: if it is no size.
    """
    match = re.fullmatch(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKMGT]i?B|B)?", text.strip())
    if match is None:
        raise ConfigError(
            f"{flag_of(field_name)}={text} must be a size in bytes. Write it like 512GiB."
        )
    unit = match["unit"] or "B"
    power = "BKMGT".index(unit[0].upper())
    return int(float(match["number"]) * (1024 if "i" in unit else 1000) ** power)


def size_text(num_bytes: int) -> str:
    """Return a size for people, in the unit that fits it."""
    power = min(max(0, num_bytes.bit_length() - 1) // 10, 4)
    return f"{num_bytes / 1024**power:.{2 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def count(field_name: str, text: str, *, least: int) -> int:
    """Return a count that may also be automatic, which the caller has looked for.

    Raises:
        ConfigError: if it is none.
    """
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(
            f"{flag_of(field_name)}={text} must be a whole number, at least {least}, or auto. "
            "Give one of them."
        )
    return int(text)


def one_of(field_name: str, value: str, choices: Sequence[str]) -> None:
    """Raise ConfigError unless a value is among those offered."""
    if value not in choices:
        raise ConfigError(
            f"{flag_of(field_name)}={value} must be one of {', '.join(choices)}. Name one of them."
        )


def checked_name(field_name: str, source: str, name: str) -> str:
    """Return a name that becomes a directory's.

    Args:
        field_name: of the setting that is named.
        source: the flag or environment variable that gave the name.
        name: to check.

    Raises:
        ConfigError: if it cannot be a directory's.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,100}", name):
        raise ConfigError(
            f"{source}={name} becomes a directory's name: it must consist of letters, digits, '.', '_' and "
            "'-', at most 101 of them, and not begin with '.' or '-'. Give another one: "
            f"{flag_of(field_name)} NAME."
        )
    return name


def setting(default: Any, help_text: str, **metadata: Any) -> Any:
    """Return a dataclass field that becomes a flag."""
    return field(default=default, metadata={"help": help_text, **metadata})
