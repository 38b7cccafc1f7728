"""Comparison of a file on disk with what was to be written to it, part by part."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from moe_ft.errors import CorruptStateError

_PIECE_BYTES = 8 << 20


class FilePart(NamedTuple):
    """A part of a file: what it is, for messages, and its bytes."""

    name: str
    num_bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """A file that is written, and may still be on its way to the disk.

    Attributes:
        parts: from its beginning to its end.
        facts: JSON values that the end of the conversion needs of it.
        with_sha256: whether it needs the SHA-256 of the file too.
    """

    path: Path
    parts: Sequence[FilePart]
    facts: Mapping[str, Any]
    with_sha256: bool = False

    def verify(self) -> dict[str, Any]:
        """Compare the file with its parts and wait until it is on the disk; return the facts."""
        sha256 = verify_parts(self.path, self.parts, with_sha256=self.with_sha256)
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        facts = {**self.facts, "parts": self.parts}  # for a conversion that takes it over
        return {**facts, **({"sha256": sha256} if self.with_sha256 else {})}


def write_and_verify(
    numbers: Iterable[int],
    write: Callable[[int], WrittenFile],
    note: Callable[[int, Mapping[str, Any]], None],
) -> None:
    """Write files one after the other, each while the one before is verified on another thread.

    Args:
        note: gets the facts of a verified file. After an error or Ctrl-C too, it gets those of all that are
            written.
    """
    with ThreadPoolExecutor(1, "moe_ft-verify") as verifier:
        pending: deque[tuple[int, Future[dict[str, Any]]]] = deque()

        def note_first() -> None:
            number, facts = pending.popleft()
            note(number, facts.result())

        try:
            for number in numbers:
                pending.append((number, verifier.submit(write(number).verify)))
                if len(pending) > 1:
                    note_first()
        finally:
            while pending:
                note_first()


def verify_parts(path: Path, parts: Iterable[FilePart], *, with_sha256: bool = False) -> str:
    """Compare all parts of a file with it, reading it once; return its SHA-256 if asked for."""
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "moe_ft-sha") as hasher:
        whole, pending = hashlib.sha256(), Future[None]()
        pending.set_result(None)
        for part in parts:
            found, left = xxhash.xxh3_64(), part.num_bytes
            while left:
                buffer = memoryview(bytearray(min(left, _PIECE_BYTES)))
                if not (count := file.readinto(buffer)):
                    break
                found.update(buffer[:count])
                left -= count
                if with_sha256:
                    pending.result()  # at most one piece is hashed while the next one is read
                    pending = hasher.submit(whole.update, buffer[:count])
            if left or found.hexdigest() != part.checksum:
                raise CorruptStateError(
                    f"{path}: {part.name} is not what was written. Is the disk sound?"
                )
        if file.read(1):
            raise CorruptStateError(f"{path} is longer than what was written. Is the disk sound?")
        pending.result()
    return whole.hexdigest() if with_sha256 else ""
