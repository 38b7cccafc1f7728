"""Rules on settings: when one is broken, and the message with the reason and the remedy.

Rooms hold tuples of them. Choices and ranges of single values are with the fields, see fields.py. The rules
for directories are a function: which can hold state at all, and which must be apart.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from moe_ft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that settings break by a flag, by some values of it, or by flags together.

    Its message reads `FLAG=VALUE PROBLEM: REASON. REMEDY.`

    Attributes:
        dest: the attribute of the settings with the value that the message shows; empty if it shows none.
        flag: as messages name it; one with a space says the value itself.
        remedy: {others} stands for the strategies with which the rule does not hold.
        strategies: says of a `StrategyKind` whether the rule holds with it; None for always, also without
            a strategy.
    """

    dest: str
    flag: str
    is_broken: Callable[[Any], bool]
    reason: str = ""
    remedy: str = "Leave it out"
    strategies: Callable[[Any], bool] | None = None
    problem: str = "is not supported"

    def given(self, settings: Any) -> str:
        """Return the flag with its value."""
        value = getattr(settings, self.dest, None)
        if not self.dest or " " in self.flag or isinstance(value, bool):
            return self.flag
        return f"{self.flag}={' '.join(map(str, value)) if isinstance(value, list) else value}"

    def message(self, settings: Any) -> str:
        """Return what is wrong with the settings, and what helps."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.given(settings)} {self.problem}{reason}. {self.remedy}."


def check_rules(rules: Iterable[Rule], settings: Any) -> None:
    """Raise ConfigError on the first rule that the settings break."""
    for rule in rules:
        if rule.is_broken(settings):
            raise ConfigError(rule.message(settings))


def check_directories(memory_dir: str, persist_dir: str | None) -> None:
    """Check what --moe-ft-memory-dir and --moe-ft-persist-dir name.

    Args:
        persist_dir: a path or fsspec URL, None for no storage.

    Raises:
        ConfigError: if the first is not absolute, the second is no storage, or one is in the other.
    """
    if not Path(memory_dir).is_absolute():
        raise ConfigError(
            f"--moe-ft-memory-dir={memory_dir} must be an absolute path: a restart finds its memory there, "
            "wherever it starts. Write it like /dev/shm/NAME."
        )
    if persist_dir is None:
        return
    if "memory" in re.split("://|::", persist_dir)[:-1]:
        raise ConfigError(
            f"--moe-ft-persist-dir={persist_dir} must be storage that outlives the process which writes it, "
            "and memory:// ends with that. Name a directory, or the URL of an object store."
        )
    if get_protocol(persist_dir) not in LocalFileSystem.protocol:
        return
    memory = Path(memory_dir).resolve()
    persist = Path(LocalFileSystem._strip_protocol(persist_dir)).resolve()
    if memory == persist or memory in persist.parents or persist in memory.parents:
        raise ConfigError(
            f"--moe-ft-memory-dir={memory_dir} and --moe-ft-persist-dir={persist_dir} must not be the same "
            "directory or one in the other: the first is emptied when a job ends, the second is kept. Name "
            "directories that are apart."
        )
