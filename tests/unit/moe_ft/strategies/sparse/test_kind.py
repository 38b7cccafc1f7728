"""The strategy sparse in the registry: its traits, and how a rank builds it."""

import pytest

from moe_ft.strategies.interface import Counting
from moe_ft.strategies.sparse.config import SparseConfig
from moe_ft.strategies.sparse.kind import SPARSE
from tests.unit.moe_ft.strategies.stage import CATALOG, OTHERS, Catalog, build, config_of, facts_of


def test_recoveries_are_exact_and_run_iterations_again() -> None:
    assert SPARSE.is_exact and SPARSE.replays and not SPARSE.leaves_out_frozen
    assert SPARSE.division(config_of(SPARSE)) == ""


@pytest.mark.parametrize(
    ("order", "counting"),
    [
        ("count", Counting.TOKENS),
        ("decayed", Counting.TOKENS),
        ("soft-count", Counting.PROBABILITIES),
    ],
)
def test_measure_of_popularity_decides_what_routers_count(order: str, counting: Counting) -> None:
    assert SPARSE.counting(config_of(SPARSE, SparseConfig(unit_order=order))) is counting


def test_windows_are_as_long_as_the_flag_says_and_hold_all_units() -> None:
    strategy = build(SPARSE, SparseConfig(window="3"))
    assert len(strategy.plan_window(0).snapshots) == 3
    assert set(strategy.always) == set(CATALOG.units)
    assert strategy.counted_layers == ("layer.0", "layer.1")


def test_model_without_experts_counts_nothing() -> None:
    catalog = Catalog(dict.fromkeys(OTHERS, 100))
    config = config_of(SPARSE, SparseConfig(window="2"))
    strategy = SPARSE.build(config, facts_of(catalog, num_experts=0))
    assert strategy.counted_layers == ()
    assert len(strategy.plan_window(0).snapshots) == 2
