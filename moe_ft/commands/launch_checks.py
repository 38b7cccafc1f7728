"""Checks that `moe_ft launch` makes before it starts anything, and names of runs.

A name is made of the script and of all flags but those of moe_ft: the same command, typed again, continues
its run. State that another command of the same script has left is neither passed over in silence nor taken
for this run's: the start is refused, and the user names the run.
"""

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

from moe_ft.config.config import DEFAULT_MEMORY_DIR, MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.config.flags import config_from_words, part_types
from moe_ft.engine.memory.job_directory import find_indexes_below, job_directory
from moe_ft.errors import ConfigError
from moe_ft.format.index import IndexHead
from moe_ft.recovery.job_memory import describe, find_directories, is_alive
from moe_ft.spelling import hint
from moe_ft.strategies import registry

_STEM_LENGTH, _DIGEST_LENGTH = 60, 6


def check_flags(words: Sequence[str], world_size: int) -> None:
    """Raise ConfigError if the flags of moe_ft in a command line are wrong by themselves, as the ranks do."""
    _read(words)[0].validate(world_size)


def check_in_front(words: Sequence[str]) -> None:
    """Raise ConfigError if words in front of a script are not all flags of moe_ft."""
    if others := _read(words)[1]:
        raise ConfigError(
            f"{' '.join(others)} in front of a script must be flags of moe_ft.{_hint(others[0])} Put options "
            "of `launch` before them, and arguments of the script after it."
        )


def _hint(word: str) -> str:
    parts = part_types(registry.option_types()).values()
    return hint(word, [flag_of(each.name) for part in parts for each in fields(part)])


def _read(words: Sequence[str]) -> tuple[MoeFtConfig, list[str]]:
    """Return the settings in a command line, and its other words."""
    return config_from_words(words, registry.option_types(), {"strategy": registry.names()})


def name_run(target: Sequence[str], memory_dir: str) -> str:
    """Return the name of a run.

    Args:
        target: the script, or -m and a module, and its arguments.
        memory_dir: of its flags; empty for the default.

    Raises:
        ConfigError: if it has no state in memory, and another run of the script that is dead has.
    """
    prefix, name = made_name(target)
    _check_other_runs(memory_dir or DEFAULT_MEMORY_DIR, prefix, name)
    return name


def made_name(target: Sequence[str]) -> tuple[str, str]:
    """Return what the names of all runs of a script begin with, and the name of this one."""
    is_module = target[0] == "-m"
    script = target[1] if is_module else os.path.realpath(target[0])
    stem = re.sub(r"[^A-Za-z0-9_]+", "_", Path(script).stem if not is_module else script)
    prefix = f"{stem[:_STEM_LENGTH]}-{_digest([script])}-"
    # Files that flags name by a relative path are others in another folder.
    return prefix, prefix + _digest([os.getcwd(), *_read(target[1 + is_module :])[1]])


def _digest(words: Sequence[str]) -> str:
    text = "\0".join(words).encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()[:_DIGEST_LENGTH]


def _check_other_runs(memory_dir: str, prefix: str, name: str) -> None:
    """Raise ConfigError if this run has no state in memory, and another dead one of the script has.

    Args:
        prefix, name: as `made_name` returns them.
    """
    root = Path(memory_dir)
    if not root.is_dir() or _has_state(job_directory(memory_dir, name)):
        return
    with suppress(OSError):  # the ranks say that it cannot be read
        others = [
            each
            for each, refusal in find_directories(root)
            if each.name.startswith(prefix) and not refusal and _has_state(each)
            if not is_alive(each)
        ]
        for other in others:
            raise ConfigError(
                f"{flag_of('memory_dir')}={memory_dir} has state of a run of this script with other flags "
                f"({describe(other)[0]}), and --moe-ft-job-id is missing. To continue that run add "
                f"--moe-ft-job-id {other.name}; to begin another one add --moe-ft-job-id and a new name; "
                "to delete it run: "
                f"{Path(sys.executable).name} -m moe_ft clean --job-id {other.name} --remove"
            )


def _has_state(directory: Path) -> bool:
    """Return whether there is a state, or one that cannot be read, in the memory of a job."""
    return next(iter(find_indexes_below(directory, IndexHead)), None) is not None
