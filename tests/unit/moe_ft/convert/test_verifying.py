"""A file is compared with every part of what was written, from its beginning to its end."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ft.convert.verifying import Part, verify_parts, write_all
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import checksum

CONTENTS = {"first": bytes(range(200)), "second": bytes(20_000_000), "third": b"x"}
PARTS = [Part(name, len(each), checksum(each)) for name, each in CONTENTS.items()]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("files") / "file"
    with found.open("wb", buffering=0) as file:
        for each in CONTENTS.values():
            write_all(file, memoryview(each))
    return found


def test_sound_file_has_the_checksum_that_other_tools_compute(path: Path) -> None:
    expected = hashlib.sha256(b"".join(CONTENTS.values())).hexdigest()
    assert verify_parts(path, PARTS, with_sha256=True) == expected
    assert verify_parts(path, PARTS) == ""


@given(st.sampled_from(PARTS), st.floats(0, 1, exclude_max=True))
def test_byte_that_is_another_one_is_found_in_its_part(path: Path, part: Part, at: float) -> None:
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
        verify_parts(path, [*PARTS, Part("fourth", 1, checksum(b"y"))])
    with pytest.raises(CorruptStateError, match="is longer than what was written"):
        verify_parts(path, PARTS[:-1])
