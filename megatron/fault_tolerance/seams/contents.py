"""Contents of the files that flags name: indexed data sets, tokenizers and small configurations.

Other text may be at the same path, and equal files elsewhere. The content of a data set is its numbers of
documents and tokens and their type, and a digest of sizes and of blocks spread over both of its files: some
reads, however large it is. A change that keeps sizes and touches no such block is not found.

One rank reads (recovery/meet.py), and moe_ft/format/identity.py compares. Which flag decides what is in
flag_table.py.
"""

import argparse
import functools
import hashlib
import os
import re
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from megatron.core.datasets.indexed_dataset import _INDEX_HEADER, DType

from moe_ft.calls import looks_again
from moe_ft.command_lines import as_flag
from moe_ft.config.flag_table import PATHS, Kind, flag_classes
from moe_ft.errors import ConfigError
from moe_ft.format.identity import CONTENTS
from moe_ft.saying import warn

# With weights between the paths. Those of evaluations decide nothing of the state: a change is only said.
PATH_LISTS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
# Files that list paths, with weights: what they say counts.
LISTING_FILES = ("data_args_path", "per_split_data_args_path")
_SPLITS = frozenset({"train", "valid", "test"})  # in such a file
_HEADER = struct.Struct(f"<{len(_INDEX_HEADER)}sQBQQ")  # version, type, sequences, documents
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 8  # of each file of a data set, and of files that are larger than
_WHOLE_BYTES = 64 << 20
_NUM_READERS = 16  # reads of a shared file system mostly wait
_MOST_NAMED = 3
# Files of the model in the folder of a tokenizer. They change while the tokenizer stays.
_OF_MODELS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".md"}


def last_part(path: str) -> str:
    """Return the name of a file or folder."""
    return path.rstrip("/").rpartition("/")[2]


def is_path(value: Any) -> bool:
    """Return whether a value names a file: of some settings it may also be what such a file holds."""
    return isinstance(value, str | os.PathLike)


def is_number(word: str) -> bool:
    """Return whether a word of a list of data sets is a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def add_files(
    args: argparse.Namespace,
    of_state: dict[str, Any],
    of_replays: dict[str, Any],
    further: Mapping[str, list[str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the fingerprint and the replay settings with those that are in files, as JSON values.

    One line names the paths of which nothing can be read here, such as those in an object store.

    Args:
        further: lists of data sets that no flag names, by setting.

    Raises:
        ConfigError: if a file that lists data sets cannot be read.
    """
    listed = {name: _listed(name, vars(args)[name]) for name in LISTING_FILES if name in args}
    words = {
        **{name: [*map(str, found)] for name in PATH_LISTS if (found := getattr(args, name, None))},
        **{name: found for name, found in listed.items() if found is not None},
        **{name: [str(path)] for name in PATHS if is_path(path := getattr(args, name, None))},
    }
    replayed = {as_flag(name) for name in words if flag_classes()[name].kind is Kind.REPLAY}
    words = {as_flag(name): found for name, found in words.items()} | dict(further or {})
    paths = [
        word
        for found in words.values()
        for word in found
        if word not in _SPLITS and not is_number(word)
    ]
    with ThreadPoolExecutor(_NUM_READERS) as readers:
        contents = dict(zip(paths, readers.map(content_of, paths), strict=True))
    if unread := [path for path, content in contents.items() if not content]:
        named = ", ".join([*unread[:_MOST_NAMED], *["..."] * (len(unread) > _MOST_NAMED)])
        warn(f"data and tokenizers are compared by name alone where they cannot be read: {named}")
    of_state, of_replays = of_state | {CONTENTS: {}}, of_replays | {CONTENTS: {}}
    for key, found in words.items():
        held = [": ".join(filter(None, (last_part(each), contents.get(each)))) for each in found]
        (of_replays if key in replayed else of_state)[CONTENTS][key] = held
    for name, of_file in listed.items():
        # As versions without contents noted them, which took a protocol for a word.
        parts = [last_part(part) for word in of_file or () for part in word.split("://")]
        of_state[as_flag(name)] = None if of_file is None else parts
    return {"fingerprint": of_state, "replay_settings": of_replays}


def _listed(name: str, path: str | None) -> list[str] | None:
    """Return the words of a file that lists paths, whether as plain text or as JSON."""
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{as_flag(name)}={path} cannot be read ({error}): it must be a text file that lists data sets. "
            "Name a file that rank 0 can read."
        ) from error
    return re.findall(r"[^\s\"\[\]{}:,]+(?:://[^\s\"\[\]{},]+)?", text)


@functools.cache  # training goes on with what it has opened, also after a repair
def content_of(path: str) -> str:
    """Return the content of a data set (by its prefix), a file or a folder; empty if it cannot be read."""
    try:
        if Path(f"{path}.idx").is_file():
            return _content_of_data_set(path)
        if not Path(path).is_dir():
            return _content_of_files([Path(path)]) if Path(path).is_file() else ""
        of_tokenizer = (each for each in Path(path).iterdir() if each.suffix not in _OF_MODELS)
        return _content_of_files(
            sorted(each for each in of_tokenizer if each.is_file() and each.name[0] != ".")
        )
    except (OSError, ValueError, struct.error):
        return ""


def _content_of_data_set(prefix: str) -> str:
    with _open(Path(f"{prefix}.idx")) as file:
        _, _, code, _, num_documents = _HEADER.unpack(file.read(_HEADER.size))
    digest = hashlib.sha256()
    _add(digest, Path(f"{prefix}.idx"), _BLOCK_BYTES * _NUM_BLOCKS)
    num_bytes = _add(digest, Path(f"{prefix}.bin"), _BLOCK_BYTES * _NUM_BLOCKS)
    num_tokens = num_bytes // DType.size(code)
    return (
        f"{num_documents - 1} documents, {num_tokens} tokens of {DType.dtype_from_code(code).__name__}, "
        f"sample {digest.hexdigest()[:16]}"
    )


def _content_of_files(paths: Sequence[Path]) -> str:
    digest, num_bytes = hashlib.sha256(), 0
    for path in paths:
        digest.update(path.name.encode() if len(paths) > 1 else b"")
        num_bytes += _add(digest, path, _WHOLE_BYTES)
    return f"{num_bytes} bytes, sha256 {digest.hexdigest()[:16]}"


def _add(digest: Any, path: Path, most_bytes: int) -> int:
    """Add a file's size and bytes to a digest, of one with more bytes blocks; return the size."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(b"%d " % size)
        if size <= most_bytes:
            digest.update(file.read())
        else:
            for number in range(_NUM_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * number // (_NUM_BLOCKS - 1))
                digest.update(
                    file.read(_BLOCK_BYTES)
                )  # all of them, also where a call reads a part
    return size


@looks_again()
def _open(path: Path) -> BinaryIO:
    return path.open("rb")
