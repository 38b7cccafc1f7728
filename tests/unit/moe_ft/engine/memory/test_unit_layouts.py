"""The layouts of a rank's units: in regions as large as they must be, in slots, and with shares."""

import torch

from moe_ft.engine.memory.unit_layouts import UnitLayouts
from moe_ft.state.catalog import UnitCatalog
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_optimizer, make_parameter

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
    assert layouts.most_bytes(WINDOW_UNITS[0]) >= first.num_bytes


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
