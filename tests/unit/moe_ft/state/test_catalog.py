"""The catalog sorts parameters into units and knows the tensors, sizes and origins of each."""

import pytest
import torch

from moe_ft.format.entries import FROZEN, tensor_bytes
from moe_ft.format.packings import ALIGNMENT_BYTES, Packing
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import Level, UnitId, UnitKind
from tests.unit.moe_ft.builders import make_optimizer, make_parameter

EXPERT = UnitId(kind=UnitKind.EXPERT, layer=0, expert=1)
NORM = UnitId(kind=UnitKind.FINAL_NORM)
EMBEDDING = UnitId(kind=UnitKind.EMBEDDING)
PACKINGS = {"master": Packing.SPLIT, "exp_avg": Packing.BF16}


def trained(
    unit: UnitId, count: int = 100, *, dtype: torch.dtype = torch.bfloat16, name: str = ""
) -> LocalParameter:
    """Return a parameter with an fp32 master, which this rank saves whole."""
    master = torch.arange(float(count))
    return make_parameter(
        unit,
        name,
        parameter=master.to(dtype),
        optimizer=make_optimizer(master),
        master=master,
    )


def catalog_of(*parameters: LocalParameter, leaves_out_frozen: bool = True) -> UnitCatalog:
    return UnitCatalog(parameters, leaves_out_frozen=leaves_out_frozen, packings=PACKINGS)


@pytest.mark.parametrize("leaves_out_frozen", [True, False])
def test_frozen_parameter_is_in_a_unit_only_if_frozen_ones_are_saved(
    leaves_out_frozen: bool,
) -> None:
    frozen = make_parameter(EMBEDDING, "frozen")
    catalog = catalog_of(frozen, trained(NORM), leaves_out_frozen=leaves_out_frozen)
    assert catalog.has(EMBEDDING) != leaves_out_frozen
    assert catalog.frozen_names == ({"frozen"} if leaves_out_frozen else set())
    assert (FROZEN in catalog.origins([NORM])) == leaves_out_frozen


def test_slices_of_a_plan_replace_those_from_the_start() -> None:
    catalog = catalog_of(trained(EXPERT, name="a"), trained(EXPERT, name="b"))
    found = catalog.tensors(EXPERT, Level.COMPUTE, {"b": (10, 30)})
    assert [(each.parameter, each.start, each.end) for each in found] == [
        ("a", 0, 100),
        ("b", 10, 30),
    ]
    nothing = {"a": (0, 0), "b": (5, 5)}
    assert catalog.tensors(EXPERT, Level.FULL, nothing) == []


def test_bytes_of_a_unit_are_those_of_its_tensors_rounded_up_one_by_one() -> None:
    catalog = catalog_of(trained(EXPERT))
    sizes = [tensor_bytes(each) for each in catalog.tensors(EXPERT, Level.FULL)]
    # Split: 200 bytes, then at 256 the other 200, then at 512 bits of 100 numbers.
    assert sizes == [525, 200, 400]
    assert catalog.num_bytes(EXPERT) == 1125
    assert catalog.num_bytes(EXPERT, alignment=ALIGNMENT_BYTES) == 576 + 256 + 448


@pytest.mark.parametrize("packing", list(Packing))
def test_most_bytes_are_enough_for_every_packing(packing: Packing) -> None:
    packings = {"master": packing, "exp_avg": packing, "exp_avg_sq": packing}
    catalog = UnitCatalog([trained(EXPERT)], leaves_out_frozen=False, packings=packings)
    assert catalog.num_bytes(EXPERT, alignment=ALIGNMENT_BYTES) <= catalog.most_bytes(EXPERT)


def test_origin_changes_with_a_master_that_rounds_to_the_same_weight() -> None:
    local = trained(EXPERT)
    catalog = catalog_of(local, trained(NORM))
    before = catalog.origins([EXPERT, NORM])
    assert local.master is not None
    local.master[7] += 1e-5
    after = catalog.origins([EXPERT, NORM])
    assert after[str(EXPERT)] != before[str(EXPERT)]
    assert after[str(NORM)] == before[str(NORM)]
