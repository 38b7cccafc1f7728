"""Every unit version that is looked at has the checksum of its index, whichever snapshot it is of."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ft.engine.memory.pool import Pool
from moe_ft.errors import CorruptStateError
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index, check_places, check_units
from tests.unit.moe_ft.builders import WindowState, make_window, put_in_slot

WINDOW = make_window(length=3)
ENTRIES = list(WINDOW.index.entries())


def contents_of(content: bytes) -> dict[str, memoryview]:
    return {"": memoryview(content)}


def flipped(window: WindowState, position: int) -> bytes:
    content = bytearray(window.content)
    content[position] ^= 0x40
    return bytes(content)


def test_window_as_it_was_written_is_right() -> None:
    check_units(WINDOW.index, contents_of(WINDOW.content), "a region")


@pytest.mark.parametrize("number", range(len(ENTRIES)))
@pytest.mark.parametrize("place", [lambda unit: 0, lambda unit: unit.num_bytes - 1])
def test_flipped_byte_at_either_end_of_any_version_is_found_and_its_unit_named(
    number: int, place: Callable[[UnitEntry], int]
) -> None:
    name, unit = ENTRIES[number]
    content = flipped(WINDOW, unit.offset + place(unit))
    with pytest.raises(CorruptStateError, match=f"a region: unit {name} does not match"):
        check_units(WINDOW.index, contents_of(content), "a region")


@pytest.mark.parametrize("position", [0, 100, WINDOW.index.header_bytes - 1])
def test_flipped_byte_of_the_header_is_found(position: int) -> None:
    with pytest.raises(CorruptStateError, match="a region: the safetensors header does not match"):
        check_units(WINDOW.index, contents_of(flipped(WINDOW, position)), "a region")


def test_header_is_looked_at_also_where_no_unit_is() -> None:
    with pytest.raises(CorruptStateError, match="the safetensors header does not match"):
        check_units(WINDOW.index, contents_of(flipped(WINDOW, 9)), "a region", [])


def test_what_lies_between_units_may_be_anything() -> None:
    end = WINDOW.layout.ends[-1]
    check_units(WINDOW.index, contents_of(flipped(WINDOW, end)), "a region")


def test_versions_that_are_not_asked_for_may_be_wrong() -> None:
    name, unit = ENTRIES[-1]
    others = [entry for entry in ENTRIES if entry[1] is not unit]
    check_units(WINDOW.index, contents_of(flipped(WINDOW, unit.offset)), "a region", others)


def test_versions_of_later_snapshots_are_not_those_of_a_window_up_to_an_earlier_one() -> None:
    begin, end = WINDOW.stretch(1)[0], len(WINDOW.content)
    content = WINDOW.content[:begin] + bytes(end - begin)
    check_units(WINDOW.up_to(1), contents_of(content), "a region")
    with pytest.raises(CorruptStateError, match="does not match its checksum"):
        check_units(WINDOW.up_to(2), contents_of(content), "a region")


def test_content_that_is_cut_off_is_found() -> None:
    name, unit = ENTRIES[0]
    content = WINDOW.content[: unit.offset + unit.num_bytes - 1]
    with pytest.raises(CorruptStateError, match=f"unit {name} does not match"):
        check_places(contents_of(content), "a region", ENTRIES[:1])


@pytest.fixture
def pooled(tmp_path: Path) -> tuple[Index, Pool]:
    """Return the index of a snapshot with a unit in a pool, and the pool."""
    pool = Pool(tmp_path, 4 * 33, 2)
    pool.open()
    name, unit = put_in_slot(pool, 1, 0)
    index = make_window(length=1).index
    index.units[name] = unit
    return index, pool


def test_versions_in_a_file_that_is_not_there_are_left_out(pooled: tuple[Index, Pool]) -> None:
    index, pool = pooled
    pool.mapping[pool.offset_of(1)] ^= 0x40
    check_units(index, contents_of(make_window(length=1).content), "a region")


def test_versions_in_another_file_that_is_there_are_looked_at(pooled: tuple[Index, Pool]) -> None:
    index, pool = pooled
    contents = {**contents_of(make_window(length=1).content), pool.name: memoryview(pool.mapping)}
    check_units(index, contents, "a region")
    pool.mapping[pool.offset_of(1)] ^= 0x40
    with pytest.raises(CorruptStateError, match="unit layer.9.expert.0 does not match"):
        check_units(index, contents, "a region")
