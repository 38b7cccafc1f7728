"""Ranks that share one GPU: their collectives over gloo, by way of the host.

    torchrun ... -m tools.gpu_day.one_gpu SCRIPT FLAGS...

NCCL before 2.30 refuses two ranks on one GPU, and gloo lacks collectives for tensors on a GPU, among them the
coalesced all-reduce by which Megatron's DDP reduces gradients. With `--distributed-backend gloo` each
collective on such a tensor copies it to the host, runs there, and copies the result back: slow, and as
right as gloo is; streams, events and pinned memory of moe_ft are real. With `nccl` nothing is replaced.
GPU_DAY_FORCE=1 treats tensors on a CPU likewise, to try this without a GPU.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# Arguments that may come by position, of which the first one is written, but for sends. They are not read
# from signatures: what moe_ft puts in front of some collectives on CPUs takes anything.
_ARGUMENTS = {
    "all_reduce": ("tensor", "op", "group", "async_op"),
    "broadcast": ("tensor", "src", "group", "async_op"),
    "reduce": ("tensor", "dst", "op", "group", "async_op"),
    "all_gather": ("tensor_list", "tensor", "group", "async_op"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor", "group", "async_op"),
    "reduce_scatter": ("output", "input_list", "op", "group", "async_op"),
    "reduce_scatter_tensor": ("output", "input", "op", "group", "async_op"),
    "all_to_all_single": (
        *("output", "input", "output_split_sizes", "input_split_sizes"),
        *("group", "async_op"),
    ),
    "recv": ("tensor", "src", "group", "tag"),
    "send": ("tensor", "dst", "group", "tag"),
    "isend": ("tensor", "dst", "group", "tag"),
}
_SENDS = ("send", "isend")


class Done:
    """Work that has ended."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


class Received:
    """A receive whose `wait` brings the tensor to the device."""

    def __init__(self, work: Any, near: torch.Tensor, far: torch.Tensor) -> None:
        self._work = work
        self._near = near
        self._far = far

    def wait(self, *args: Any) -> bool:
        """Wait for the tensor."""
        result = self._work.wait(*args)
        self._far.detach().copy_(self._near)
        return bool(result)

    def is_completed(self) -> bool:
        """Return whether it has arrived on the host."""
        return bool(self._work.is_completed())


class NoCoalescing:
    """Manager of collectives that have each ended by themselves."""

    def append(self, work: Any) -> None:
        """Drop work that has ended."""

    def wait(self) -> None:
        """Return at once."""


@contextlib.contextmanager
def no_coalescing(*_: Any, **__: Any) -> Iterator[NoCoalescing]:
    """Stand for c10d's manager, which gloo does not know on a GPU."""
    yield NoCoalescing()


def install() -> None:
    """Replace the collectives, also under names that modules have imported: a forked rank finds them so."""
    replaced: dict[int, Callable[..., Any]] = {
        id(getattr(dist, name)): _by_host(name, getattr(dist, name)) for name in _ARGUMENTS
    }
    replaced[id(dist.irecv)] = _receive(dist.irecv)
    replaced[id(dist.batch_isend_irecv)] = _batch
    replaced[id(c10d._coalescing_manager)] = no_coalescing
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if (function := replaced.get(id(value))) is not None:
                setattr(module, name, function)


def is_far(value: Any) -> bool:
    """Return whether a tensor is on a GPU."""
    return isinstance(value, torch.Tensor) and (
        value.is_cuda or os.environ.get("GPU_DAY_FORCE") == "1"
    )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return [value] if isinstance(value, torch.Tensor) else []


def _near(value: Any) -> Any:
    """Return copies on the host of tensors; anything else as it is."""
    if isinstance(value, list | tuple) and any(map(is_far, value)):
        return [_near(each) for each in value]
    return value.detach().to("cpu", copy=True).contiguous() if is_far(value) else value


def _by_host(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    output = _ARGUMENTS[name][0]

    def collective(*args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(_ARGUMENTS[name], args, strict=False)), **kwargs}
        if not any(is_far(each) for value in given.values() for each in _tensors(value)):
            return original(*args, **kwargs)
        is_async = given.pop("async_op", False)
        is_average = given.get("op") == dist.ReduceOp.AVG  # which gloo lacks
        if is_average:
            given["op"] = dist.ReduceOp.SUM
        near = {key: _near(value) for key, value in given.items()}
        result = original(**near)
        if name in _SENDS:
            return result
        for far, value in zip(_tensors(given[output]), _tensors(near[output]), strict=True):
            if is_average:
                value.div_(dist.get_world_size(given.get("group")))
            far.detach().copy_(value)
        return Done() if is_async else result

    return collective


def _receive(original: Callable[..., Any]) -> Callable[..., Any]:
    def irecv(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_far(tensor):
            return original(tensor, *args, **kwargs)
        near = torch.empty(tensor.shape, dtype=tensor.dtype)
        return Received(original(near, *args, **kwargs), near, tensor)

    return irecv


def _batch(operations: Sequence[Any]) -> list[Any]:
    return [each.op(each.tensor, each.peer, group=each.group, tag=each.tag) for each in operations]


def main() -> None:
    """Run a script as a rank on the first GPU."""
    os.environ["LOCAL_RANK"] = "0"
    sys.argv = sys.argv[1:]
    if sys.argv[sys.argv.index("--distributed-backend") + 1] == "gloo":
        install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
