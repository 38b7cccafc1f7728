"""One unit is read from one source, and refused with the reason if it is not what this rank can put back."""

from pathlib import Path

import msgspec
import pytest
import torch

from moe_ft.planning.recovery import Tier
from moe_ft.recovery.readers import fetch_unit
from moe_ft.state.catalog import UnitCatalog
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_optimizer, make_parameter
from tests.unit.moe_ft.recovery.window_copies import (
    NUM_ELEMENTS,
    WINDOW,
    Copies,
    content_of,
    make_catalog,
)

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


def test_unit_that_is_intact_is_returned_with_its_bytes(copies: Copies) -> None:
    found = fetch_unit(copies.sources[0], UNIT, make_catalog(), copies.readers)
    assert found is not None
    assert (found.unit, found.tier, found.stays) == (UNIT, Tier.MEMORY, False)
    assert (found.entry, bytes(found.content)) == (ENTRY, content_of(ENTRY))
    assert copies.readers.problems == []


def test_weights_of_a_unit_are_read_from_the_snapshot_that_has_it_at_compute(
    copies: Copies,
) -> None:
    found = fetch_unit(copies.sources[0], UNIT, make_catalog(), copies.readers, position=0)
    assert found is not None
    assert found.entry == WINDOW.index.compute[0][str(UNIT)]


@pytest.mark.parametrize("number", [0, 1])
def test_unit_of_another_version_or_iteration_is_refused(copies: Copies, number: int) -> None:
    wanted = [{"version": (9, 9)}, {"iteration": 9}][number]
    found = fetch_unit(copies.sources[0], UNIT, make_catalog(), copies.readers, **wanted)  # type: ignore[arg-type]
    assert found is None
    assert f"unit {UNIT} is of iteration 6 there" in copies.readers.problems[0]


def test_unit_of_the_wanted_version_and_iteration_is_returned(copies: Copies) -> None:
    found = fetch_unit(
        copies.sources[0],
        UNIT,
        make_catalog(),
        copies.readers,
        version=ENTRY.version,
        iteration=ENTRY.iteration,
    )
    assert found is not None


def test_unit_that_does_not_match_its_checksum_is_refused(copies: Copies) -> None:
    copies.spoil(0, ENTRY)
    assert fetch_unit(copies.sources[0], UNIT, make_catalog(), copies.readers) is None
    assert f"unit {UNIT} does not match its checksum" in copies.readers.problems[0]


@pytest.mark.parametrize("num_elements", [NUM_ELEMENTS - 1, NUM_ELEMENTS + 1])
def test_slices_of_another_size_than_the_ranks_own_are_refused(
    copies: Copies, num_elements: int
) -> None:
    found = fetch_unit(copies.sources[0], UNIT, catalog_with(num_elements), copies.readers)
    assert found is None
    assert f"unit {UNIT} is cut differently there" in copies.readers.problems[0]


def test_any_range_of_a_parameter_that_several_ranks_hold_is_accepted(copies: Copies) -> None:
    tensors = tuple(
        msgspec.structs.replace(each, start=3, end=NUM_ELEMENTS) for each in ENTRY.tensors
    )
    changed = msgspec.structs.replace(ENTRY, tensors=tensors)
    copies.change_index(0, units={**WINDOW.index.units, str(UNIT): changed})
    shared = make_catalog(is_sharded=False)
    found = fetch_unit(copies.sources[0], UNIT, shared, copies.readers)
    assert found is not None, copies.readers.problems


def test_source_that_cannot_be_opened_has_nothing_and_the_reason_is_kept(copies: Copies) -> None:
    copies.regions[0].index_path.unlink()
    assert fetch_unit(copies.sources[0], UNIT, make_catalog(), copies.readers) is None
    assert "No such file" in copies.readers.problems[0]
