"""Indexes: those that break the schema or the rules of windows are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.memory.regions import UnitPool
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import decode, encode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index, IndexHead, check_places, check_units
from moe_ft.format.manifest import Manifest
from tests.unit.moe_ft.builders import WindowState, make_window, put_in_slot
from tests.unit.moe_ft.format.bodies import (
    ESCAPES,
    Change,
    body_of,
    change,
    seal,
    small_index,
    small_manifest,
)
from tests.unit.moe_ft.format.test_checksums import meeting


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("rank", "0"), "form of Index.*rank"),
        (change("iteration", -5), "form of Index.*iteration"),
        (change("header_bytes", 10**9), "the header reaches beyond the end"),
        (change("header_checksum", "x" * 16), "form of Index.*header_checksum"),
        (change("surprise", 1), "form of Index.*surprise"),
        (change("identity.surprise", 1), "form of Index.*surprise"),
        (change("identity.world_size", 0), "form of Index.*world_size"),
        (change("identity.history", []), "belongs to no incarnation"),
        (change("identity.history", [[0, -1]]), "form of Index.*history"),
        (change("complete_iteration", -1), "form of Index.*complete_iteration"),
        (lambda body: body.pop("node"), "form of Index.*node"),
        (change("units.embedding.offset", -64), "form of Index.*offset"),
        (change("units.embedding.num_bytes", 10**9), "unit embedding reaches beyond the end"),
        (change("units.embedding.offset", 10**9), "unit embedding reaches beyond the end"),
        (change("units.embedding.level", "half"), "form of Index.*level"),
        (change("units.embedding.checksum", "123"), "form of Index.*checksum"),
        (change("units.embedding.tensors.0.4", "float"), "form of Index.*tensors"),
        (change("units.embedding.tensors.0.2", 4), "unit embedding has an impossible tensor"),
        (change("units.embedding.tensors.0.5", 10**6), "unit embedding has an impossible tensor"),
        (change("records", []), "holds no record of its iteration 5"),
        (change("records.0.iteration", 4), "holds no record of its iteration 5"),
        (change("records.0.grad_norm", "big"), "form of Index.*grad_norm"),
        (change("records.0.surprise", 1), "form of Index.*surprise"),
        (change("file", "sub/region_0.safetensors"), "is not in the directory of its index"),
        (change("units.embedding.incarnation", -1), "form of Index.*incarnation"),
        (change("units.embedding.file", "../pool"), "names '../pool', which leaves its directory"),
        (change("units.embedding.routed_tokens", -1), "form of Index.*routed_tokens"),
        (change("units.embedding.gaps", [[0, -1]]), "form of Index.*gaps"),
        (change("origins", {"a": "123"}), "form of Index.*origins"),
        (change("window", 0), "form of Index.*window"),
        (change("num_snapshots", 0), "form of Index.*num_snapshots"),
        (change("num_snapshots", 2), "holds more snapshots than its window has"),
    ],
)
def test_index_that_breaks_the_schema_is_refused_and_the_field_named(
    spoil: Change, message: str
) -> None:
    body = body_of(small_index())
    spoil(body)
    with pytest.raises(CorruptStateError, match=message):
        decode(seal(body), Index, "a file")


FIRST, SECOND, LAST = "layer.0.expert.0", "layer.0.expert.2", "embedding"


def remove(name: str, position: int) -> Change:
    """Return a function that removes an item of a list in a body."""
    return lambda body: body[name].pop(position)


def swap_records(body: Any) -> None:
    body["records"][0], body["records"][1] = body["records"][1], body["records"][0]


def repeat_record(body: Any) -> None:
    body["records"].insert(0, body["records"][0])


def add_snapshot(body: Any) -> None:
    body["compute"].append({})


def forget_the_first_snapshot(body: Any) -> None:
    # What is left is a window of the same length that claims to begin an iteration later.
    body["records"].pop(0)
    body["compute"].pop(0)
    body["num_snapshots"] = 2


NOT_CONSECUTIVE = "does not hold 3 consecutive snapshots up to iteration 7"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (remove("records", 0), NOT_CONSECUTIVE),
        (remove("records", 1), NOT_CONSECUTIVE),
        (remove("records", 2), "holds no record of its iteration 7"),
        (swap_records, NOT_CONSECUTIVE),
        (repeat_record, NOT_CONSECUTIVE),
        (change("records.0.iteration", 4), NOT_CONSECUTIVE),
        (change("records.1.iteration", 7), NOT_CONSECUTIVE),
        (change("iteration", 8), "holds no record of its iteration 8"),
        (change("num_snapshots", 2), "does not hold 2 consecutive snapshots up to iteration 7"),
        (change("window", 2), "holds more snapshots than its window has"),
        (change("compute", []), NOT_CONSECUTIVE),
        (remove("compute", 0), NOT_CONSECUTIVE),
        (add_snapshot, NOT_CONSECUTIVE),
        (forget_the_first_snapshot, "does not hold 2 consecutive snapshots up to iteration 7"),
        (change(f"compute.0.{LAST}.iteration", 4), NOT_CONSECUTIVE),
        (change(f"compute.0.{LAST}.iteration", 8), NOT_CONSECUTIVE),
        (change(f"compute.1.{LAST}.offset", 10**6), "unit embedding reaches beyond the end"),
        (change(f"compute.1.{LAST}.tensors.0.3", 10**6), "unit embedding has an impossible tensor"),
        (change(f"compute.1.{LAST}.file", "../pool"), "which leaves its directory"),
    ],
)
def test_index_that_breaks_the_rules_of_windows_is_refused(spoil: Change, message: str) -> None:
    body = body_of(make_window().index)
    spoil(body)
    with pytest.raises(CorruptStateError, match=message):
        decode(seal(body), Index, "a file")


@pytest.mark.parametrize("iteration", [4, 8])
@pytest.mark.parametrize("name", [FIRST, SECOND, LAST])
def test_unit_outside_of_its_window_is_refused(name: str, iteration: int) -> None:
    body = body_of(make_window().index)
    body["units"][name]["iteration"] = iteration
    with pytest.raises(CorruptStateError, match=NOT_CONSECUTIVE):
        decode(seal(body), Index, "a file")


@pytest.mark.parametrize(("length", "num_snapshots"), [(1, 1), (2, 1), (3, 1), (3, 2), (4, 4)])
def test_window_up_to_any_snapshot_is_read_as_it_was_written(
    length: int, num_snapshots: int
) -> None:
    index = make_window(length=length).up_to(num_snapshots)
    assert decode(encode(index), Index, "a file") == index


@pytest.mark.parametrize("kind", [Index, IndexHead])
def test_index_that_does_not_speak_of_windows_is_of_a_whole_one(
    kind: type[Index] | type[IndexHead],
) -> None:
    body = body_of(small_index())
    for name in ("window", "num_snapshots", "compute"):
        del body[name]
    assert decode(seal(body), kind, "a file").is_whole


def test_unit_in_another_file_may_lie_behind_the_end_of_the_indexs_own() -> None:
    body = body_of(small_index())
    body["units"]["embedding"].update(file="pool_1x64.safetensors", offset=10**9)
    assert decode(seal(body), Index, "a file").units["embedding"].offset == 10**9


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("field", ["index", "data"])
def test_older_file_elsewhere_is_refused_in_an_index_and_in_a_manifest(
    field: str, path: str
) -> None:
    manifest = body_of(small_manifest())
    entry = {**manifest["files"][0], field: path}
    manifest["older"] = [entry]
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(manifest), Manifest, "a file")
    index = body_of(small_index())
    index["older"] = [entry]
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(index), Index, "a file")


@pytest.mark.parametrize("path", ESCAPES)
def test_index_whose_data_file_is_elsewhere_is_refused(path: str) -> None:
    body = body_of(small_index()) | {"file": path}
    with pytest.raises(CorruptStateError, match="which leaves its directory"):
        decode(seal(body), Index, "a file")


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


def test_first_of_several_damaged_units_is_named_whichever_thread_finds_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = meeting(monkeypatch, 2)
    entries = sorted(ENTRIES[:4], key=lambda entry: entry[1].num_bytes)
    content = bytearray(WINDOW.content)
    for _, unit in entries[1:]:
        content[unit.offset] ^= 0x40
    with pytest.raises(CorruptStateError, match=f"unit {entries[1][0]} does not match"):
        check_places(contents_of(bytes(content)), "a region", entries)
    assert len(threads) > 1


def test_versions_that_are_not_asked_for_may_be_wrong() -> None:
    name, unit = ENTRIES[-1]
    others = [entry for entry in ENTRIES if entry[1] is not unit]
    check_units(WINDOW.index, contents_of(flipped(WINDOW, unit.offset)), "a region", others)


def test_content_that_is_cut_off_is_found() -> None:
    name, unit = ENTRIES[0]
    content = WINDOW.content[: unit.offset + unit.num_bytes - 1]
    with pytest.raises(CorruptStateError, match=f"unit {name} is cut short"):
        check_places(contents_of(content), "a region", ENTRIES[:1])


@pytest.fixture
def pooled(tmp_path: Path) -> tuple[Index, UnitPool]:
    """Return the index of a snapshot with a unit in a pool, and the pool."""
    pool = UnitPool(tmp_path, 4 * 33, 2)
    pool.open()
    name, unit = put_in_slot(pool, 1, 0)
    index = make_window(length=1).index
    index.units[name] = unit
    return index, pool


def test_versions_in_a_file_that_is_not_there_are_left_out(pooled: tuple[Index, UnitPool]) -> None:
    index, pool = pooled
    pool.mapping[pool.offset_of(1)] ^= 0x40
    check_units(index, contents_of(make_window(length=1).content), "a region")
