"""Capacity above Megatron's goes to experts that are owed tokens, and leaves everything else as it was."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from torch.utils.checkpoint import checkpoint

from moe_ft.state.capacity import CapacityBoost, extra_tokens
from tests.unit.moe_ft.one_router import LAYER, NUM_EXPERTS, Model, hidden


def expected(
    probs: torch.Tensor,
    chosen: torch.Tensor,
    kept: torch.Tensor,
    owed: list[int],
    most: int,
    capacity: int,
    policy: str,
) -> set[tuple[int, int]]:
    """Return token and expert of what is taken back: one token after the other, from the largest debt on."""
    num_tokens, num_experts = probs.shape
    room = sum(max(0, capacity - int(chosen[:, each].sum())) for each in range(num_experts))
    found = set()
    for expert in sorted(range(num_experts), key=lambda each: -owed[each]):
        dropped = [
            token
            for token in range(num_tokens)
            if chosen[token, expert] and not kept[token, expert]
        ]
        if policy == "probs":
            dropped.sort(key=lambda token, expert=expert: -float(probs[token, expert]))
        taken = dropped[: min(owed[expert], most, room)]
        room -= len(taken)
        found |= {(token, expert) for token in taken}
    return found


@given(
    st.integers(0, 2**30),
    st.integers(2, 6),
    st.integers(4, 40),
    st.sampled_from([0.5, 1.0, 1.25]),
    st.sampled_from(["probs", "position"]),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
)
def test_owed_experts_take_the_best_dropped_tokens_in_the_room_of_others_and_nothing_else_moves(
    seed: int, num_experts: int, num_tokens: int, factor: float, policy: str, debts: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Some experts are liked far more than others.
    liking = torch.randn(num_experts, generator=generator) * 2
    scores = torch.randn(num_tokens, num_experts, generator=generator) + liking
    top = torch.topk(scores, k=2, dim=1)
    probs = torch.zeros_like(scores).scatter(1, top.indices, torch.softmax(top.values, dim=1))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, top.indices, True)
    given_: dict[str, Any] = {
        "router_topk": 2,
        "capacity_factor": factor,
        "drop_policy": policy,
        "pad_to_capacity": False,
    }
    _, kept = apply_router_token_dropping(probs, chosen, **given_)
    owed = debts[:num_experts]
    extra = extra_tokens(probs, chosen, kept, torch.tensor(owed), 0.1, **given_)
    capacity = math.ceil(num_tokens * 2 / num_experts * factor)
    most = math.ceil(capacity * 0.1)
    found = {(int(token), int(expert)) for token, expert in extra.nonzero()}
    assert found == expected(probs, chosen, kept, owed, most, capacity, policy)


def routed(model: Model, seed: int = 3, *, is_recomputed: bool = False) -> list[torch.Tensor]:
    """Return what the router returns for some tokens, and the gradient of its weights."""
    router, tokens = model.router, hidden(seed)
    router.weight.grad = None
    if is_recomputed:
        probs, chosen = checkpoint(router, tokens, use_reentrant=True)
    else:
        probs, chosen = router(tokens)
    probs.square().sum().backward()
    return [probs.detach(), chosen, router.weight.grad]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*each) for each in zip(one, other, strict=True))


@pytest.fixture
def model() -> Model:
    found = Model(moe_expert_capacity_factor=1.0)
    found.router.weight.data[0] *= 4  # takes more than its capacity
    return found


def boost_of(model: Model, *owed: int) -> CapacityBoost:
    boost = CapacityBoost(1.0)
    boost.start([model])
    boost.use({LAYER: owed})
    return boost


OWED = (2, 2, 2, 2)


def test_router_passes_more_tokens_on_while_they_are_owed_and_is_megatrons_own_afterwards(
    model: Model,
) -> None:
    stock = routed(model)
    boost = boost_of(model, *OWED)
    more = routed(model)
    made_up = boost.made_up()[LAYER]
    assert torch.equal(more[1].sum(dim=0), stock[1].sum(dim=0) + made_up)
    assert int(made_up.sum()) > 0
    assert bool((more[1] | ~stock[1]).all())
    is_old = stock[1]
    assert torch.equal(more[0][is_old], stock[0][is_old])
    boost.use({LAYER: (0,) * NUM_EXPERTS})
    assert "routing" not in vars(model.router)
    assert megatron_router.apply_router_token_dropping is apply_router_token_dropping
    assert same(routed(model), stock)


def test_wrapper_of_somebody_else_is_put_back(model: Model) -> None:
    original = model.router.routing
    model.router.routing = lambda *args, **kwargs: original(*args, **kwargs)
    theirs = model.router.routing
    boost_of(model, *OWED).close()
    assert model.router.routing is theirs


def test_forward_pass_that_is_recomputed_gives_the_same_and_counts_once(model: Model) -> None:
    boost = boost_of(model, *OWED)
    once = routed(model)
    counted = boost.made_up()[LAYER]
    boost.begin()
    assert same(routed(model, is_recomputed=True), once)
    assert torch.equal(boost.made_up()[LAYER], counted)


def test_evaluation_drops_what_it_always_drops(model: Model) -> None:
    model.router.eval()
    stock = routed(model)
    boost = boost_of(model, *OWED)
    assert same(routed(model), stock)
    assert boost.made_up() == {}


def test_failure_in_a_router_leaves_megatrons_function(model: Model) -> None:
    boost_of(model, *OWED)
    with pytest.raises(RuntimeError):
        model.router.routing(torch.zeros(1, 3))
    assert megatron_router.apply_router_token_dropping is apply_router_token_dropping
