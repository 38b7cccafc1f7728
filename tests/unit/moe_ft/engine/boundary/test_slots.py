"""Slots of a boundary log, and the headers of their files."""

from pathlib import Path

import pytest
from safetensors import safe_open

from moe_ft.engine.boundary.slots import FILE_NAME, INDEX_NAME, BoundarySlot, make_header
from moe_ft.engine.memory.job_directory import index_paths, own_directory
from moe_ft.errors import SnapshotError
from moe_ft.format.boundary import Direction, SentTensor
from moe_ft.planning.boundary_log import header_bytes

HEADER, SIZE = 4096, 4096 + 1024


def sent(ordinal: int, offset: int) -> SentTensor:
    return SentTensor(
        neighbour=99999,
        direction=Direction.BACKWARD,
        ordinal=ordinal,
        shape=(3, 1, 5),
        dtype="BF16",
        offset=offset,
        checksum="0" * 16,
    )


def test_header_declares_tensors_and_the_gaps_between_them(tmp_path: Path) -> None:
    header = make_header([sent(0, HEADER), sent(1, HEADER + 64)], HEADER, SIZE)
    path = tmp_path / "file.safetensors"
    path.write_bytes(header + bytes(SIZE - HEADER))
    with safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == {
            "backward/to_99999/0",
            "backward/to_99999/1",
            f"__unused__/{HEADER + 30}",
            f"__unused__/{HEADER + 94}",
        }
        assert opened.get_slice("backward/to_99999/1").get_shape() == [3, 1, 5]


def test_header_of_as_many_tensors_as_were_planned_fits() -> None:
    count = 5000
    size = header_bytes(count)
    tensors = [
        SentTensor(
            neighbour=10**7,
            direction=Direction.BACKWARD,
            ordinal=10**6 + number,
            shape=(2**30, 2**20, 2**20),
            dtype="F8_E4M3",
            offset=size + number * 2**72,
            checksum="0" * 16,
        )
        for number in range(count)
    ]
    assert len(make_header(tensors, size, size + count * 2**72)) == size


def test_header_of_too_many_tensors_is_refused() -> None:
    with pytest.raises(SnapshotError, match="the header of 100 tensors takes"):
        make_header([sent(number, HEADER + 64 * number) for number in range(100)], HEADER, SIZE * 9)


def test_slot_without_an_index_holds_nothing_and_one_of_another_size_is_emptied(
    tmp_path: Path,
) -> None:
    slot = BoundarySlot(tmp_path, 0, SIZE)
    slot.open()
    slot.commit(b"header", b"index")
    assert slot.index_path.read_bytes() == b"index"
    assert bytes(slot.mapping[:6]) == b"header"
    slot.close()
    larger = BoundarySlot(tmp_path, 0, SIZE + 4096)
    larger.open()
    assert not larger.index_path.exists()
    larger.close()


def test_names_are_those_of_no_region(tmp_path: Path) -> None:
    slot = BoundarySlot(own_directory(tmp_path, 0), 3, SIZE)
    slot.open()
    slot.commit(b"header", b"index")
    assert INDEX_NAME.fullmatch(slot.index_path.name)
    assert FILE_NAME.fullmatch(slot.data_path.name)
    assert index_paths(tmp_path) == ([], [])  # no state, so nothing that could be damaged
    slot.close()
