"""Lines for people, through the logger `moe_ft`. Their text may come from anybody's files, and is harmless.

They go to standard error, unless a script has added handlers to that logger: then those get the lines. Other
settings of `logging` change nothing, such as those that Megatron makes for the loggers of all libraries.
"""

import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, override

LOGGER = logging.getLogger("moe_ft")
LOGGER.propagate = (
    False  # Megatron gives the root logger a handler, which would print each line again
)
FORMATS = ("text", "json")
FORMAT_FLAG = "--moe-ft-log-format"

# Control characters but the ends of lines and tabs, and what changes the direction of writing.
_ACTING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Modules of others whose warnings are about optional packages, and about calls that are not of the user.
_DEPENDENCIES = r"(apex|megatron|modelopt|moe_ft|torch|transformer_engine|triton)(\.|$)"
_NO_CUDA = "-torch.utils.cpp_extension"  # that a machine without a GPU has none
_OF_CALLER = 3  # frames from `findCaller` to who calls `say`


def escape(text: str) -> str:
    """Return a text with escapes for what a terminal acts on."""
    return _ACTING.sub(lambda found: ascii(found[0])[1:-1], text)


class Escaping:
    """Stream that escapes what is written to another one, `raw`."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def write(self, text: str) -> Any:
        """Write a text."""
        return self.raw.write(escape(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


class _StandardError(logging.Handler):
    """Handler that looks up `sys.stderr` for each line. One that takes nothing more ends no run."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError, ValueError):
            # One write: print() makes two with `python -u`, and lines of several ranks would mix.
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


class _Text(logging.Formatter):
    """Format of lines as people read them. A refusal is as argparse prints it: it names the program."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno >= logging.ERROR:
            return text
        level = "" if record.levelno == logging.INFO else f"{record.levelname} "
        return f"{stamp(record)}{level}{record.name}: {text}"


class _Json(logging.Formatter):
    """Format of lines as programs read them: an object on each line."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone()
        fields = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **_speaker(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        return json.dumps(fields)


_handler = _StandardError()
_translate: Callable[[str], str] = str
_node = ""  # if this process speaks for a node, and not for a rank


def speak_for(node: str) -> None:
    """Have lines of this process, and of those that it forks, name a node; empty: the rank, if it has one."""
    global _node
    _node = node


@contextmanager
def in_words_of(translate: Callable[[str], str]) -> Iterator[None]:
    """Have lines of this process in other words in this context: not every loop has Megatron's flags."""
    global _translate
    before, _translate = _translate, translate
    try:
        yield
    finally:
        _translate = before


def choose_format(name: str) -> None:
    """Set the format of lines on standard error, one of FORMATS; others are refused elsewhere."""
    _handler.setFormatter(_Json() if name == "json" else _Text())


choose_format("text")


def stamp(record: logging.LogRecord) -> str:
    """Return when a line was printed, in local time, and by whom."""
    speaker = "".join(f"{kind} {name} " for kind, name in _speaker().items())
    return f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S} {escape(speaker)}"


def silence_dependencies() -> None:
    """Hide Python's warnings of torch, Megatron and the like, unless the user says which to show.

    Call it before they are imported: most come then, on every rank. Warnings of the user's own files stay.
    """
    if not sys.warnoptions:  # of -W and PYTHONWARNINGS
        warnings.filterwarnings("ignore", module=_DEPENDENCIES)
    os.environ.setdefault("TORCH_LOGS", _NO_CUDA)


def say(line: str) -> None:
    """Tell people a fact, at once."""
    _log(logging.INFO, line)


def warn(line: str) -> None:
    """Tell people that something has failed, is ignored, or protects less than they may think."""
    _log(logging.WARNING, line)


def fail(line: str) -> None:
    """Tell people why this process ends."""
    _log(logging.ERROR, line)


def _speaker() -> dict[str, Any]:
    """Return who speaks: a node or a rank, if it is known."""
    if _node:
        return {"node": _node}
    rank = os.environ.get("RANK", "")
    return {"rank": int(rank)} if rank.isdecimal() else {}


def _log(level: int, line: str) -> None:
    """Hand a line to the handlers, past `logging.disable` and filters of loggers.

    Megatron-Bridge adds filters to all loggers that hide every warning.
    """
    if level < LOGGER.level:
        return
    path, number, function, _ = LOGGER.findCaller(stacklevel=_OF_CALLER)
    text = escape(_translate(line))
    record = LOGGER.makeRecord(LOGGER.name, level, path, number, text, (), None, function)
    if LOGGER.hasHandlers():
        LOGGER.callHandlers(record)
    else:
        _handler.handle(record)


def some_of(texts: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first of some texts, and how many more there are."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more
