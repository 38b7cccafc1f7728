"""Data files are valid safetensors files, and tensors lie where layouts say, also those of plans."""

import random

import msgspec
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_ft.engine.memory.layout import (
    HEADER_ALIGNMENT_BYTES,
    FileLayout,
    UnitPlace,
    lay_out_again,
    lay_out_window,
)
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.errors import SnapshotError
from moe_ft.format.entries import TensorEntry, tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES
from moe_ft.state.catalog import UnitCatalog
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_optimizer, make_parameter, make_window

Units = list[tuple[UnitId, Level, list[TensorEntry]]]

UNIT_IDS = st.one_of(
    st.builds(
        UnitId, kind=st.just(UnitKind.EXPERT), layer=st.integers(0, 9), expert=st.integers(0, 9)
    ),
    st.sampled_from([UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.OUTPUT)]),
)


def header_name(place: UnitPlace, tensor: TensorEntry, snapshot: int = 0) -> str:
    where = f"{tensor.parameter}[{tensor.start}:{tensor.end}]"
    version = f"{place.level}.{snapshot}" if place.level is Level.COMPUTE else place.level
    return f"{place.unit}/{version}/{where}/{tensor.key}"


def fill(layout: FileLayout) -> bytes:
    """Return a file as the snapshot thread writes it: header, then any bytes."""
    num_bytes = layout.num_bytes - len(layout.header)
    return layout.header + random.Random(num_bytes).randbytes(num_bytes)


# Windows of several snapshots

Window = list[Units]


@st.composite
def windows(draw: st.DrawFn) -> Window:
    """Windows in which every unit is FULL in one snapshot and COMPUTE in those before it."""
    length = draw(st.integers(1, 4))
    window: Window = [[] for _ in range(length)]
    for unit in draw(st.lists(UNIT_IDS, unique=True, max_size=4)):
        full_at, size = draw(st.integers(0, length - 1)), draw(st.integers(0, 70))
        for position in range(full_at + 1):
            is_full = position == full_at
            tensors = [
                TensorEntry("p", key, 0, size, "F32" if is_full else "BF16", 0)
                for key in (["param", "exp_avg"] if is_full else ["weight"])
            ]
            window[position].append((unit, Level.FULL if is_full else Level.COMPUTE, tensors))
    return window


ROOM = st.none() | st.integers(0, 20_000)


def lay_out_with(window: Window, room: int | None) -> FileLayout:
    """Return a layout that has so many bytes more than it must have, and two pages for its header."""
    least = lay_out_window(window)
    if room is None:
        return least
    return lay_out_window(window, least.num_bytes + 2 * HEADER_ALIGNMENT_BYTES + room)


@settings(max_examples=40)
@given(windows(), ROOM)
def test_file_of_any_window_is_read_by_safetensors_with_every_tensor_at_its_place(
    window: Window, room: int | None
) -> None:
    layout = lay_out_with(window, room)
    content = fill(layout)
    found = dict(safetensors.deserialize(content))  # type: ignore[no-untyped-call]
    for number, places in enumerate(layout.snapshots):
        for place in places:
            for tensor in place.tensors:
                start = place.offset + tensor.offset
                read = found.pop(header_name(place, tensor, number))
                assert bytes(read["data"]) == content[start : start + tensor_bytes(tensor)]
    assert all(name.startswith("__unused__/") for name in found)


@settings(max_examples=40)
@given(windows(), ROOM)
def test_units_of_any_window_are_in_their_snapshots_in_order(
    window: Window, room: int | None
) -> None:
    placed = [
        [(place.unit, place.level) for place in places]
        for places in lay_out_with(window, room).snapshots
    ]
    assert placed == [[(unit, level) for unit, level, _ in units] for units in window]


@settings(max_examples=40)
@given(windows(), ROOM)
def test_every_snapshot_of_a_window_lies_between_the_end_of_the_one_before_and_its_own(
    window: Window, room: int | None
) -> None:
    layout = lay_out_with(window, room)
    start = len(layout.header)
    for places, end in zip(layout.snapshots, layout.ends, strict=True):
        assert start <= end <= layout.num_bytes
        for place in places:
            assert start <= place.offset
            assert place.offset % ALIGNMENT_BYTES == 0
            assert all(tensor.offset % ALIGNMENT_BYTES == 0 for tensor in place.tensors)
            start = place.offset + place.num_bytes
        assert start <= end
        start = end


@settings(max_examples=40)
@given(windows(), st.integers(-(2**14), 2**14))
def test_window_gets_the_size_that_was_asked_for_or_is_refused(window: Window, room: int) -> None:
    asked = lay_out_window(window).num_bytes + room
    try:
        layout = lay_out_window(window, asked)
    except SnapshotError:
        assert room < HEADER_ALIGNMENT_BYTES  # the header may need a page to declare the rest
    else:
        assert layout.num_bytes == asked
        safetensors.deserialize(fill(layout))  # type: ignore[no-untyped-call]


def test_layout_of_a_window_is_that_worked_by_hand() -> None:
    expert, embedding = (
        UnitId(kind=UnitKind.EXPERT, layer=0, expert=0),
        UnitId(kind=UnitKind.EMBEDDING),
    )
    layout = lay_out_window(
        [
            [
                (expert, Level.FULL, [TensorEntry("e", "param", 0, 3, "F32", 0)]),  # 0 to 12
                (embedding, Level.COMPUTE, [TensorEntry("w", "weight", 0, 5, "BF16", 0)]),  # 64, 74
            ],
            [(embedding, Level.COMPUTE, [TensorEntry("w", "weight", 0, 5, "BF16", 0)])],  # 128, 138
            [(embedding, Level.FULL, [TensorEntry("w", "param", 0, 5, "F32", 0)])],  # 192, 212
        ],
        8192,
    )
    assert layout.ends == (4096 + 74, 4096 + 138, 4096 + 212)
    assert [place.offset for place in layout.units] == [4096, 4096 + 64, 4096 + 128, 4096 + 192]
    read = safetensors.deserialize(fill(layout))  # type: ignore[no-untyped-call]
    found = {name: each["shape"] for name, each in read}
    assert found == {
        "layer.0.expert.0/full/e[0:3]/param": [3],
        "__unused__/12": [52],
        "embedding/compute.0/w[0:5]/weight": [5],
        "__unused__/74": [54],
        "embedding/compute.1/w[0:5]/weight": [5],
        "__unused__/138": [54],
        "embedding/full/w[0:5]/param": [5],
        "__unused__/212": [8192 - 4096 - 212],
    }


# Layouts that are made when they are needed


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_index_tells_how_its_region_was_laid_out(length: int) -> None:
    window = make_window(length=length)
    assert lay_out_again(window.index) == window.layout


def test_region_that_is_laid_out_otherwise_is_not_taken_for_the_one_of_an_index() -> None:
    index = make_window().index
    other = msgspec.structs.replace(index, file_bytes=index.file_bytes + 4096)
    with pytest.raises(SnapshotError, match="iteration 7 of rank 0"):
        lay_out_again(other)


NUM_ELEMENTS = 64
ROUTER = UnitId(kind=UnitKind.ROUTER, layer=0)


def layouts_of(*units: UnitId, dp_rank: int = 0) -> UnitLayouts:
    parameters = []
    for unit in units:
        master = torch.zeros(NUM_ELEMENTS)
        weight = torch.zeros(NUM_ELEMENTS, dtype=torch.bfloat16)
        optimizer = make_optimizer(master)
        parameters.append(
            make_parameter(unit, parameter=weight, optimizer=optimizer, master=master)
        )
    return UnitLayouts(UnitCatalog(parameters, leaves_out_frozen=False), dp_rank)


def plan_of(*snapshots: dict[UnitId, Level], shares: tuple[int, ...] | None = None) -> WindowPlan:
    plans = tuple(SnapshotPlan(levels=levels, shares=shares) for levels in snapshots)
    return WindowPlan(snapshots=plans)


def test_each_snapshot_places_its_units_at_their_levels() -> None:
    first, second = WINDOW_UNITS[0], WINDOW_UNITS[1]
    layouts = layouts_of(first, second)
    layout = layouts.lay_out(
        plan_of({first: Level.FULL, second: Level.COMPUTE}, {second: Level.FULL})
    )
    found = [[(place.unit, place.level) for place in places] for places in layout.snapshots]
    assert found == [
        [(first, Level.FULL), (second, Level.COMPUTE)],
        [(second, Level.FULL)],
    ]
    full, compute = layout.snapshots[0]
    assert [each.key for each in full.tensors] == ["param", "exp_avg", "exp_avg_sq"]
    assert [each.key for each in compute.tensors] == ["weight"]


def test_unit_lies_in_every_slot_as_in_the_first() -> None:
    layouts = layouts_of(*WINDOW_UNITS)
    first, other = (layouts.place(WINDOW_UNITS[0], offset) for offset in (4096, 8192))
    assert (first.offset, other.offset) == (4096, 8192)
    assert first.tensors == other.tensors
    assert first.num_bytes == other.num_bytes == 3 * 4 * NUM_ELEMENTS
    assert layouts.catalog.most_bytes(WINDOW_UNITS[0]) >= first.num_bytes


def test_shares_divide_what_all_ranks_hold_and_nothing_else() -> None:
    expert, parts = WINDOW_UNITS[0], list[tuple[int, int]]()
    plan = plan_of({ROUTER: Level.FULL, expert: Level.FULL}, shares=(1, 3))
    for dp_rank in range(2):
        units = layouts_of(ROUTER, expert, dp_rank=dp_rank).lay_out(plan).units
        (router,) = [place for place in units if place.unit == ROUTER]
        (whole,) = [place for place in units if place.unit == expert]
        parts.append((router.tensors[0].start, router.tensors[0].end))
        assert (whole.tensors[0].start, whole.tensors[0].end) == (0, NUM_ELEMENTS)
    assert parts == [(0, 16), (16, 64)]
