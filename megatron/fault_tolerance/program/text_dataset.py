"""Conversion of text files into Megatron's indexed dataset (.bin, .idx).

The default tokens are bytes: nothing is downloaded, and the vocabulary is 256. The document separator is the
byte 0xFF, which never occurs in UTF-8. Megatron's NullTokenizer with a vocabulary of 256 takes it for the end
of a document. forward_step.py feeds the dataset to training; tools/prepare_text.py is the command line.
"""

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from moe_ft.errors import ConfigError

BYTE_VOCABULARY = 256
END_OF_DOCUMENT_BYTE = 0xFF
_PREPARE_DEADLINE_S = 3600
_MAX_DOCUMENT_CHARACTERS = 16384
_FORMAT = 1  # part of the cache key; increase it when the tokens of the same text change

Encode = Callable[[str], np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSource:
    """Text and its tokenizer.

    Attributes:
        tokenizer: directory or name of a Hugging Face tokenizer; None for bytes.
    """

    paths: tuple[str, ...]
    tokenizer: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetSummary:
    """Size of a dataset that was written."""

    num_documents: int
    num_tokens: int
    num_skipped_files: int
    vocabulary_size: int


def find_files(paths: Iterable[str]) -> list[Path]:
    """Return the files at or below some paths in sorted order; hidden files only if named.

    Raises:
        ConfigError: if a path does not exist or there is no file.
    """
    paths = tuple(paths)
    files: list[Path] = []
    for name in paths:
        path = Path(name)
        if path.is_dir():
            found = (p for p in path.rglob("*") if p.is_file())
            visible = (p for p in found if not _is_hidden(p.relative_to(path)))
            files += sorted(visible)
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError(
                f"text path {name} does not exist. Give a text file or a directory of text files."
            )
    if not files:
        raise ConfigError(
            f"text path {' '.join(paths)} holds no file. Give a directory with text files in it."
        )
    return files


def read_text(path: Path) -> str | None:
    """Return a file's text, or None if it is not UTF-8 text, is empty or cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return None if not text.strip() or "\0" in text else text


def split_documents(text: str) -> Iterator[str]:
    """Yield the documents that a text is cut into: at line ends, at most 16384 characters each.

    Megatron divides documents, not tokens, between training and validation (--split): a book in one file
    would belong entirely to one of them.
    """
    start = 0
    while len(text) - start > _MAX_DOCUMENT_CHARACTERS:
        end = text.rfind("\n", start, start + _MAX_DOCUMENT_CHARACTERS) + 1
        if end == 0:  # a line longer than a document
            end = start + _MAX_DOCUMENT_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]


def write_dataset(
    source: TextSource, prefix: Path, progress: Callable[[list[Path]], Iterable[Path]] = iter
) -> DatasetSummary:
    """Write ``prefix``.bin and ``prefix``.idx; both appear only when they are complete.

    Args:
        source: each file is one document; a long file is several (see `split_documents`).
        progress: wraps the iteration over files, for a progress bar.

    Raises:
        ConfigError: if there is no readable text, or the tokenizer or the output cannot be used.
    """
    files = find_files(source.paths)
    encode, vocabulary_size = _encoder(source.tokenizer)
    token_type = np.uint16 if vocabulary_size <= np.iinfo(np.uint16).max + 1 else np.int32
    parts = {suffix: Path(f"{prefix}{suffix}.{os.getpid()}.part") for suffix in (".bin", ".idx")}
    num_text_files = num_documents = num_tokens = 0
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        builder = IndexedDatasetBuilder(str(parts[".bin"]), dtype=token_type)
        for text in filter(None, map(read_text, progress(files))):
            num_text_files += 1
            for document in split_documents(text):
                tokens = encode(document)
                builder.add_document(tokens, [len(tokens)])
                num_documents, num_tokens = num_documents + 1, num_tokens + len(tokens)
        builder.finalize(str(parts[".idx"]))
        if num_documents:
            for suffix, part in parts.items():
                part.replace(f"{prefix}{suffix}")
    except OSError as error:
        raise ConfigError(
            f"dataset prefix {prefix} cannot be written: {error}. Name a directory that can be "
            "written to and has room."
        ) from error
    finally:
        for part in parts.values():
            with suppress(OSError):
                part.unlink()
    if not num_documents:
        raise ConfigError(
            f"text path {' '.join(source.paths)}: none of its files ({len(files)}) holds UTF-8 text. "
            "Give a directory with text files in it."
        )
    return DatasetSummary(
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_skipped_files=len(files) - num_text_files,
        vocabulary_size=vocabulary_size,
    )


def prepare_cached(source: TextSource, cache_dir: str | None) -> Path:
    """Return the prefix of the dataset made from a text; prepare it if the cache does not have it.

    The cache key covers the tokenizer and the path, size and modification time of every file. Several
    processes may call this at once: one prepares the dataset, the others wait for it. Without a directory for
    the cache, the dataset is in the user's cache directory.
    """
    root = Path(cache_dir) if cache_dir else _user_cache()
    prefix = root / "text" / _cache_key(source) / "text"
    summary_path = prefix.with_suffix(".json")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{prefix}.lock", timeout=_PREPARE_DEADLINE_S):
            if not summary_path.is_file():
                summary = write_dataset(source, prefix)
                part = summary_path.with_suffix(".json.part")
                part.write_text(json.dumps(asdict(summary)))
                part.replace(summary_path)
    except Timeout as error:
        raise ConfigError(
            f"--text-dir {' '.join(source.paths)}: another process has been preparing it for more "
            f"than {_PREPARE_DEADLINE_S} s. Remove {prefix}.lock if that process is gone."
        ) from error
    except OSError as error:
        raise ConfigError(
            f"--data-cache-path {root} cannot be written: {error}. Name a directory that can be."
        ) from error
    return prefix


def _encoder(tokenizer: str | None) -> tuple[Encode, int]:
    """Return a function from text to tokens, document end included, and the vocabulary's size."""
    if tokenizer is None:
        # torch warns about numpy arrays over immutable bytes: copy, to the right type at the same time.
        end = bytes([END_OF_DOCUMENT_BYTE])
        return (
            lambda text: np.frombuffer(text.encode() + end, np.uint8).astype(np.uint16),
            BYTE_VOCABULARY,
        )
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"tokenizer {tokenizer} needs the package transformers, which is not installed. "
            "Install it (pip install transformers), or leave the tokenizer out for bytes."
        ) from error
    try:
        encoder = transformers.AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"tokenizer {tokenizer} cannot be loaded: {reason} "
            "Give the directory of a Hugging Face tokenizer."
        ) from error
    end = encoder.eos_token_id
    if end is None:
        raise ConfigError(
            f"tokenizer {tokenizer} has no end-of-sequence token, which separates documents. "
            "Give a tokenizer that has one."
        )
    return (
        lambda text: np.array([*encoder.encode(text, add_special_tokens=False), end], np.int64),
        len(encoder),
    )


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "moe_ft"


def _cache_key(source: TextSource) -> str:
    digest = hashlib.sha256(f"{_FORMAT} {source.tokenizer}".encode())
    for path in find_files(source.paths):
        stat = path.stat()
        digest.update(f"\n{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)
