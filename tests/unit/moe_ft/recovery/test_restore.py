"""Units of a window stay frozen until their snapshot has been put back; the simulation runs whole replays."""

from typing import Any

import pytest

from moe_ft.recovery.agree import Agreed
from moe_ft.recovery.fetch import Fetched
from moe_ft.recovery.put_back import SharedSlices
from moe_ft.recovery.restore import Conversion
from moe_ft.units import UnitId
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_window, window_position

_, _, MIDDLE, LATE = WINDOW_UNITS  # FULL in the snapshots 1 and 2 of three


@pytest.mark.parametrize(("position", "expected"), [(0, {MIDDLE, LATE}), (1, {LATE}), (2, set())])
def test_units_are_frozen_until_their_snapshot_has_been_put_back(
    position: int, expected: set[UnitId]
) -> None:
    nobody = SharedSlices(dp=[{}], expt_dp=[{}])
    agreed = Agreed(
        fetched=Fetched(index=make_window().index),
        slices=[(nobody, nobody)] * 3,
        positions={unit: window_position(unit, 3) for unit in WINDOW_UNITS},
    )
    live: Any = None
    conversion = Conversion(agreed, live)
    assert conversion.frozen_units(position) == expected
    assert [each.iteration for each in conversion.records] == [5, 6, 7]
    assert conversion.num_replays == 2
