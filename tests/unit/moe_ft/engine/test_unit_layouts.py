"""Layouts of plans: each rank places its own tensors, in a region or in a slot."""

import pytest
import torch

from moe_ft.engine.unit_layouts import UnitLayouts
from moe_ft.errors import SnapshotError
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.strategies.interface import SnapshotPlan, WindowPlan
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_optimizer, make_parameter

EXPERTS = [UnitId(kind=UnitKind.EXPERT, layer=0, expert=expert) for expert in range(2)]
NORM = UnitId(kind=UnitKind.FINAL_NORM)


def trained(unit: UnitId, count: int) -> LocalParameter:
    master = torch.zeros(count)
    return make_parameter(
        unit, parameter=torch.zeros(count), optimizer=make_optimizer(master), master=master
    )


def layouts(dp_rank: int = 0) -> UnitLayouts:
    """Return the layouts of two experts with 100 elements and a norm with 40."""
    parameters = [*(trained(unit, 100) for unit in EXPERTS), trained(NORM, 40)]
    return UnitLayouts(UnitCatalog(parameters, leaves_out_frozen=False), dp_rank)


def window(*levels: dict[UnitId, Level], shares: tuple[int, ...] | None = None) -> WindowPlan:
    return WindowPlan(snapshots=tuple(SnapshotPlan(levels=each, shares=shares) for each in levels))


def test_units_that_a_snapshot_leaves_out_take_no_place() -> None:
    first, second = EXPERTS
    plan = window({first: Level.FULL, second: Level.NONE}, {second: Level.FULL})
    layout = layouts().lay_out(plan)
    assert [[place.unit for place in each] for each in layout.snapshots] == [[first], [second]]


def test_all_regions_have_the_size_that_was_set() -> None:
    found = layouts()
    small = window({EXPERTS[0]: Level.COMPUTE})
    least = found.lay_out(small).num_bytes
    found.region_bytes = least + 8192
    assert found.lay_out(small).num_bytes == least + 8192
    found.region_bytes = least - 64
    with pytest.raises(SnapshotError, match=f"its region has {least - 64}"):
        found.lay_out(small)


@pytest.mark.parametrize(("dp_rank", "part"), [(0, (0, 10)), (1, (10, 40))])
def test_shares_of_a_plan_divide_replicated_parameters_outside_of_experts(
    dp_rank: int, part: tuple[int, int]
) -> None:
    plan = window({NORM: Level.COMPUTE, EXPERTS[0]: Level.COMPUTE}, shares=(10, 30))
    norm, expert = layouts(dp_rank).lay_out(plan).units
    assert [(each.start, each.end) for each in norm.tensors] == [part]
    assert [(each.start, each.end) for each in expert.tensors] == [(0, 100)]


def test_unit_has_the_same_layout_in_every_slot() -> None:
    found = layouts()
    first, second = found.place(EXPERTS[0], 4096), found.place(EXPERTS[0], 8192)
    assert (first.offset, second.offset) == (4096, 8192)
    assert first.tensors == second.tensors
    assert first.num_bytes <= found.most_bytes(EXPERTS[0])
