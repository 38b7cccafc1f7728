"""Tokens and gate probabilities of a router, as the hook sees its output."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_ft.state.router_load import RouterLoad, table

UNITS = 2**20  # in which probabilities are counted
MAP = torch.tensor([[True, False, True], [True, False, False]])
PROBABILITIES = torch.tensor([[0.75, 0.0, 0.25], [0.5, 0.0, 0.0]])


def router(*, pads: bool = False) -> torch.nn.Module:
    module: Any = torch.nn.Module()
    module.config = SimpleNamespace(moe_pad_expert_input_to_capacity=pads)
    return module  # type: ignore[no-any-return]


class Load(RouterLoad):
    """Router load of one layer, whose router is called by hand."""

    def __init__(self, *, is_soft: bool = False, pads: bool = False) -> None:
        super().__init__()
        self.router = router(pads=pads)
        self.start([], sums_probabilities=is_soft)
        self._names[self.router] = "layer.0"

    def route(self, probabilities: torch.Tensor = PROBABILITIES, map_: torch.Tensor = MAP) -> None:
        """Have the router pass tokens on."""
        self._count(self.router, None, (probabilities, map_))


def test_tokens_are_added_up_over_micro_batches() -> None:
    load = Load()
    load.route()
    load.route()
    assert load.counts()["layer.0"].tolist() == [4, 0, 2]


def test_probabilities_are_added_up_over_tokens_and_micro_batches() -> None:
    load = Load(is_soft=True)
    load.route()
    load.route()
    assert load.probabilities()["layer.0"].tolist() == [int(2.5 * UNITS), 0, UNITS // 2]


def test_probabilities_are_whole_numbers_whatever_they_were() -> None:
    load = Load(is_soft=True)
    load.route(torch.full((2, 3), 1 / 3))
    assert load.probabilities()["layer.0"].dtype is torch.int64
    assert load.probabilities()["layer.0"].tolist() == [round(2 / 3 * UNITS)] * 3


def test_probabilities_of_half_precision_lose_nothing_over_many_tokens() -> None:
    load = Load(is_soft=True)
    probabilities = torch.full((4096, 3), 0.125, dtype=torch.bfloat16)
    load.route(probabilities, probabilities > 0)
    assert load.probabilities()["layer.0"].tolist() == [512 * UNITS] * 3


def test_probabilities_are_not_summed_up_where_nobody_wants_them() -> None:
    load = Load()
    load.route()
    assert load.probabilities() == {}


def test_probabilities_carry_no_graph() -> None:
    load = Load(is_soft=True)
    load.route(PROBABILITIES.clone().requires_grad_())
    assert not load._probabilities["layer.0"].requires_grad


@pytest.mark.parametrize("is_soft", [False, True])
def test_new_iteration_begins_with_nothing(is_soft: bool) -> None:
    load = Load(is_soft=is_soft)
    load.route()
    load.begin()
    assert (load.counts(), load.probabilities()) == ({}, {})


def test_forward_pass_without_gradients_is_not_counted() -> None:
    load = Load(is_soft=True)
    with torch.no_grad():
        load.route()
    assert (load.counts(), load.probabilities()) == ({}, {})


def test_tokens_that_only_fill_an_expert_up_are_not_counted() -> None:
    load = Load(pads=True)
    load.route(map_=torch.ones(2, 3, dtype=torch.bool))
    assert load.counts()["layer.0"].tolist() == [2, 0, 1]


# As a table


def test_table_has_the_layers_in_the_order_that_is_asked_for() -> None:
    counts = {"layer.0": torch.tensor([1, 2]), "layer.3": torch.tensor([3, 4])}
    assert table(counts, ["layer.3", "layer.0"], 2).tolist() == [[3, 4], [1, 2]]


def test_layer_that_was_not_counted_is_all_zero() -> None:
    counts = {"layer.0": torch.tensor([1, 2])}
    assert table(counts, ["layer.0", "layer.1"], 2).tolist() == [[1, 2], [0, 0]]


@pytest.mark.parametrize(("layers", "shape"), [([], (0, 3)), (["layer.0"], (1, 3))])
def test_table_of_nothing_has_its_shape(layers: list[str], shape: tuple[int, int]) -> None:
    found = table({}, layers, 3)
    assert found.shape == shape
    assert not found.any()
