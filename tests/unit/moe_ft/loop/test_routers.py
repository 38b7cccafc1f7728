"""Tokens are counted on the routers where somebody reads them, and written if asked for."""

from types import SimpleNamespace

import pytest

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.elastic.slot_layer import NewTable
from moe_ft.events import EventLog
from moe_ft.loop import routers
from moe_ft.loop.routers import Routers, SlotTables
from moe_ft.strategies.sparse.strategy import SparseConfig
from tests.unit.fault_tolerance.loops import ended, events_in, last_event
from tests.unit.moe_ft.one_router import LAYER, NUM_EXPERTS, NUM_TOKENS, Model

LOGGED = MoeFtConfig(observability=ObservabilityConfig(event_log="x", router_log=True))
DENSE = MoeFtConfig(strategy=StrategyConfig(strategy="dense"))
SOFT = MoeFtConfig(
    strategy=StrategyConfig(strategy="sparse"),
    options={"sparse": SparseConfig(unit_order="soft-count")},
)


@pytest.fixture
def model() -> Model:
    return Model()


def started(config: MoeFtConfig, log: EventLog, model: Model, optimizer: object = "any") -> Routers:
    routers = Routers(config, log)
    routers.after_setup(([model], optimizer, None))
    routers.begin_attempt()
    return routers


def test_tokens_of_an_iteration_are_written_if_asked_for(event_log: EventLog, model: Model) -> None:
    routers = started(LOGGED, event_log, model)
    model()
    routers.after_iteration(ended(6, is_skipped=True))
    line = last_event(event_log)
    assert sum(line.pop("tokens")[LAYER]) == NUM_TOKENS * 2
    assert line == {"event": "router_load", "iteration": 6, "is_skipped": True}


def test_attempt_that_is_repeated_counts_once(event_log: EventLog, model: Model) -> None:
    routers = started(LOGGED, event_log, model)
    model()
    routers.begin_attempt()
    model()
    assert routers.counts()[LAYER].sum() == NUM_TOKENS * 2


def test_strategy_gets_the_tokens_of_its_layers_in_its_order(
    event_log: EventLog, model: Model
) -> None:
    routers = started(DENSE, event_log, model)
    model()
    routers.after_iteration(ended(6))
    table = routers.popularity(["layer.7", LAYER], NUM_EXPERTS)
    assert table is not None
    assert table.tolist() == [[0] * NUM_EXPERTS, routers.counts()[LAYER].tolist()]
    assert routers.popularity([], NUM_EXPERTS) is None
    assert events_in(event_log) == []


def test_strategy_that_orders_by_probabilities_gets_them(event_log: EventLog, model: Model) -> None:
    routers = started(SOFT, event_log, model)
    model()
    table = routers.popularity([LAYER], NUM_EXPERTS)
    assert table is not None
    assert int(table.sum()) == pytest.approx(NUM_TOKENS * 2**20, abs=NUM_TOKENS)
    assert routers.counts()[LAYER].sum() == NUM_TOKENS * 2


@pytest.mark.parametrize(("config", "optimizer"), [(MoeFtConfig(), "any"), (DENSE, None)])
def test_nothing_is_counted_that_nobody_reads(
    config: MoeFtConfig, optimizer: object, event_log: EventLog, model: Model
) -> None:
    routers = started(config, event_log, model, optimizer)
    model()
    assert routers.counts() == {}


def test_hooks_are_removed_at_the_end(event_log: EventLog, model: Model) -> None:
    routers = started(SOFT, event_log, model)
    routers.close()
    model()
    assert not any(each.any() for each in routers.counts().values())


def test_new_tables_of_slots_are_written_by_the_first_rank_of_a_stage(
    event_log: EventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = NewTable(table=((0, 0), (1, 1)), before=(5, 1), after=(3, 3), num_moved=2, dropped=(4, 1))
    homes = SimpleNamespace(take_sent_bytes=lambda: 7)

    def layer(rank: int, new_table: NewTable | None) -> SimpleNamespace:
        group = SimpleNamespace(rank=lambda: rank)
        return SimpleNamespace(ep_group=group, homes=homes, new_table=new_table)

    layers = {"layer.0": layer(0, new), "layer.1": layer(0, None), "layer.2": layer(1, new)}
    monkeypatch.setattr(routers, "slot_layers", lambda model: layers.items())
    tables = SlotTables(event_log)
    tables.after_setup(([], "any", None))
    tables.after_iteration(ended(6))
    assert last_event(event_log) == {
        "event": "slot_table",
        "iteration": 6,
        "layers": {
            "layer.0": {
                "table": [[0, 0], [1, 1]],
                "tokens_before": [5, 1],
                "tokens_after": [3, 3],
                "moved_replicas": 2,
                "dropped_before": 4,
                "dropped_after": 1,
            }
        },
        "sent_bytes": 14,
    }
