"""Homes of the experts of a layer: a part of every expert on every rank, which the optimizer trains.

Slots are the experts that compute. After backward their gradients go to the homes, and before the next
forward pass the weights of the homes go to the slots: two all-to-alls of equal parts. Their sizes do not
depend on the table, so that moving an expert costs nothing, and moments and masters never move. Megatron sees
homes as experts' parameters whose data-parallel group has one rank: its DDP, optimizer, clipping and loss
scales are used as they are. The dispatch of tokens to slots is slot_layer.py's.

Source: SYMI, section 4 (uniform shards of the optimizer, weights sent to the slots of the next placement).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from moe_ft.planning.slot_tables import Table
from moe_ft.state.parameters import HomePart, mark_home, mark_slot

_COPIED_MARKS = ("tensor_model_parallel", "partition_dim", "partition_stride")


@dataclass(frozen=True, slots=True)
class _Weight:
    """A parameter of an expert: its name, its elements, and the columns of its homes in a message."""

    name: str
    size: int
    start: int
    end: int

    @property
    def width(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Order:
    """Indices by a table, on the device: the host waits for it only where a table is new.

    Attributes:
        experts: ``[slot]`` of all ranks.
        places: experts and slots: the first slot of each expert, then the second of those that have two...
    """

    table: Table
    experts: torch.Tensor
    places: Sequence[tuple[torch.Tensor, torch.Tensor]]


class Homes(torch.nn.Module):
    """This rank's parts of all experts of a layer, as parameters. Owned by the training thread."""

    def __init__(self, slots: Sequence[torch.nn.Module], num_experts: int, group: Any) -> None:
        """Make homes; slots are hidden from Megatron until `open_slots`.

        Args:
            group: the expert-parallel ranks, which are all ranks of the pipeline stage.
        """
        super().__init__()
        self._slots = tuple(slots)
        self._group = group
        self._num_ranks = group.size()
        self._num_experts = num_experts
        named = dict(slots[0].named_parameters())
        widths = [-(-each.numel() // self._num_ranks) for each in named.values()]
        starts = pairwise(accumulate(widths, initial=0))
        self._weights = [
            _Weight(name, each.numel(), *columns)
            for (name, each), columns in zip(named.items(), starts, strict=True)
        ]
        self._gradients: list[torch.Tensor] = []  # by weight, [slot, rank * width]
        self._sent_bytes = 0
        self._order: _Order | None = None
        for expert in range(num_experts):
            for weight in self._weights:
                self._make(expert, weight, named[weight.name])
        for slot in slots:
            for parameter in slot.parameters():
                parameter.requires_grad_(False)
                mark_slot(parameter)

    def _make(self, expert: int, weight: _Weight, like: torch.nn.Parameter) -> None:
        # Megatron decays the weights of what has more than one dimension.
        shape = (1, weight.width) if like.dim() > 1 else (weight.width,)
        home: Any = torch.nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))
        home.allreduce = False
        for mark in _COPIED_MARKS:
            if hasattr(like, mark):
                setattr(home, mark, getattr(like, mark))
        first = self._group.rank() * weight.width
        start, end = (min(each, weight.size) for each in (first, first + weight.width))
        mark_home(home, HomePart(expert, self._num_experts, start, end, like))
        self.register_parameter(f"{expert}_{weight.name.replace('.', '-')}", home)

    def open_slots(self) -> None:
        """Let slots have gradients, of homes' precision. DDP and the optimizer have been built."""
        for weight in self._weights:
            gradients = torch.zeros(
                (len(self._slots), self._num_ranks * weight.width),
                dtype=self._home(0, weight).main_grad.dtype,
                device=self._home(0, weight).device,
            )
            self._gradients.append(gradients)
            for slot, own in zip(self._slots, gradients, strict=True):
                parameter: Any = slot.get_parameter(weight.name)
                parameter.requires_grad_(True)
                parameter.main_grad = own[: weight.size].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(_accumulate)
        self.clear_gradients()

    def take_sent_bytes(self) -> int:
        """Return the bytes that this rank has sent to others since the last call: weights and gradients."""
        found, self._sent_bytes = self._sent_bytes, 0
        return found

    def clear_gradients(self) -> None:
        """Forget what backward has left in the slots."""
        for gradients in self._gradients:
            gradients.zero_()
        for slot in self._slots:
            for parameter in slot.parameters():
                parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    @torch.no_grad()
    def take_weights(self, table: Table) -> None:
        """Copy the weights of the first slot of each expert to its homes. Called by all ranks."""
        flat = [
            [slot.get_parameter(each.name).view(-1) for slot in self._slots]
            for each in self._weights
        ]
        pieces = self._to_homes(
            [self._padded(*each) for each in zip(self._weights, flat, strict=True)]
        )
        (_, first), *_ = self._ordered(table).places
        self._put(pieces[first], "data")

    def _padded(self, weight: _Weight, flat: Sequence[torch.Tensor]) -> torch.Tensor:
        found = flat[0].new_zeros((len(flat), self._num_ranks * weight.width))
        for row, each in zip(found, flat, strict=True):
            row[: weight.size] = each
        return found

    @torch.no_grad()
    def reduce_gradients(self, table: Table) -> None:
        """Add up the gradients of the replicas of each expert in its homes. Called by all ranks.

        The order is that of ranks and slots, so that the same table gives the same bits.
        """
        pieces = self._to_homes(self._gradients)
        (_, first), *others = self._ordered(table).places
        total = pieces[first]
        for experts, places in others:
            total[experts] += pieces[places]
        self._put(total, "main_grad")

    def _to_homes(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Send each rank its part of what is in the slots; return ``[rank * slot, column]``."""
        shape = (len(self._slots), self._num_ranks, -1)
        sent = torch.cat([each.view(shape) for each in gradients], dim=2).transpose(0, 1)
        return self._exchange(sent.contiguous()).flatten(0, 1)

    def _put(self, rows: torch.Tensor, name: str) -> None:
        for weight in self._weights:
            homes = (self._home(expert, weight) for expert in range(self._num_experts))
            targets = [getattr(each, name).view(-1) for each in homes]
            torch._foreach_copy_(targets, list(rows[:, weight.start : weight.end]))

    def _ordered(self, table: Table) -> _Order:
        if self._order is None or self._order.table != table:
            device = self._home(0, self._weights[0]).device
            experts = torch.tensor([expert for row in table for expert in row], device=device)
            pairs = [
                (torch.tensor(own, device=device), torch.tensor(slots, device=device))
                for own, slots in _places(table, self._num_experts)
            ]
            self._order = _Order(table, experts, pairs)
        return self._order

    @torch.no_grad()
    def forward(self, table: Table) -> None:
        """Copy the weights of homes to the slots of a table. Called by all ranks.

        As a forward pass, since Megatron's DDP waits for a module's parameters right before that.
        """
        columns = [
            torch.stack([self._home(expert, each).view(-1) for expert in range(self._num_experts)])
            for each in self._weights
        ]
        sent = torch.cat(columns, dim=1)[self._ordered(table).experts]
        sent = sent.view(self._num_ranks, len(self._slots), -1)
        received = self._exchange(sent)
        for weight in self._weights:
            whole = received[:, :, weight.start : weight.end].transpose(0, 1).flatten(1)
            slots = [slot.get_parameter(weight.name).data.view(-1) for slot in self._slots]
            torch._foreach_copy_(slots, list(whole[:, : weight.size]))

    def _exchange(self, sent: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        self._sent_bytes += sent.nbytes // self._num_ranks * (self._num_ranks - 1)
        return received

    def _home(self, expert: int, weight: _Weight) -> Any:
        return self.get_parameter(f"{expert}_{weight.name.replace('.', '-')}")


def _places(table: Table, num_experts: int) -> list[tuple[list[int], list[int]]]:
    """Return experts and slots, counted over all ranks: first all experts, then those with two replicas..."""
    slots_of: list[list[int]] = [[] for _ in range(num_experts)]
    for place, expert in enumerate(expert for row in table for expert in row):
        slots_of[expert].append(place)
    found = []
    for depth in range(max(map(len, slots_of))):
        experts = [expert for expert, slots in enumerate(slots_of) if len(slots) > depth]
        found.append((experts, [slots_of[expert][depth] for expert in experts]))
    return found


def _accumulate(parameter: Any) -> None:
    """Add a gradient to those of the micro-batches before, as Megatron's DDP does."""
    if parameter.grad is not None and not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None
