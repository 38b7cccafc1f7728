"""The strategy dense in the registry: it asks for nothing and counts nothing."""

from moe_ft.strategies.dense.kind import DENSE
from moe_ft.strategies.interface import Counting
from tests.unit.moe_ft.strategies.stage import CATALOG, build, config_of


def test_all_units_of_the_rank_are_saved() -> None:
    assert tuple(build(DENSE).always) == CATALOG.units


def test_recoveries_are_exact_and_run_nothing_again() -> None:
    assert DENSE.is_exact and not DENSE.replays and not DENSE.leaves_out_frozen
    config = config_of(DENSE)
    assert DENSE.counting(config) is Counting.NOTHING
    assert DENSE.division(config) == ""
