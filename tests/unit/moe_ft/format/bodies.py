"""Indexes and manifests of all kinds, and changes that spoil them."""

import json
from collections.abc import Callable
from typing import Any

import msgspec

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import FORMAT, checksum, decode, encode
from moe_ft.format.entries import FileEntry
from moe_ft.format.index import Index
from moe_ft.format.manifest import Manifest, UnitSource
from tests.unit.moe_ft.builders import make_identity, make_state, make_window

ESCAPES = ["../x", "/x", "a/../../b", "..", "a/..", "", ".", "a\\..\\b", "a\0b", "//x"]


def small_index() -> Index:
    """Return an index in which every part of the schema occurs once."""
    index, _ = make_state(num_elements=3)
    name = min(index.units)
    return msgspec.structs.replace(index, units={name: index.units[name]})


def small_window() -> Index:
    """Return the index of a window in which every part of the schema occurs."""
    index = make_window(length=2, num_elements=3).index
    at_first, at_last = index.compute
    name = min(at_first)
    return msgspec.structs.replace(
        index, units={name: index.units[name]}, compute=({name: at_first[name]}, at_last)
    )


def small_manifest() -> Manifest:
    file = FileEntry(
        rank=0,
        index="iter_0000005/rank_00000_01234567.json",
        index_checksum="0123456789abcdef",
        data="iter_0000005/rank_00000_01234567.safetensors",
        num_bytes=4160,
    )
    return Manifest(
        format=FORMAT,
        identity=make_identity(),
        iteration=5,
        created_s=1.7e9,
        files=(file,),
        units={"embedding": UnitSource(iteration=5, level="full", files=(0,))},
    )


def seal(body: object) -> bytes:
    """Return a file whose checksum is right, whatever its body is; bytes are taken as they are."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b'{"xxh3_64":"%s","body":%s}\n' % (checksum(encoded).encode(), encoded)


def body_of(decoded: Index | Manifest) -> Any:
    return json.loads(encode(decoded))["body"]


def is_refused(content: bytes, kind: type[Index] | type[Manifest]) -> bool:
    try:
        decode(content, kind, "a file")
    except CorruptStateError:
        return True
    return False


Change = Callable[[Any], object]


def change(path: str, value: object) -> Change:
    """Return a function that sets the value at a dotted path of a body."""

    def apply(body: Any) -> None:
        *parents, last = path.split(".")
        for name in parents:
            body = body[int(name) if isinstance(body, list) else name]
        body[int(last) if isinstance(body, list) else last] = value

    return apply
