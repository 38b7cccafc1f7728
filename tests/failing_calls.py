"""System calls that fail, or do a part of what they were asked for, below Python.

A library goes under a process (LD_PRELOAD). A rule says which call on which files; the environment has the
first one, and the process may set others with `set_failing`.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("failing_calls.c")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Calls that fail.

    Attributes:
        place: part of the paths of files that they are on; without blanks, and a star stands for anything.
        call: write, read, fsync, close, fallocate, open, rename, link, mkdir, unlink, stat or list.
        error: errno; 0 if they do at most `most` bytes, or `write` one wrong byte where that is negative.
        at: number of the one that fails, from 1; 0 for none.
        every: if not 0, all whose number it divides fail instead.
    """

    place: str
    call: str
    error: int = 0
    most: int = 0
    at: int = 0
    every: int = 0


def build_library(folder: Path) -> Path:
    """Return the library, compiled into a folder; skip the test without a compiler."""
    if (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("a library under Python needs a C compiler, and there is none")
    library = folder / "failing_calls.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


def environment(library: Path, rule: Rule | None = None) -> Mapping[str, str]:
    """Return what a process gets whose calls are to fail."""
    found = {"LD_PRELOAD": str(library)}
    if rule is not None:
        words = (rule.place, rule.call, rule.error, rule.most, rule.at, rule.every)
        found["FAILING_CALLS"] = " ".join(map(str, words))
    return found


def set_failing(rule: Rule | None) -> int:
    """Set the rule of this process, which has the library; return how many calls the last one was for."""
    library = ctypes.CDLL(None)
    seen = int(library.num_failing_seen())
    now = rule or Rule(place="", call="")
    place, call = now.place.encode(), now.call.encode()
    library.set_failing(place, call, now.error, ctypes.c_long(now.most), now.at, now.every)
    return seen
