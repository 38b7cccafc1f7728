"""Suggestions for words that nobody knows: flags, commands, names of settings and presets.

Errors of argparse get them too, in words of ours: it names what it does not know, and not what was meant.
"""

import argparse
import difflib
import re
from collections.abc import Iterable

_UNKNOWN = re.compile(r"unrecognized arguments: (?P<words>.*)", re.DOTALL)
_CHOICE = re.compile(
    r"argument (?P<name>.+?): invalid choice: (?P<value>.*) \(choose from (?P<choices>.*)\)",
    re.DOTALL,
)
_PREFIX = re.compile(r"^-*(moe[-_]ft[-_])?")
COMMAND = "COMMAND"  # stands for all commands in a parser of theirs


def nearest(word: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the known words that a word resembles, the nearest first.

    Dashes and a prefix --moe-ft- at the front count for nothing: all flags have them, and users forget them.

    Args:
        cutoff: the least resemblance, from 0 to 1.
    """
    names: dict[str, str] = {}
    for each in known:
        names.setdefault(_bare(each), each)
    return [names[each] for each in difflib.get_close_matches(_bare(word), names, most, cutoff)]


def _bare(word: str) -> str:
    return _PREFIX.sub("", word.lower().replace("_", "-"))


def hint(word: str, known: Iterable[str], most: int = 1, cutoff: float = 0.6) -> str:
    """Return a question that names what may be meant, with a space before it; empty if nothing is near."""
    found = nearest(word, known, most, cutoff)
    return f" Did you mean {' or '.join(found)}?" if found else ""


def explained(message: str, parser: argparse.ArgumentParser) -> str:
    """Return an error of argparse as a sentence, with what may be meant.

    Args:
        parser: the one that has refused the words.
    """
    if match := _UNKNOWN.fullmatch(message):
        flags = (word.partition("=")[0] for word in match["words"].split())
        return f"{message}.{_hints([each for each in flags if each.startswith('-')], parser)}"
    if match := _CHOICE.fullmatch(message):
        value = match["value"].strip("'\"")
        choices = [each.strip("'\"") for each in match["choices"].split(", ")]
        if match["name"] == COMMAND:
            remedy = hint(value, choices) or f" {parser.prog} --help lists them."
            return f"there is no command {value}.{remedy}"
        remedy = hint(value, choices) or " Name one of them."
        return f"{match['name']}={value} must be one of {', '.join(choices)}.{remedy}"
    return message if message.endswith(".") else f"{message}."


def _hints(flags: list[str], parser: argparse.ArgumentParser) -> str:
    """Return what may be meant by flags that a parser does not know; flags without a help are not named."""
    known = [
        name
        for name, action in parser._option_string_actions.items()
        if action.help != argparse.SUPPRESS
    ]
    found = [each for flag in flags for each in nearest(flag, known)]
    return f" Did you mean {' and '.join(found)}?" if found else ""
