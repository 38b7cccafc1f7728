"""A file is compared with every part of what was written, from its beginning to its end."""

import hashlib
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.convert.verifying import FilePart, WrittenFile, verify_parts, write_and_verify
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import checksum

CONTENTS = {"first": bytes(range(200)), "second": bytes(20_000_000), "third": b"x"}
PARTS = [FilePart(name, len(each), checksum(each)) for name, each in CONTENTS.items()]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("files") / "file"
    found.write_bytes(b"".join(CONTENTS.values()))
    return found


def test_sound_file_has_the_checksum_that_other_tools_compute(path: Path) -> None:
    expected = hashlib.sha256(b"".join(CONTENTS.values())).hexdigest()
    assert verify_parts(path, PARTS, with_sha256=True) == expected
    assert verify_parts(path, PARTS) == ""


@given(st.sampled_from(PARTS), st.floats(0, 1, exclude_max=True))
def test_byte_that_is_another_one_is_found_in_its_part(
    path: Path, part: FilePart, at: float
) -> None:
    before = PARTS[: PARTS.index(part)]
    position = sum(each.num_bytes for each in before) + int(at * part.num_bytes)
    with path.open("r+b") as file:
        for _ in range(2):  # there and back
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1]))
            file.flush()
            if byte == b"".join(CONTENTS.values())[position]:
                with pytest.raises(CorruptStateError, match=f"file: {part.name} is not what was"):
                    verify_parts(path, PARTS)


def test_file_that_is_too_short_or_too_long_is_found(path: Path) -> None:
    with pytest.raises(CorruptStateError, match="file: fourth is not what was written"):
        verify_parts(path, [*PARTS, FilePart("fourth", 1, checksum(b"y"))])
    with pytest.raises(CorruptStateError, match="is longer than what was written"):
        verify_parts(path, PARTS[:-1])


def file_of(folder: Path, number: int, content: bytes = b"content") -> WrittenFile:
    path = folder / str(number)
    path.write_bytes(content)
    part = FilePart("all", 7, checksum(b"content"))
    return WrittenFile(path=path, parts=[part], facts={"number": number}, with_sha256=True)


def test_file_is_written_while_the_one_before_is_verified(tmp_path: Path) -> None:
    is_verifying = threading.Event()
    noted: list[int] = []

    class Watched(WrittenFile):
        def verify(self) -> dict[str, Any]:
            is_verifying.set()
            return super().verify()

    def write(number: int) -> WrittenFile:
        assert number == 0 or is_verifying.wait(120)
        is_verifying.clear()
        assert noted == list(range(number - 1))
        file = file_of(tmp_path, number)
        return Watched(path=file.path, parts=file.parts, facts=file.facts, with_sha256=True)

    def note(number: int, facts: Mapping[str, Any]) -> None:
        assert (
            facts["sha256"] == hashlib.sha256(b"content").hexdigest() and facts["number"] == number
        )
        noted.append(number)

    write_and_verify(range(4), write, note)
    assert noted == [0, 1, 2, 3]


def test_what_is_written_when_it_ends_early_is_verified_and_noted(tmp_path: Path) -> None:
    def write(number: int) -> WrittenFile:
        if number == 2:
            raise KeyboardInterrupt
        return file_of(tmp_path, number)

    noted: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        write_and_verify(range(4), write, lambda number, _: noted.append(number))
    assert noted == [0, 1]


def test_file_that_reads_differently_is_not_noted(tmp_path: Path) -> None:
    def write(number: int) -> WrittenFile:
        return file_of(tmp_path, number, b"c0ntent" if number == 1 else b"content")

    noted: list[int] = []
    with pytest.raises(CorruptStateError, match="1: all is not what was written"):
        write_and_verify(range(4), write, lambda number, _: noted.append(number))
    assert noted == [0, 2]
