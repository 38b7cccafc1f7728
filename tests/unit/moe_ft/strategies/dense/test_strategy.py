"""The dense strategy: everything in full, every time."""

import pytest

from moe_ft.strategies.dense.strategy import DenseStrategy
from moe_ft.units import Level, UnitId, UnitKind

UNITS = [UnitId(kind=UnitKind.EMBEDDING), UnitId(kind=UnitKind.EXPERT, layer=0, expert=1)]


@pytest.mark.parametrize("is_whole", [False, True])
def test_window_is_one_snapshot_with_every_unit_in_full(is_whole: bool) -> None:
    (snapshot,) = DenseStrategy(UNITS).plan_window(5, is_whole=is_whole).snapshots
    assert snapshot.levels == dict.fromkeys(UNITS, Level.FULL)
    assert not snapshot.rotating


def test_nothing_rotates_and_every_iteration_is_whole() -> None:
    strategy = DenseStrategy(UNITS)
    assert list(strategy.always) == UNITS
    assert strategy.saves_all and strategy.is_whole(3)
    assert (strategy.rotating, strategy.most_rotating) == (frozenset(), 0)
    assert (strategy.values(), strategy.agree([])) == ([], {})
