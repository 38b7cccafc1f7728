"""A layer with slots on one rank: it computes what Megatron's layer does, and homes have its state."""

import dataclasses
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from moe_ft.config.config import ElasticConfig
from moe_ft.elastic import slot_layer
from moe_ft.elastic.homes import Homes
from moe_ft.elastic.slot_layer import NewTable, SlotMoELayer, next_table, slot_layers
from moe_ft.planning.sharding import assign_equal_slices
from moe_ft.state.parameters import GroupPlace, StatePlaces, local_parameters
from moe_ft.units import UnitKind

NUM_EXPERTS, NUM_SLOTS = 2, 5
ALONE = GroupPlace(rank=0, size=1)
PLACES = StatePlaces(dp=ALONE, expt_dp=ALONE, tp=ALONE, expt_tp=ALONE)


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """Be the only rank of a job."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def built(settings: ElasticConfig | None, **changes: Any) -> Any:
    """Return a model of one layer, with slots if there are settings, and with changes to its config."""
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=1,
        moe_router_pre_softmax=True,
        moe_ffn_hidden_size=6,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",  # the only one that needs no GPU
        add_bias_linear=False,
        use_cpu_initialization=True,
        **changes,
    )
    names = ("tp", "cp", "ep", "dp", "expt_tp", "expt_dp", "tp_ep", "tp_cp", "tp_dp_cp")
    groups: Any = SimpleNamespace(**dict.fromkeys(names, dist.group.WORLD))
    build: Any = get_moe_module_spec(use_te=False, num_experts=NUM_EXPERTS, moe_grouped_gemm=False)
    if settings is not None:
        build = partial(SlotMoELayer, *build.args, **build.keywords, slots=settings)
    layer: Any = torch.nn.Module()
    layer.layer_number, layer.mlp = 1, build(config, layer_number=1, pg_collection=groups)
    router = layer.mlp.router
    router.gating = lambda tokens: tokens @ router.weight.T  # else it wants a GPU
    model: Any = torch.nn.Module()
    model.config, model.decoder = config, torch.nn.Module()
    model.decoder.layers = torch.nn.ModuleList([layer])
    return model


def with_slots(**settings: Any) -> tuple[Any, SlotMoELayer, Homes]:
    """Return a model with slots as DDP and the optimizer leave it, its layer and its homes."""
    model = built(ElasticConfig(expert_slots=NUM_SLOTS, **settings))
    ((name, layer),) = slot_layers([model])
    assert name == "layer.0"
    for home in layer.homes.parameters():
        home.main_grad = torch.zeros_like(home)  # type: ignore[attr-defined]
    layer.start()
    return model, layer, layer.homes


def test_homes_are_the_experts_of_the_catalog_and_slots_are_left_out() -> None:
    model, _, _ = with_slots()
    stock = local_parameters([built(None)], None, PLACES, assign_equal_slices)
    found = local_parameters([model], None, PLACES, assign_equal_slices)
    assert {each.name: (each.unit, each.entry.shape, each.start, each.end) for each in found} == {
        each.name: (each.unit, each.entry.shape, each.start, each.end) for each in stock
    }
    kinds = {each.unit.kind for each in found if each.is_expert}
    assert kinds == {UnitKind.EXPERT}


def test_replicas_compute_what_one_expert_does_and_their_gradients_add_up_in_its_home() -> None:
    model, layer, homes = with_slots()
    stock = built(None)
    stock_layer = stock.decoder.layers[0].mlp
    stock_layer.router.load_state_dict(layer.router.state_dict())
    for expert, module in enumerate(stock_layer.experts.local_experts):
        slot = layer.table[0].index(expert)
        module.load_state_dict(layer.experts.local_experts[slot].state_dict())
    tokens = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(2))
    gradient = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(3))
    layer.begin()
    for each in (layer, stock_layer):
        output, _ = each(tokens.clone().requires_grad_())
        output.backward(gradient)
    layer.reduce()
    torch.testing.assert_close(layer(tokens)[0], stock_layer(tokens)[0])
    for expert, module in enumerate(stock_layer.experts.local_experts):
        for name, weight in module.named_parameters():
            home = homes.get_parameter(f"{expert}_{name.replace('.', '-')}")
            assert torch.equal(home.view(-1), weight.view(-1))
            own = home.main_grad.view(-1)  # type: ignore[attr-defined]
            torch.testing.assert_close(own, weight.grad.view(-1))
            assert own.any()
    before = homes.parameters().__next__().main_grad.clone()  # type: ignore[attr-defined]
    layer.reduce()  # again: virtual stages start before they finish
    assert torch.equal(before, homes.parameters().__next__().main_grad)  # type: ignore[attr-defined]


def test_next_table_gives_a_popular_expert_slots_where_they_level_the_ranks() -> None:
    settings = ElasticConfig(expert_slots=2)
    tokens = np.array([[[9, 1, 1, 1], [9, 1, 1, 1]]])
    found = next_table(tokens, ((0, 1), (2, 3)), settings)
    assert found is None, "each expert needs a slot, and there are no more"
    three = dataclasses.replace(settings, expert_slots=3)
    found = next_table(tokens, ((0, 0, 0), (1, 2, 3)), three)
    assert found is not None
    assert found.before == (18, 6) and sorted(found.after) == [10, 14]
    assert sorted(row.count(0) for row in found.table) == [1, 2] and found.num_moved > 0
    assert next_table(tokens, found.table, three) is None


def test_age_of_the_table_decides_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer, _ = with_slots(rebalance_interval=2)
    new = NewTable(table=((1, 1, 1, 1, 0),), before=(2,), after=(1,), num_moved=0)
    monkeypatch.setattr(slot_layer, "next_table", lambda *args: new)
    first, seen = layer.table, []
    for _ in range(4):
        layer.begin()
        layer.end()
        seen.append((layer.new_table, int(layer.table_age)))
    assert seen == [(None, 1), (new, 0)] * 2
    assert layer.table == new.table != first


def test_attempt_that_is_repeated_leaves_no_gradients_behind() -> None:
    _, layer, homes = with_slots()
    layer.begin()
    layer(torch.ones(6, 2, 8))[0].sum().backward()
    layer.begin()
    layer.reduce()
    assert not any(home.main_grad.any() for home in homes.parameters())  # type: ignore[attr-defined]


def test_table_stays_on_the_host_where_the_model_goes_to_a_device() -> None:
    _, layer, _ = with_slots(rebalance_interval=1)
    table = layer.table
    layer.to("meta")  # from which nothing can be read
    assert layer.router.weight.is_meta
    assert layer.table == table and int(layer.table_age) == 0


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_experts_take_as_many_tokens_as_their_slots_have_room_for(policy: str) -> None:
    changes = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": policy}
    model = built(ElasticConfig(expert_slots=3), **changes)
    ((_, layer),) = slot_layers([model])
    layer.begin()
    replicas = layer.table[0].count(0), layer.table[0].count(1)
    assert sorted(replicas) == [1, 2]
    with torch.no_grad():
        layer.router.weight.copy_(torch.tensor([[1.0], [0.0]]).expand(2, 8))
    _, chosen = layer.router(torch.ones(6, 2, 8) * torch.rand(6, 2, 1).clamp_min(0.1))
    # 12 tokens for the first expert, and 4 a slot.
    assert chosen.sum(dim=0).tolist() == [4 * replicas[0], 0]


# In the second case the first micro-batch drops, and sums of tokens and capacities would be equal.
@pytest.mark.parametrize("batches", [[[9, 1]], [[12, 0], [6, 2]]])
def test_next_table_gives_slots_to_experts_that_drop_tokens(batches: list[list[int]]) -> None:
    settings = ElasticConfig(expert_slots=2)
    tokens, table = np.array([[each, each] for each in batches]), ((0, 1), (0, 1))
    capacities = np.full((len(batches), 2), 3)  # of a slot, and expert 0 has two
    if len(batches) == 2:
        capacities[:] = [[4], [5]]
    found = next_table(tokens, table, settings, capacities)
    assert found is not None
    assert sorted(expert for row in found.table for expert in row) == [0, 0, 0, 1]
    assert found.dropped == ((6, 0) if len(batches) == 1 else (8, 0))
    assert sum(found.before) == tokens.sum() - found.dropped[0]
    assert sum(found.after) == tokens.sum()
    assert next_table(tokens, found.table, settings, capacities) is None


def test_micro_batches_are_counted_one_by_one_where_each_drops_tokens_by_itself() -> None:
    model = built(ElasticConfig(expert_slots=3, rebalance_interval=1), moe_expert_capacity_factor=1)
    ((_, layer),) = slot_layers([model])
    for home in layer.homes.parameters():
        home.main_grad = torch.zeros_like(home)  # type: ignore[attr-defined]
    layer.start()
    layer.begin()
    scarce = int(layer.table[0].count(1) == 1)  # expert with one slot, which takes 4 of 12 tokens
    with torch.no_grad():
        layer.router.weight.zero_()[scarce] = 1.0
    for sign in (1, 1, -1):  # all tokens for it, then none
        layer(sign * torch.ones(6, 2, 8))
    layer.end()
    assert layer.new_table is not None
    assert layer.new_table.dropped == (8 + 8 + 4, 4 + 4 + 8)
