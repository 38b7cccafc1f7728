"""Shards of the optimizer that dead ranks had, on the live ranks that are their deputies.

A deputy builds Megatron's distributed optimizer again, over the same buffers, for the place of the dead rank.
In each step it runs before the deputy's
own optimizer, whose gather of weights then carries both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from megatron.fault_tolerance.seams.collectives import recorded, recording
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Function, Layer, Layers
from moe_ft.loop.listeners import Built
from moe_ft.state.tensors import inner_optimizers


class Deputies:
    """Shards of others on this rank. Owned by the training thread.

    Attributes:
        shards: by dead rank, Megatron's optimizer of its shard.
    """

    def __init__(self) -> None:
        self.shards: dict[int, Any] = {}
        self._build: Function | None = None

    def install(self, layers: Layers) -> None:
        """Watch the optimizer being built."""
        layers.put(Layer.DEPUTIES, {"get_megatron_optimizer": self._note})

    def _note(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Build the optimizer, and remember how, with what ranks have told each other meanwhile."""
        gathered: list[list[Any]] = []

        def build() -> Any:
            with recorded(Layer.DEPUTIES, iter(gathered)):
                return original(*args, **kwargs)

        self._build = build
        with recording(Layer.DEPUTIES, gathered.append):
            return original(*args, **kwargs)

    def take(self, dead: int, built: Built) -> Any:
        """Become the deputy of a dead rank; return the optimizer of its shard, which has no state yet.

        A recovery of that rank's checkpoints fills it. Not collective.
        """
        model, optimizer, _ = built
        shard = self._build_for(dead, model)
        for inner, own in _pairs(shard, optimizer):
            # One collective answers for both: others expect no second one.
            inner.has_grad_norm_group = own.has_grad_norm_group
            inner._defer_param_sync = True  # the own ones gather afterwards
        self.shards[dead] = shard
        return shard

    def _build_for(self, dead: int, model: Sequence[Any]) -> Any:
        """Build the optimizer of a dead rank's shard; what points from weights to masters stays."""
        assert self._build is not None
        with Patches() as patches:
            for chunk in model:
                for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                    group = buffer.data_parallel_group
                    patches.set(buffer, "data_parallel_group", _Place(group, dead))
                for parameter in chunk.parameters():
                    for name in ("main_param", "main_param_sharded"):
                        patches.set(parameter, name, getattr(parameter, name, None))
            return self._build()

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[None]:
        """Have a step of the outermost optimizer be that of all shards."""
        more = [inner for each in self.shards.values() for inner in inner_optimizers(each)]
        chain = optimizer.chained_optimizers
        optimizer.chained_optimizers = [*more, *chain]
        try:
            yield
        finally:
            optimizer.chained_optimizers = chain

    def follow(self, optimizer: Any) -> None:
        """Give all shards what the scheduler has set for the next step, and the norms of the last one."""
        for shard in self.shards.values():
            shard.grad_norms_by_group = getattr(optimizer, "grad_norms_by_group", None)
            for inner, own in _pairs(shard, optimizer):
                groups = zip(inner.optimizer.param_groups, own.optimizer.param_groups, strict=True)
                for group, of_own in groups:
                    group.update({key: each for key, each in of_own.items() if key != "params"})


class RoleNorm:
    """Norm of the gradients from those of all roles, which are added in the order of ranks.

    So it is bitwise the same whoever plays a role. Megatron's own adds what each rank has in any order.
    """

    def __init__(self, optimizer: Any, deputies: Deputies) -> None:
        self._deputies = deputies
        self._chain = list(optimizer.chained_optimizers)  # of this rank's own shard

    @torch.no_grad()
    def __call__(self, _: Function) -> Any:
        """Return the norm; Megatron's own is not asked."""
        parts = {dist.get_rank(): self._chain}
        parts |= {dead: inner_optimizers(each) for dead, each in self._deputies.shards.items()}
        device = torch.cuda.current_device()
        squares = torch.zeros(dist.get_world_size(), device=device)  # [rank] of its shard
        for rank, chain in parts.items():
            if grads := [each for inner in chain for each in inner.get_grads_for_grad_norm()]:
                overflow = torch.zeros(1, dtype=torch.int, device=device)
                found, _ = clip_grads.multi_tensor_applier(
                    clip_grads.l2_norm_impl, overflow, [grads], False
                )
                squares[rank] = found**2
        dist.all_reduce(squares, group=self._chain[0].get_grad_stats_parallel_group())
        norm = squares.double().sum().sqrt().float()
        return norm.item() if clip_grads.multi_tensor_scale_tensor_impl is None else norm.view(1)


def _pairs(shard: Any, optimizer: Any) -> list[tuple[Any, Any]]:
    return list(zip(inner_optimizers(shard), inner_optimizers(optimizer), strict=True))


class _Place:
    """Stands for a group while an optimizer asks it for its rank: that of a dead member."""

    def __init__(self, group: Any, dead: int) -> None:
        self._group = group
        self._rank = dist.get_process_group_ranks(group).index(dead)

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)
