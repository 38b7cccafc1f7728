"""Rules for the directories that flags name: which can hold state at all, and which must be apart."""

import re
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from moe_ft.errors import ConfigError


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
