"""Tokens of a router as the hook sees its output, and the probabilities of a real one's gate."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ft.state import router_load
from moe_ft.state.router_load import RouterLoad, table
from tests.unit.moe_ft.one_router import NUM_EXPERTS, NUM_TOKENS, TOP_K, Model, hidden

UNITS = 2**20  # in which probabilities are counted
MAP = torch.tensor([[True, False, True], [True, False, False]])
PROBABILITIES = torch.tensor([[0.75, 0.0, 0.25], [0.5, 0.0, 0.0]])


class Load(RouterLoad):
    """Router load of one layer, whose router is called by hand."""

    def __init__(self, *, pads: bool = False) -> None:
        super().__init__()
        self.router: Any = torch.nn.Module()
        config = SimpleNamespace(moe_pad_expert_input_to_capacity=pads)
        self.router.config = config  # type: ignore[assignment]
        self._names[self.router] = "layer.0"
        self._counts["layer.0"] = torch.zeros(3, dtype=torch.int64)

    def route(self, map_: torch.Tensor = MAP) -> None:
        """Have the router pass tokens on."""
        self._count(self.router, None, (PROBABILITIES, map_))


def test_tokens_are_added_up_over_micro_batches() -> None:
    load = Load()
    load.route()
    load.route()
    assert load.counts()["layer.0"].tolist() == [4, 0, 2]


def test_tokens_that_only_fill_an_expert_up_are_not_counted() -> None:
    load = Load(pads=True)
    load.route(map_=torch.ones(2, 3, dtype=torch.bool))
    assert load.counts()["layer.0"].tolist() == [2, 0, 1]


# CUDA graphs


def test_passes_that_prepare_a_capture_are_not_counted_and_the_captured_one_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load = Load()
    monkeypatch.setattr(router_load, "is_graph_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    load.route()
    assert load.counts()["layer.0"].tolist() == [0, 0, 0]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    load.route()
    assert load.counts()["layer.0"].tolist() == [2, 0, 1]


def test_counts_stay_where_a_graph_adds_to_them() -> None:
    model = Model()
    load = RouterLoad()
    load.start([model], sums_probabilities=True)
    model()
    places = [load.counts()["layer.0"].data_ptr(), load._probabilities["layer.0"].data_ptr()]
    assert load.counts()["layer.0"].sum() == NUM_TOKENS * TOP_K
    load.begin()
    assert load.counts()["layer.0"].sum() == 0
    load.close()
    again = RouterLoad()
    again.start([model], sums_probabilities=True)
    assert places == [
        again.counts()["layer.0"].data_ptr(),
        again._probabilities["layer.0"].data_ptr(),
    ]


# The whole gate


def gate(*, is_watched: bool = True, **settings: Any) -> tuple[RouterLoad, Any]:
    """Return the load of a model that is one MoE layer's router, and the router."""
    model, load = Model(**settings), RouterLoad()
    load.start([model], sums_probabilities=is_watched)
    return load, model.router


def units(sums: torch.Tensor) -> list[int]:
    return [round(value * UNITS) for value in sums.double().tolist()]


def logits_of(router: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = tokens.detach() @ router.weight.detach().T
    return logits.reshape(-1, NUM_EXPERTS)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether sums are equal but for the last bits of what was added up."""
    return found.tolist() == pytest.approx(units(expected), abs=NUM_TOKENS)


def test_probabilities_are_those_of_all_experts_also_where_few_are_chosen() -> None:
    load, router = gate()
    router(hidden())
    (sums,) = load.probabilities().values()
    assert close(sums, torch.softmax(logits_of(router, hidden()), dim=-1).sum(dim=0))
    assert sum(load.counts()["layer.0"].tolist()) == NUM_TOKENS * TOP_K
    assert sum(sums.tolist()) == pytest.approx(NUM_TOKENS * UNITS, abs=NUM_TOKENS)


def test_scores_of_a_sigmoid_gate_are_shares_of_their_sum() -> None:
    load, router = gate(moe_router_score_function="sigmoid")
    router(hidden())
    scores = torch.sigmoid(logits_of(router, hidden()))
    expected = (scores / scores.sum(dim=-1, keepdim=True)).sum(dim=0)
    assert close(load.probabilities()["layer.0"], expected)


def test_probabilities_of_tokens_that_capacity_drops_count() -> None:
    load, router = gate(moe_expert_capacity_factor=0.5)
    router(hidden())
    assert sum(load.counts()["layer.0"].tolist()) < NUM_TOKENS * TOP_K
    total = sum(load.probabilities()["layer.0"].tolist())
    assert total == pytest.approx(NUM_TOKENS * UNITS, abs=NUM_TOKENS)


def test_gate_is_summed_up_once_where_forward_runs_without_gradients_too() -> None:
    load, router = gate()
    with torch.no_grad():
        router(hidden())
    assert not load.probabilities()["layer.0"].any()
    router(hidden())
    once = load.probabilities()["layer.0"].tolist()
    load.begin()
    router(hidden())
    assert load.probabilities()["layer.0"].tolist() == once


def test_watched_router_chooses_and_learns_as_an_unwatched_one() -> None:
    found = []
    for is_watched in (True, False):
        load, router = gate(is_watched=is_watched)
        tokens = hidden()
        probabilities, map_ = router(tokens)
        probabilities.square().sum().backward()
        found.append((probabilities.detach(), map_, tokens.grad, router.weight.grad))
        assert bool(load.probabilities()) == is_watched
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_router_is_left_as_it_was() -> None:
    load, router = gate()
    load.close()
    router(hidden())
    assert not load.counts()["layer.0"].any() and not load.probabilities()["layer.0"].any()
    assert "routing" not in vars(router)


# As a table


def test_function_that_a_layer_has_put_on_its_router_stays() -> None:
    model, load = Model(), RouterLoad()
    own = model.router.routing
    model.router.routing = own
    load.start([model], sums_probabilities=True)
    load.close()
    assert vars(model.router)["routing"] is own


def test_table_has_the_layers_in_the_order_that_is_asked_for() -> None:
    counts = {"layer.0": torch.tensor([1, 2]), "layer.3": torch.tensor([3, 4])}
    assert table(counts, ["layer.3", "layer.0"], 2).tolist() == [[3, 4], [1, 2]]
