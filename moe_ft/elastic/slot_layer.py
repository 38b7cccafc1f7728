"""Megatron's MoE layer over slots: each rank has some, and a table says which expert is in each.

Slots are experts for Megatron: the layer is built for as many as all ranks have slots, the router for the
experts of the model. Its map of tokens to experts is widened to one of tokens to slots, and dispatcher,
experts and recomputation are Megatron's own. The table is in a buffer, so that records of iterations hold it
and recoveries put it back. It stays on the host, so that nothing waits for the device to read it. With
Megatron's capacity factor every slot of an expert takes as many tokens. Where weights come from and gradients
go is homes.py's.

Sources: Lazarus, section 4 (replicas that follow the load, algorithm 1); SYMI, section 4.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, override

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_capacity

from moe_ft.config.config import ElasticConfig
from moe_ft.elastic.homes import Homes
from moe_ft.planning.slot_tables import (
    Numbers,
    Replicas,
    Table,
    balanced,
    count_moves,
    first_table,
    replicas_of,
    share_of,
)
from moe_ft.state.parameters import global_name

Routed = tuple[torch.Tensor, torch.Tensor]  # [token, expert] probabilities, and which are chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTable:
    """Table that a layer has from the next iteration on.

    Attributes:
        before: ``[rank]`` tokens of the iteration that has just ended, but for how micro-batches round.
        after: ``[rank]`` tokens that they would have got with the new table.
        num_moved: replicas that come to a rank that did not have them.
        dropped: tokens above the capacity of the slots, before and after.
    """

    table: Table
    before: tuple[int, ...]
    after: tuple[int, ...]
    num_moved: int
    dropped: tuple[int, int] = (0, 0)


def next_table(
    tokens: Numbers,
    table: Table,
    settings: ElasticConfig,
    capacities: Numbers | None = None,
) -> NewTable | None:
    """Return a table that drops fewer tokens, or as many with fewer on the busiest rank; None if none does.

    Args:
        tokens: ``[batch, source, expert]`` of an iteration, those above the capacity included.
        table: that of the iteration.
        capacities: ``[batch, source]`` tokens that one slot takes of a micro-batch, which drops by itself;
            None if there is no capacity factor, and tokens may then be sums of micro-batches.
    """
    load = tokens.sum(axis=(0, 1)).tolist()
    found = balanced(load, len(table), settings.expert_slots, settings.min_replicas)
    (dropped, before), (new_dropped, after) = (
        _outcome(tokens, replicas_of(each, len(load)), capacities) for each in (table, found)
    )
    if (new_dropped, max(after)) >= (dropped, max(before)):
        return None
    return NewTable(
        table=found,
        before=before,
        after=after,
        num_moved=count_moves(table, found),
        dropped=(dropped, new_dropped),
    )


def _outcome(
    tokens: Numbers, replicas: Replicas, capacities: Numbers | None
) -> tuple[int, tuple[int, ...]]:
    """Return how many tokens replicas drop, and ``[rank]`` those that they take."""
    kept = tokens
    if capacities is not None:
        kept = np.minimum(tokens, capacities[..., None] * replicas.sum(axis=1))
    _, received = share_of(kept.sum(axis=0), replicas, 0)
    return int((tokens - kept).sum()), tuple(received.tolist())


class SlotMoELayer(MoELayer):  # type: ignore[misc]  # Megatron has no types
    """MoE layer with slots. Owned by the training thread.

    All ranks of the expert-parallel group, which is the whole pipeline stage, have equal tables and counts.

    Attributes:
        new_table: made at the end of this iteration; None if the old one stays.
    """

    def __init__(
        self, config: Any, submodules: Any = None, *args: Any, slots: ElasticConfig, **kwargs: Any
    ) -> None:
        """Build Megatron's layer for slots, and homes of the experts."""
        group = kwargs["pg_collection"].ep
        sizes = (config.num_moe_experts, group.size(), slots.expert_slots)
        table = first_table(*sizes, slots.min_replicas)
        wide = copy.copy(config)
        wide.num_moe_experts = group.size() * slots.expert_slots
        router = partial(_build_router, submodules.router, config)
        parts = dataclasses.replace(submodules, router=router)
        super().__init__(wide, parts, *args, **kwargs)
        self.config = config
        self._slot_settings = slots
        self._rank = group.rank()
        self.homes = Homes(tuple(self.experts.local_experts), config.num_moe_experts, group)
        numbers = torch.tensor(table, device="cpu")
        self.register_buffer("slot_table", numbers, persistent=False)
        age = torch.zeros((), dtype=torch.int64, device="cpu")
        self.register_buffer("table_age", age, persistent=False)
        self.new_table: NewTable | None = None
        self._is_stale = False
        self._is_reduced = False
        self._tokens: list[Numbers] = []  # of micro-batches, or one sum where none are dropped
        self._wanted: torch.Tensor | None = None  # [expert] tokens before some are dropped
        if config.moe_expert_capacity_factor is not None:
            self.router.routing = partial(self._route, self.router.routing)
        self._place(table)

    @override
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        on_host = {name: self._buffers[name] for name in ("slot_table", "table_age")}
        super()._apply(fn, recurse)
        self._buffers.update(on_host)
        return self

    @property
    def table(self) -> Table:
        """The table of the iteration that runs or begins next."""
        return tuple(tuple(row) for row in self.slot_table.tolist())

    def _place(self, table: Table) -> None:
        """Dispatch by a table from now on."""
        num_ranks, num_experts = len(table), self.config.num_moe_experts
        self._placed = table
        self._replicas = replicas_of(table, num_experts)
        self._first_slots = np.full((num_experts, num_ranks), -1, dtype=np.int64)
        for slot, (expert, rank) in enumerate(
            (expert, rank) for rank, row in enumerate(table) for expert in row
        ):
            if self._first_slots[expert, rank] < 0:
                self._first_slots[expert, rank] = slot

    def start(self) -> None:
        """Give homes the weights of the slots. Called by all ranks when model and optimizer are built."""
        self.homes.open_slots()
        self.homes.take_weights(self.table)
        self._is_stale = True

    def begin(self) -> None:
        """Forget gradients and counts: an iteration begins, or is tried again."""
        self.homes.clear_gradients()
        self.new_table = None
        self._is_stale = True
        self._is_reduced = False
        self._tokens = [np.zeros((len(self._placed), self.config.num_moe_experts), dtype=np.int64)]

    def reduce(self) -> None:
        """Bring gradients to the homes, once an iteration. Called by all ranks; backward is over."""
        if not self._is_reduced:
            self.homes.reduce_gradients(self._placed)
            self._is_reduced = True

    def end(self) -> None:
        """Choose the table of the next iteration; the optimizer steps next, or leaves the step out.

        Every rank has counted the tokens of all, so nothing is exchanged.
        """
        self._is_stale = True
        settings = self._slot_settings
        if not settings.rebalance_interval:
            return
        self.table_age += 1
        if int(self.table_age) < settings.rebalance_interval:
            return
        self.table_age.zero_()
        tokens, capacities = np.stack(self._tokens), None
        if self._wanted is not None:
            capacities = np.stack([self._capacities_of(each.sum(axis=1)) for each in tokens])
        self.new_table = next_table(tokens, self._placed, settings, capacities)
        if self.new_table is not None:
            self.slot_table.copy_(torch.tensor(self.new_table.table))

    @override
    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Any:
        self._renew()
        sent = self._count(routing_map)
        slots = torch.from_numpy(np.repeat(self._first_slots.ravel(), sent.ravel()))
        # By expert, then by token. Their number is known, so the host need not wait for it.
        chosen = torch.nonzero_static(routing_map.T, size=len(slots))
        experts, tokens = chosen.unbind(dim=1)
        slots = slots.to(tokens.device, non_blocking=True)
        wide_map = routing_map.new_zeros((len(routing_map), self.slot_table.numel()))
        wide_map[tokens, slots] = True
        wide_probs = probs.new_zeros(wide_map.shape)
        wide_probs = wide_probs.index_put((tokens, slots), probs[tokens, experts])
        return super().preprocess(hidden_states, wide_probs, wide_map)

    def _renew(self) -> None:
        """Bring the experts of the table into the slots, if they have changed. Called by all ranks."""
        if self._is_stale:  # the first micro-batch after a step or a recovery
            self._place(self.table)
            self.homes(self._placed)
            self._is_stale = False

    def _count(self, routing_map: torch.Tensor) -> Numbers:
        """Return ``[expert, destination]`` tokens of a micro-batch that this rank sends, and count them."""
        own = routing_map.sum(dim=0, dtype=torch.int64)
        if self._wanted is not None:
            own = torch.cat([own, self._wanted])
        everyone = own.new_empty((len(self._placed), len(own)))
        dist.all_gather_into_tensor(everyone, own[None], group=self.ep_group)
        counts = everyone.cpu().numpy()
        tokens, wanted = (counts[:, : routing_map.shape[1]], counts[:, -routing_map.shape[1] :])
        found, _ = share_of(tokens, self._replicas, self._rank)
        # Full recomputation runs forward twice, the first time without gradients. Evaluation has none.
        if torch.is_grad_enabled() and self._slot_settings.rebalance_interval:
            if self._wanted is None:
                self._tokens = [self._tokens[0] + wanted]
            else:
                self._tokens.append(wanted)
        return found

    def _capacities_of(self, routed: Numbers | list[int]) -> Numbers:
        """Return tokens that a slot takes, for numbers of tokens times top-k."""
        factor = self.config.moe_expert_capacity_factor
        slots = self.slot_table.numel()
        return np.array([get_capacity(int(each), slots, factor) for each in routed])

    def _route(self, routing: Callable[..., Routed], *args: Any, **kwargs: Any) -> Routed:
        """Route by Megatron's function, with the capacity of an expert's slots for the expert's own."""
        self._renew()  # all ranks have the new table, and capacities are by it
        original = megatron_router.apply_router_token_dropping
        megatron_router.apply_router_token_dropping = self._drop
        try:
            return routing(*args, **kwargs)
        finally:
            megatron_router.apply_router_token_dropping = original

    def _drop(
        self,
        probs: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        router_topk: int,
        drop_policy: str = "probs",
        **_: Any,
    ) -> Routed:
        """Drop the tokens above the capacities of the experts: so many tokens for each slot.

        Source: SYMI, whose slots have one capacity each.
        """
        self._wanted = routing_map.sum(dim=0, dtype=torch.int64)
        num_tokens = len(routing_map)
        (capacity,) = self._capacities_of([num_tokens * router_topk])
        keys = probs if drop_policy == "probs" else routing_map.int()
        counts = self._replicas.sum(axis=1)
        mask = torch.zeros_like(routing_map)
        for count in set(counts.tolist()):
            # As Megatron asks for them, so that single slots keep what its experts keep among equals.
            columns = torch.from_numpy(np.flatnonzero(counts == count)).to(probs.device)
            most = min(int(count * capacity), num_tokens)
            best = torch.topk(keys[:, columns], k=most, dim=0, sorted=False).indices
            kept = torch.zeros_like(mask[:, columns])
            mask[:, columns] = kept.scatter(0, best, value=True)
        kept_map = routing_map & mask
        return probs * kept_map, kept_map

    @override
    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        homes = self._modules.pop(
            "homes"
        )  # parts of experts, which are described by those in the slots
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            self._modules["homes"] = homes


def _build_router(router: Any, own_config: Any, **kwargs: Any) -> Any:
    """Build a router of the model's experts, whatever the layer is built for."""
    return router(**{**kwargs, "config": own_config})


def slot_layers(model: Sequence[torch.nn.Module]) -> Iterator[tuple[str, SlotMoELayer]]:
    """Yield the layers with slots of some model chunks in their order, with names such as "layer.3"."""
    for chunk in model:
        modules = dict(chunk.named_modules())
        for path, module in modules.items():
            if isinstance(module, SlotMoELayer):
                yield global_name(f"{path}.router.weight", modules)[0].layer_name, module


def with_slots(spec: Any, settings: ElasticConfig) -> Any:
    """Return Megatron's spec of the layers of a stage, with slots in its MoE layers."""

    def changed(layer: Any) -> Any:
        mlp = layer.submodules.mlp
        if not (isinstance(mlp, partial) and mlp.func is MoELayer):
            return layer
        mlp = partial(SlotMoELayer, *mlp.args, **{**mlp.keywords, "slots": settings})
        parts = dataclasses.replace(layer.submodules, mlp=mlp)
        return dataclasses.replace(layer, submodules=parts)

    if not hasattr(spec, "layer_specs"):
        return changed(spec)
    return dataclasses.replace(spec, layer_specs=[changed(layer) for layer in spec.layer_specs])
