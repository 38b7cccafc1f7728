"""Parts of experts that are not covered are in every snapshot."""

from dataclasses import replace

import pytest

from moe_ft.strategies.partial.units import divide_units
from moe_ft.units import Part, UnitId
from tests.unit.moe_ft.strategies.partial.experts import (
    DENSE,
    expert,
)

WEIGHTS = replace(expert(0, 0), part=Part.WEIGHTS)
MOMENTS = replace(expert(0, 0), part=Part.MOMENTS)


@pytest.mark.parametrize(
    ("covers", "master_always_full", "always", "rotating"),
    [
        ("both", False, [DENSE], [expert(0, 0)]),
        ("weights", False, [DENSE, MOMENTS], [WEIGHTS]),
        ("optimizer", False, [DENSE, WEIGHTS], [MOMENTS]),
        ("both", True, [DENSE, WEIGHTS], [MOMENTS]),
        ("optimizer", True, [DENSE, WEIGHTS], [MOMENTS]),
        ("weights", True, [DENSE, WEIGHTS, MOMENTS], []),
    ],
)
def test_part_of_an_expert_that_is_not_covered_is_in_every_snapshot(
    covers: str, master_always_full: bool, always: list[UnitId], rotating: list[UnitId]
) -> None:
    found = divide_units([DENSE, expert(0, 0)], covers, master_always_full=master_always_full)
    assert found == (always, rotating)
