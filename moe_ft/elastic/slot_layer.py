"""Megatron's MoE layer over slots: each rank has some, and a table says which expert is in each.

Slots are experts for Megatron: the layer is built for as many as all ranks have slots, the router for the
experts of the model. Its map of tokens to experts is widened to one of tokens to slots, and dispatcher,
experts and recomputation are Megatron's own. The table is in a buffer, so that records of iterations hold it
and recoveries put it back. Where weights come from and gradients go is homes.py's.

Sources: Lazarus, section 4 (replicas that follow the load, algorithm 1); SYMI, section 4.
"""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, override

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer

from moe_ft.config.elastic import ElasticConfig
from moe_ft.elastic.homes import Homes
from moe_ft.planning.slot_moves import count_moves
from moe_ft.planning.slot_tables import Table, balanced, replicas_of, stock
from moe_ft.planning.token_shares import Numbers, share_of
from moe_ft.state.parameters import global_name


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTable:
    """Table that a layer has from the next iteration on.

    Attributes:
        before: ``[rank]`` tokens of the iteration that has just ended.
        after: ``[rank]`` tokens that they would have got with the new table.
        num_moved: replicas that come to a rank that did not have them.
    """

    table: Table
    before: tuple[int, ...]
    after: tuple[int, ...]
    num_moved: int


def first_table(num_experts: int, num_ranks: int, settings: ElasticConfig) -> Table:
    """Return the table that a run begins with: Megatron's where every expert has one slot."""
    if num_ranks * settings.expert_slots == num_experts:
        return stock(num_experts, num_ranks)
    return balanced([1] * num_experts, num_ranks, settings.expert_slots, settings.min_replicas)


def next_table(
    tokens: Numbers, table: Table, received: Numbers, settings: ElasticConfig
) -> NewTable | None:
    """Return a table with which the busiest rank would have got fewer tokens; None if there is none.

    Args:
        tokens: ``[source, expert]`` of an iteration.
        table: that of the iteration.
        received: ``[rank]`` tokens that it has brought.
    """
    load = tokens.sum(axis=0).tolist()
    found = balanced(load, len(table), settings.expert_slots, settings.min_replicas)
    _, after = share_of(tokens, replicas_of(found, len(load)), 0)
    if after.max() >= received.max():
        return None
    return NewTable(
        table=found,
        before=tuple(received.tolist()),
        after=tuple(after.tolist()),
        num_moved=count_moves(table, found),
    )


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
        table = first_table(config.num_moe_experts, group.size(), slots)
        wide = copy.copy(config)
        wide.num_moe_experts = group.size() * slots.expert_slots
        router = partial(_build_router, submodules.router, config)
        parts = dataclasses.replace(submodules, router=router)
        super().__init__(wide, parts, *args, **kwargs)
        self.config = config
        self._slot_settings, self._rank = slots, group.rank()
        self.homes = Homes(tuple(self.experts.local_experts), config.num_moe_experts, group)
        self.register_buffer("slot_table", torch.tensor(table), persistent=False)
        self.register_buffer("table_age", torch.zeros((), dtype=torch.int64), persistent=False)
        self.new_table: NewTable | None = None
        self._is_stale, self._is_reduced = False, False
        self._tokens = self._received = np.zeros(0, dtype=np.int64)
        self._place(table)

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
        self._is_stale, self._is_reduced = True, False
        self._tokens = np.zeros((len(self._placed), self.config.num_moe_experts), dtype=np.int64)
        self._received = np.zeros(len(self._placed), dtype=np.int64)

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
        self.new_table = next_table(self._tokens, self._placed, self._received, settings)
        if self.new_table is not None:
            self.slot_table.copy_(torch.tensor(self.new_table.table))

    @override
    def preprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor
    ) -> Any:
        if self._is_stale:  # the first micro-batch after a step or a recovery
            self._place(self.table)
            self.homes(self._placed)
            self._is_stale = False
        sent = self._count(routing_map)
        slots = torch.from_numpy(np.repeat(self._first_slots.ravel(), sent.ravel()))
        experts, tokens = routing_map.T.nonzero(as_tuple=True)  # by expert, then by token
        slots = slots.to(tokens.device)
        wide_map = routing_map.new_zeros((len(routing_map), self.slot_table.numel()))
        wide_map[tokens, slots] = True
        wide_probs = probs.new_zeros(wide_map.shape)
        wide_probs = wide_probs.index_put((tokens, slots), probs[tokens, experts])
        return super().preprocess(hidden_states, wide_probs, wide_map)

    def _count(self, routing_map: torch.Tensor) -> Numbers:
        """Return ``[expert, destination]`` tokens of a micro-batch that this rank sends, and count them."""
        own = routing_map.sum(dim=0, dtype=torch.int64)
        everyone = own.new_empty((len(self._placed), len(own)))
        dist.all_gather_into_tensor(everyone, own[None], group=self.ep_group)
        tokens = everyone.cpu().numpy()
        found, received = share_of(tokens, self._replicas, self._rank)
        # Full recomputation runs forward twice, the first time without gradients. Evaluation has none.
        if torch.is_grad_enabled():
            self._tokens = self._tokens + tokens
            self._received = self._received + received
        return found

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
