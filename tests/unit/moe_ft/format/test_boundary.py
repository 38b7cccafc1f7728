"""Indexes of boundary logs: what is written is read again, and what cannot be is refused."""

import msgspec
import pytest

from moe_ft.errors import CorruptStateError
from moe_ft.format.boundary import BoundaryIndex, Direction, SentTensor
from moe_ft.format.encoding import FORMAT, decode, encode
from tests.unit.moe_ft.builders import make_identity

SENT = SentTensor(
    neighbour=3,
    direction=Direction.FORWARD,
    ordinal=0,
    shape=(4, 2, 8),
    dtype="BF16",
    offset=4096,
    checksum="0" * 16,
)
INDEX = BoundaryIndex(
    format=FORMAT,
    identity=make_identity(world_size=4),
    rank=1,
    node="node",
    iteration=7,
    file="boundary_0.safetensors",
    file_bytes=4096 + 256,
    header_bytes=4096,
    header_checksum="0" * 16,
    sent=(SENT, msgspec.structs.replace(SENT, direction=Direction.BACKWARD, offset=4224)),
)


def test_index_is_read_as_it_was_written() -> None:
    assert decode(encode(INDEX), BoundaryIndex, "here") == INDEX
    assert [each.num_bytes for each in INDEX.sent] == [128, 128]
    assert [each.name for each in INDEX.sent] == ["forward/to_00003/0", "backward/to_00003/0"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sent": (SENT, SENT)}, "a tensor twice"),
        ({"file": "../boundary_0.safetensors"}, "leaves its directory"),
        ({"file": "other/boundary_0.safetensors"}, "a file elsewhere"),
        ({"file_bytes": 4096 + 127}, "forward/to_00003/0 lies outside its file"),
        ({"header_bytes": 4097}, "lies outside its file"),
        ({"sent": (msgspec.structs.replace(SENT, dtype="F4"),)}, "unknown type F4"),
    ],
)
def test_index_that_cannot_be_right_is_refused(changes: dict[str, object], reason: str) -> None:
    wrong = msgspec.structs.replace(INDEX, **changes)
    with pytest.raises(CorruptStateError, match=reason):
        decode(encode(wrong), BoundaryIndex, "here")
