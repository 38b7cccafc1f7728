"""Tokens are counted on the routers where somebody reads them, and written if asked for."""

from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_ft.config.config import MoeFtConfig, ObservabilityConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.events import EventLog
from moe_ft.loop.routers import Routers
from moe_ft.strategies.sparse.config import SparseConfig
from tests.unit.fault_tolerance.loops import ended, events_in, last_event

LOGGED = MoeFtConfig(observability=ObservabilityConfig(event_log="x", router_log=True))
DENSE = MoeFtConfig(strategy=StrategyConfig(strategy="dense"))
SOFT = MoeFtConfig(
    strategy=StrategyConfig(strategy="sparse"),
    options={"sparse": SparseConfig(unit_order="soft-count")},
)
NUM_EXPERTS, NUM_TOKENS = 4, 6
LAYER = "layer.0"


class Model(torch.nn.Module):
    """A decoder of one layer that is only a router."""

    def __init__(self) -> None:
        super().__init__()
        router: Any = TopKRouter(
            TransformerConfig(
                num_layers=1,
                hidden_size=8,
                num_attention_heads=1,
                num_moe_experts=NUM_EXPERTS,
                add_bias_linear=False,
                perform_initialization=False,
                moe_router_load_balancing_type="none",
                moe_router_topk=2,
                moe_token_dispatcher_type="alltoall",
            ),
            pg_collection=ProcessGroupCollection(tp=None, cp=None, tp_cp=None, tp_dp_cp=None),
        )
        router.gating = lambda tokens: tokens @ router.weight.T  # the original wants a GPU
        torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
        layer: Any = torch.nn.Module()
        layer.layer_number, layer.mlp = 1, torch.nn.Module()
        layer.mlp.router = router
        self.decoder: Any = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList([layer])

    def forward(self) -> None:
        """Route some tokens."""
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randn(NUM_TOKENS // 2, 2, 8, generator=generator, requires_grad=True)
        self.decoder.layers[0].mlp.router(tokens)


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
    assert routers.counts() == {}
