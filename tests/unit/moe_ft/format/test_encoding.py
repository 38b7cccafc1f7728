"""Encoding: written bodies are read; anything else is refused."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import (
    check_path,
    checksum,
    convert_leaves,
    decode,
    encode,
    finite_or_name,
)
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest
from tests.unit.moe_ft.format.bodies import (
    ESCAPES,
    body_of,
    is_refused,
    seal,
    small_index,
    small_manifest,
    small_window,
)

EACH = pytest.mark.parametrize(
    ("content", "kind"),
    [
        (encode(small_index()), Index),
        (encode(small_window()), Index),
        (encode(small_manifest()), Manifest),
    ],
    ids=["index", "window", "manifest"],
)


@EACH
def test_file_is_json_with_the_checksum_of_its_body_and_read_as_it_was_written(
    content: bytes, kind: type[Any]
) -> None:
    assert encode(decode(content, kind, "a file")) == content
    assert list(json.loads(content)) == ["xxh3_64", "body"]
    body = content.split(b'"body":', 1)[1].removesuffix(b"}\n")
    assert json.loads(content)["xxh3_64"] == checksum(body)


def test_first_index_is_read_by_several_threads_at_once(tmp_path: Path) -> None:
    # A process of its own: msgspec ended it with SIGSEGV when a thread met types that another was building.
    (tmp_path / "index.json").write_bytes(encode(small_index()))
    code = """
import importlib, sys, threading
sys.setswitchinterval(1e-6)
content = open(sys.argv[1], "rb").read()
for _ in range(40):
    for name in [name for name in sys.modules if name.startswith("moe_ft.format")]:
        del sys.modules[name]
    encoding = importlib.import_module("moe_ft.format.encoding")
    kind = importlib.import_module("moe_ft.format.index").Index
    barrier = threading.Barrier(4)
    def read():
        barrier.wait()
        encoding.decode(content, kind, "a file")
    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "index.json")], check=True)


@EACH
@pytest.mark.parametrize("mask", [0x01, 0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80, 0xFF])
def test_file_with_any_flipped_byte_is_refused(
    content: bytes, kind: type[Index] | type[Manifest], mask: int
) -> None:
    accepted = []
    for position, byte in enumerate(content):
        flipped = content[:position] + bytes([byte ^ mask]) + content[position + 1 :]
        if not is_refused(flipped, kind):
            accepted.append(position)
    assert accepted == []


@EACH
def test_file_that_is_cut_off_anywhere_is_refused(
    content: bytes, kind: type[Index] | type[Manifest]
) -> None:
    assert [end for end in range(len(content)) if not is_refused(content[:end], kind)] == []


@EACH
@pytest.mark.parametrize("garbage", [b"\n", b" ", b"}\n", b"\0"])
def test_file_with_something_behind_its_end_is_refused(
    content: bytes, kind: type[Index] | type[Manifest], garbage: bytes
) -> None:
    assert is_refused(content + garbage, kind)


def test_manifest_in_the_place_of_an_index_is_refused() -> None:
    with pytest.raises(CorruptStateError, match="a file does not have the form of Index"):
        decode(encode(small_manifest()), Index, "a file")


def test_file_of_another_format_is_refused_with_both_versions() -> None:
    body = body_of(small_index()) | {"format": "moe_ft/2"}
    with pytest.raises(
        CorruptStateError, match="has format 'moe_ft/2', this version reads moe_ft/1"
    ):
        decode(seal(body), Index, "a file")


@pytest.mark.parametrize("body", [None, 1, "text", [], {}, [1, 2], True, b'{"format":"\xff"}'])
def test_body_that_is_no_object_of_the_schema_is_refused(body: object) -> None:
    assert is_refused(seal(body), Index)
    assert is_refused(seal(body), Manifest)


@pytest.mark.parametrize("path", ESCAPES)
def test_path_that_leaves_its_directory_is_refused_by_name(path: str) -> None:
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        check_path(path, "a file")


@pytest.mark.parametrize("path", ["a", "a/b.json", "iter_0000001/rank_00000_ab.json", "..a/b.."])
def test_path_inside_of_its_directory_is_accepted(path: str) -> None:
    check_path(path, "a file")


@pytest.mark.parametrize(("name", "kind"), [("index", Index), ("manifest", Manifest)])
def test_file_of_an_earlier_version_is_read_and_written_again_byte_for_byte(
    name: str, kind: type[Index] | type[Manifest]
) -> None:
    # The files hold every field of the schemas, with a value other than its default.
    content = (Path(__file__).parent / "written" / f"{name}.json").read_bytes()
    assert encode(decode(content, kind, name)) == content


@pytest.mark.parametrize("value", [0.0, -1.5, 1e300, 7, True, None, "nan", [math.inf]])
def test_value_that_is_no_infinite_float_stays(value: object) -> None:
    assert finite_or_name(value) is value


@pytest.mark.parametrize("name", ["nan", "inf", "-inf"])
def test_float_that_is_not_finite_becomes_its_name(name: str) -> None:
    assert finite_or_name(float(name)) == name


def test_leaves_at_any_depth_are_converted_once() -> None:
    nested = {"a": (1, [2, {3: 4}]), 5: 6}
    assert convert_leaves(nested, lambda leaf: -leaf) == {"a": [-1, [-2, {"3": -4}]], "5": -6}


def test_leaf_that_is_converted_to_a_container_is_not_entered() -> None:
    assert convert_leaves([1], lambda leaf: {leaf: (leaf,)}) == [{1: (1,)}]
