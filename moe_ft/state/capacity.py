"""A higher capacity for experts that are owed tokens, in the routers of a model; else Megatron's own.

Only while a router with such experts runs, the function that drops tokens is another one: it asks the
original, and then takes back some of the tokens that were dropped. Without debts nothing is replaced. All
numbers are integers of this rank's micro-batch and of debts that do not change within an iteration. So a
forward pass that is recomputed, an iteration that is repeated and a run that is restarted do the same.

Source: MoEtion, which raises the capacity by ten percent until lost tokens are made up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_utils import get_capacity

from moe_ft.state.router_load import routers_of

Routed = tuple[torch.Tensor, torch.Tensor]  # [tokens, experts]: probabilities, and which are chosen


class CapacityBoost:
    """Extra tokens of experts on this rank. Owned by the training thread; none of it is kept in a model."""

    def __init__(self, fraction: float) -> None:
        """Take by how much of it a capacity may be exceeded."""
        self._fraction = fraction
        self._routers: dict[torch.nn.Module, str] = {}
        self._made_up: dict[str, torch.Tensor] = {}
        self._remove: list[Callable[[], None]] = []

    def start(self, model: Sequence[torch.nn.Module]) -> None:
        """Find the routers of the model chunks."""
        self._routers = routers_of(model)

    def begin(self) -> None:
        """Forget the extra tokens, because an iteration begins or is repeated."""
        self._made_up = {}

    def made_up(self) -> dict[str, torch.Tensor]:
        """Return ``[expert]`` tokens above the capacity since `begin` by layer name, on the device."""
        return dict(self._made_up)

    def use(self, owed: Mapping[str, Sequence[int]]) -> None:
        """Raise the capacity of experts from now on; of none if nothing is owed.

        Args:
            owed: ``[expert]`` by layer name, tokens of one call of a router on this rank.
        """
        self.close()
        for router, name in self._routers.items():
            if any(owed.get(name, ())):
                self._raise(router, name, owed[name])

    def close(self) -> None:
        """Leave all routers as they were."""
        for remove in self._remove:
            remove()
        self._remove.clear()

    def _raise(self, router: Any, name: str, owed: Sequence[int]) -> None:
        routing, debts = router.routing, torch.tensor(owed, device=router.weight.device)
        is_own = "routing" in vars(router)  # somebody else has wrapped it

        def raised(*args: Any, **kwargs: Any) -> Any:
            if not router.training:  # evaluation drops what it always drops
                return routing(*args, **kwargs)
            original = megatron_router.apply_router_token_dropping

            def drop(probs: torch.Tensor, routing_map: torch.Tensor, **given: Any) -> Routed:
                _, kept = original(probs, routing_map, **given)
                extra = extra_tokens(probs, routing_map, kept, debts, self._fraction, **given)
                if torch.is_grad_enabled():  # not in the first of two forward passes
                    self._made_up[name] = self._made_up.get(name, 0) + extra.sum(dim=0)
                final = kept | extra
                return probs * final, final

            megatron_router.apply_router_token_dropping = drop
            try:
                return routing(*args, **kwargs)
            finally:
                megatron_router.apply_router_token_dropping = original

        router.routing = raised
        self._remove.append(
            lambda: setattr(router, "routing", routing) if is_own else delattr(router, "routing")
        )


@torch.no_grad()
def extra_tokens(
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    kept: torch.Tensor,
    owed: torch.Tensor,
    fraction: float,
    *,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    **_: Any,
) -> torch.Tensor:
    """Return ``[tokens, experts]`` the dropped tokens that experts which are owed some take after all.

    They are the best ones by the policy that dropped them. Together no more than other experts leave of their
    capacity; the largest debts come first.

    Args:
        kept: ``[tokens, experts]`` the tokens that were not dropped.
        owed: ``[expert]`` tokens.
        fraction: of the capacity, by which it may be exceeded.
    """
    num_tokens, num_experts = probs.shape
    capacity = get_capacity(num_tokens * router_topk, num_experts, capacity_factor)
    most = min(math.ceil(capacity * fraction), num_tokens)
    dropped = routing_map & ~kept
    wanted = torch.minimum(dropped.sum(dim=0), owed).clamp_max(most)
    unused = (capacity - routing_map.sum(dim=0)).clamp_min(0).sum()
    order = torch.argsort(owed, descending=True, stable=True)
    sums = torch.minimum(wanted[order].cumsum(dim=0), unused)
    granted = torch.zeros_like(wanted)
    granted[order] = torch.diff(sums, prepend=sums.new_zeros(1))
    # Not of the dtype of the probabilities: bf16 knows no more than 256 places.
    by_place = -torch.arange(num_tokens, device=probs.device, dtype=torch.float32).unsqueeze(1)
    keys = probs if drop_policy == "probs" else by_place.expand_as(probs)
    best = torch.topk(keys.masked_fill(~dropped, -torch.inf), k=most, dim=0).indices
    is_granted = torch.arange(most, device=probs.device).unsqueeze(1) < granted
    return torch.zeros_like(routing_map).scatter(0, best, is_granted)
