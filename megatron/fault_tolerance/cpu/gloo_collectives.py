"""Collectives that Megatron needs and gloo lacks, built from the ones that gloo has.

gloo accepts split sizes only as Python integers, and refuses gathers and reduce-scatters of pieces of unequal
size, which the token dispatcher needs with expert tensor parallelism. Here, unequal pieces are padded to the
largest, exchanged, and cut. gloo's point-to-point operations keep the first timeout of their group; here they
follow --distributed-timeout-seconds-after-init, as its collectives do.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def install() -> None:
    """Replace the functions in torch.distributed, permanently."""
    dist.all_to_all_single = _integer_splits(dist.all_to_all_single)
    dist.all_gather = _uneven_all_gather(dist.all_gather)
    dist.reduce_scatter = _uneven_reduce_scatter(dist.reduce_scatter)
    for name in ("isend", "irecv"):
        timed = _with_group_timeout(getattr(dist, name))
        # P2POp compares an operation with the one in the module that defines both.
        setattr(dist, name, timed)
        setattr(dist.distributed_c10d, name, timed)


def _integer_splits(all_to_all_single: Any) -> Any:
    def as_integers(sizes: Sequence[Any] | torch.Tensor | None) -> list[int] | None:
        return None if sizes is None else [int(size) for size in sizes]

    def call(
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - the name is torch's
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        splits = as_integers(output_split_sizes), as_integers(input_split_sizes)
        return all_to_all_single(output, input, *splits, group=group, async_op=async_op)

    return call


def _padded(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """Return a copy of a tensor with rows of zeros added, up to ``length`` rows."""
    padded = tensor.new_zeros((length, *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    return padded


def _uneven_all_gather(all_gather: Any) -> Any:
    def call(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({piece.shape for piece in tensor_list}) <= 1:
            return all_gather(tensor_list, tensor, group=group, async_op=async_op)
        assert not async_op, "Megatron waits for gathers of unequal pieces"
        longest = max(piece.shape[0] for piece in tensor_list)
        received = [_padded(piece, longest) for piece in tensor_list]
        all_gather(received, _padded(tensor, longest), group=group)
        for piece, padded in zip(tensor_list, received, strict=True):
            piece.copy_(padded[: piece.shape[0]])
        return None

    return call


def _uneven_reduce_scatter(reduce_scatter: Any) -> Any:
    def call(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({piece.shape for piece in input_list}) <= 1:
            return reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)
        assert not async_op, "Megatron waits for reduce-scatters of unequal pieces"
        longest = max(piece.shape[0] for piece in input_list)
        received = _padded(output, longest)
        reduce_scatter(
            received, [_padded(piece, longest) for piece in input_list], op=op, group=group
        )
        output.copy_(received[: output.shape[0]])
        return None

    return call


class _TimedWork:
    """A running point-to-point operation whose `wait` gives up after the timeout of its group."""

    def __init__(self, work: Any, group: Any) -> None:
        self._work, self._group = work, group

    def wait(self) -> Any:
        return self._work.wait(self._group._get_backend(torch.device("cpu")).options._timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _with_group_timeout(operation: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:  # the group always comes as a keyword
        work = operation(*args, **kwargs)
        return None if work is None else _TimedWork(work, kwargs.get("group") or dist.group.WORLD)

    return call
