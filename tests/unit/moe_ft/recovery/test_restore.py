"""Units of a window stay frozen until their snapshot has been put back; the simulation runs whole replays."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.planning.tiers import STORAGE
from moe_ft.recovery.agree import Agreed
from moe_ft.recovery.fetched import Fetched
from moe_ft.recovery.put_back import SharedSlices
from moe_ft.recovery.restore import Conversion, find_persisted
from moe_ft.units import UnitId
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_window, window_position
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of

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


@pytest.mark.parametrize(
    ("layout_of_state", "flag", "expected"),
    [("", "same", ""), ("", "any", None), ("other", "same", None), ("other", "any", None)],
)
def test_without_a_checkpoint_of_this_layout_everything_is_written_again(
    layout_of_state: str, flag: str, expected: str | None
) -> None:
    """None says that a checkpoint must not refer to older ones: those of other layouts hold other slices."""
    stored = versions_of((start(0, 0),), 4)
    versions = [
        replace(each, node=None, tier=STORAGE, layout="other", world_size=1)
        if layout_of_state
        else each
        for each in stored
    ]
    (plan,), _ = plans_of(versions)
    met: Any = SimpleNamespace(
        site=SimpleNamespace(rank=0),
        config=MoeFtConfig(recovery=RecoveryConfig(layout=flag)),
    )
    readers: Any = None
    assert find_persisted(plan, met, readers) == (expected, None)
