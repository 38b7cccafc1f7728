"""Flags as a command line spells them, read from its words before a parser does."""

from collections.abc import Sequence

FLAG_PREFIX = "--moe-ft-"


def as_flag(name: str) -> str:
    """Return the flag of a setting of a program, by its name in Python."""
    return "--" + name.replace("_", "-")


def flag_value(words: Sequence[str], flag: str) -> str:
    """Return the last value of a flag in a command line; empty if it is not there."""
    value = ""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, is_joined, rest = word.partition("=")
        if name == flag:
            value = rest if is_joined else following
    return value


def flags_of_moe_ft(words: Sequence[str]) -> list[str]:
    """Return the --moe-ft-* flags of a command line, without their values."""
    return [word.partition("=")[0] for word in words if word.startswith(FLAG_PREFIX)]
