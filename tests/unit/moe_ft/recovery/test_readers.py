"""State read from any tier is the state that was written, or an error."""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import torch

from moe_ft.engine.links import parts as travel
from moe_ft.engine.links import streams
from moe_ft.engine.links.messages import GetParts
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import encode
from moe_ft.recovery.inventory import look_at_memory, look_at_storage
from moe_ft.recovery.readers import (
    MemoryReader,
    PeerReader,
    StateReader,
    StorageReader,
    read_unit,
)
from moe_ft.state.catalog import UnitCatalog
from moe_ft.units import Level
from tests.unit.moe_ft.builders import (
    WINDOW_UNITS,
    add_units,
    fill_region,
    fill_window,
    make_identity,
    make_optimizer,
    make_parameter,
    make_window,
    persist_window,
    put_in_slot,
)
from tests.unit.moe_ft.recovery.window_copies import (
    NUM_ELEMENTS,
    WINDOW,
    Copies,
    make_catalog,
)

TIERS = ["memory", "peer", "storage"]


class Place:
    """A window of iterations 5, 6 and 7 in one tier, its reader and its data file."""

    def __init__(self, tier: str, tmp_path: Path) -> None:
        self.tier, self.node_dir = tier, tmp_path / "node"
        self.server = PeerServer(self.node_dir, "127.0.0.1")
        self.storage = Storage(str(tmp_path / "storage"))
        self.data = self._fill(tmp_path)
        if tier == "storage":
            (self.version,) = look_at_storage(self.storage).versions
        else:
            (self.version,) = look_at_memory(self.node_dir, "node-a", "job").versions
            self.server.start()
            self.server.admit("token")

    def _fill(self, tmp_path: Path) -> Path:
        """Write the state and return its data file."""
        if self.tier == "storage":
            manifest = persist_window(self.storage, 7, make_identity())
            return tmp_path / "storage" / manifest.files[0].data
        return fill_window(own_directory(self.node_dir, 0))[0].data_path

    def reader(self) -> StateReader:
        """Open the state."""
        version = self.version
        if self.tier == "memory":
            return MemoryReader(self.node_dir / version.path)
        if self.tier == "storage":
            return StorageReader.open(self.storage, version)
        assert self.server.address is not None
        return PeerReader(PeerConnection(self.server.address, "token"), version)


@pytest.fixture(params=TIERS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, tmp_path)
    yield place
    place.server.close()


def test_unit_of_a_file_that_was_cut_off_is_refused(place: Place) -> None:
    name, unit = max(make_window().index.units.items(), key=lambda each: each[1].offset)
    os.truncate(place.data, unit.offset + unit.num_bytes // 2)
    reader = place.reader()
    with pytest.raises(CorruptStateError, match=f"unit {name} is cut short"):
        read_unit(reader, name)
    reader.close()


def test_file_that_is_empty_by_now_is_an_oserror(place: Place) -> None:
    os.truncate(place.data, 0)
    with pytest.raises(OSError):  # noqa: B017, PT011 - of whichever kind: the next source is tried
        read_unit(place.reader(), "embedding")


def test_state_that_has_vanished_is_an_oserror(place: Place) -> None:
    index_path = place.data.with_suffix(".json")
    index_path.unlink()
    with pytest.raises(OSError, match=r"No such file"):
        place.reader()


def test_versions_of_every_tier_are_read_bit_for_bit_at_both_levels(place: Place) -> None:
    window, reader = make_window(), place.reader()
    for name, unit in window.index.entries():
        position = None if unit.level == Level.FULL else unit.iteration - 5
        entry, found = read_unit(reader, name, position)
        assert entry == unit
        assert found == window.content[unit.offset : unit.offset + unit.num_bytes]
    reader.close()


@pytest.mark.parametrize("position", [None, 0])
def test_version_that_is_said_to_be_of_the_other_level_is_refused(
    tmp_path: Path, position: int | None
) -> None:
    region, window = fill_window(tmp_path)
    index = window.index
    if position is None:
        unit = msgspec.structs.replace(index.units["embedding"], level="compute")
        index = msgspec.structs.replace(index, units={**index.units, "embedding": unit})
    else:
        unit = msgspec.structs.replace(index.compute[0]["embedding"], level="full")
        index = msgspec.structs.replace(index, compute=({"embedding": unit}, *index.compute[1:]))
    region.commit(encode(index), 7)
    with pytest.raises(CorruptStateError, match="there is no unit embedding"):
        read_unit(MemoryReader(region.index_path), "embedding", position)


# Units in another file than the index's own


def pooled(tmp_path: Path) -> tuple[Region, UnitPool, str]:
    """Return a region whose index names a version in the pool of its directory."""
    directory = own_directory(tmp_path / "node", 0)
    pool = UnitPool(directory, 4 * 33, 2)
    pool.open()
    region, index = fill_region(directory)
    name, unit = put_in_slot(pool, 1, 0)
    add_units(region, index, {name: unit})
    return region, pool, name


def test_version_in_a_pool_is_read_from_a_peer(tmp_path: Path) -> None:
    _, pool, name = pooled(tmp_path)
    (version,) = look_at_memory(tmp_path / "node", "node-a", "job").versions
    server = PeerServer(tmp_path / "node", "127.0.0.1")
    server.start()
    server.admit("token")
    assert server.address is not None
    reader = PeerReader(PeerConnection(server.address, "token"), version)
    entry, found = read_unit(reader, name)
    assert found == pool.mapping[entry.offset : entry.offset + entry.num_bytes]
    assert not reader.stays(entry)
    reader.close()
    server.close()


def test_version_stays_only_in_a_pool_that_this_rank_will_use_again(tmp_path: Path) -> None:
    region, pool, name = pooled(tmp_path)
    again = MemoryReader(region.index_path, [region, pool])
    assert again.stays(again.index.units[name])
    assert not again.stays(again.index.units["embedding"])
    once = MemoryReader(region.index_path, [region])
    assert not once.stays(once.index.units[name])


UNIT = WINDOW_UNITS[2]  # FULL at iteration 6, COMPUTE in the snapshot of iteration 5
ENTRY = WINDOW.index.units[str(UNIT)]


@pytest.fixture
def copies(tmp_path: Path) -> Copies:
    return Copies(tmp_path, 1)


def catalog_with(num_elements: int) -> UnitCatalog:
    """Return a rank's units, each cut to a number of elements."""
    master = torch.zeros(num_elements)
    parameter = make_parameter(
        UNIT,
        parameter=torch.zeros(num_elements, dtype=torch.bfloat16),
        optimizer=make_optimizer(master, kind="lion"),
        master=master,
        is_sharded=True,
    )
    return UnitCatalog([parameter], leaves_out_frozen=False)


@pytest.mark.parametrize("num_elements", [NUM_ELEMENTS - 1, NUM_ELEMENTS + 1])
def test_slices_of_another_size_than_the_ranks_own_are_refused(
    copies: Copies, num_elements: int
) -> None:
    found = copies.fetch(catalog_with(num_elements), [UNIT])
    assert (found.units, found.missing) == ({}, (str(UNIT),))


def test_any_range_of_a_parameter_that_several_ranks_hold_is_accepted(copies: Copies) -> None:
    tensors = tuple(
        msgspec.structs.replace(each, start=3, end=NUM_ELEMENTS) for each in ENTRY.tensors
    )
    changed = msgspec.structs.replace(ENTRY, tensors=tensors)
    copies.change_index(0, units={**WINDOW.index.units, str(UNIT): changed})
    found = copies.fetch(make_catalog(is_sharded=False), [UNIT])
    assert found.missing == (), copies.readers.problems


RANGES = ((3, 9), (20, 25))


def test_parts_of_a_unit_come_from_a_peer_and_are_read_whole_from_elsewhere(place: Place) -> None:
    reader = place.reader()
    entry = reader.index.units[str(UNIT)]
    parts = reader.read_parts(str(UNIT), None, entry, RANGES)
    if place.tier != "peer":
        assert parts is None
        return
    assert parts is not None
    whole = reader.read(entry.file, entry.offset, entry.num_bytes)
    assert [bytes(parts[start:end]) for start, end in RANGES] == [
        bytes(whole[start:end]) for start, end in RANGES
    ]
    assert not any(parts[:3])


@pytest.mark.parametrize("least_bytes", [1, 1 << 16], ids=["as they lie", "in a copy"])
@pytest.mark.parametrize("num_streams", [1, 2])
def test_parts_are_where_they_belong_however_they_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_streams: int, least_bytes: int
) -> None:
    monkeypatch.setattr(travel, "_LEAST_BYTES", least_bytes)
    monkeypatch.setattr(streams, "PIECE_BYTES", 4)
    place = Place("peer", tmp_path)
    assert place.server.address is not None
    try:
        with closing(PeerConnection(place.server.address, "token", num_streams)) as connection:
            reader = PeerReader(connection, place.version)
            entry = reader.index.units[str(UNIT)]
            whole = reader.read(entry.file, entry.offset, entry.num_bytes)
            expected = bytearray(entry.num_bytes)
            for start, end in RANGES:
                expected[start:end] = whole[start:end]
            parts = reader.read_parts(str(UNIT), None, entry, RANGES)
            assert parts is not None and bytes(parts) == expected
    finally:
        place.server.close()


def test_parts_that_are_overwritten_before_they_are_sent_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(travel, "_LEAST_BYTES", 1)
    place, verify = Place("peer", tmp_path), travel.VerifiedUnits.parts
    reader = place.reader()
    entry = reader.index.units[str(UNIT)]

    def overwrite(units: travel.VerifiedUnits, request: GetParts) -> tuple[travel.Parts, str]:
        found = verify(units, request)
        with place.data.open("r+b") as file:
            file.seek(entry.offset + RANGES[0][0])
            (byte,) = file.read(1)
            file.seek(entry.offset + RANGES[0][0])
            file.write(bytes([byte ^ 1]))
        return found

    monkeypatch.setattr(travel.VerifiedUnits, "parts", overwrite)
    try:
        with pytest.raises(CorruptStateError, match="do not match their checksum"):
            reader.read_parts(str(UNIT), None, entry, RANGES)
    finally:
        reader.close()
        place.server.close()


@pytest.mark.parametrize("has_been_verified", [False, True])
def test_parts_of_a_unit_that_is_damaged_outside_of_them_are_refused_if_an_index_is_new(
    tmp_path: Path, has_been_verified: bool
) -> None:
    place = Place("peer", tmp_path)
    try:
        reader = place.reader()
        entry = reader.index.units[str(UNIT)]
        if has_been_verified:
            reader.read_parts(str(UNIT), None, entry, RANGES)
        with place.data.open("r+b") as file:
            file.seek(entry.offset + entry.num_bytes - 1)
            file.write(b"\xff")
        index = place.node_dir / place.version.path
        content = index.read_bytes()
        index.unlink()
        index.write_bytes(content)
        with pytest.raises(OSError, match="does not match its checksum"):
            reader.read_parts(str(UNIT), None, entry, RANGES)
    finally:
        place.server.close()


def test_parts_of_another_version_are_refused(tmp_path: Path) -> None:
    place = Place("peer", tmp_path)
    try:
        reader = place.reader()
        entry = msgspec.structs.replace(reader.index.units[str(UNIT)], checksum="0" * 16)
        for position in (None, len(reader.index.compute)):  # a snapshot that is not there
            with pytest.raises(OSError, match="another version"):
                reader.read_parts(str(UNIT), position, entry, RANGES)
    finally:
        place.server.close()
