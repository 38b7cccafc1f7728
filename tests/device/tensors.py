"""Tensors of the late device: their operations are queued, and their numbers are there when these have run.

To torch's C++ they are tensors without memory, whose operations come here; to Python they are on "cuda:0".
`queues.py` has the rules. What waits for the host does so here too: a value that Python reads, a copy to
pageable memory.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, override

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.device.queues import Device, Memory, Stream, poison, span_of

CUDA = torch.device("cuda", 0)
_aten = torch.ops.aten
# Operations whose results have shapes that depend on numbers, or that return numbers: the host waits.
_WAITS = {
    _aten._local_scalar_dense.default,
    _aten.item.default,
    _aten.masked_select.default,
    _aten.nonzero.default,
}


class LateTensor(torch.Tensor):
    """A tensor on the device.

    Attributes:
        content: its numbers; only operations that run may touch them.
        memory: kept while any tensor uses it.
    """

    content: torch.Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, content: torch.Tensor, memory: Memory) -> "LateTensor":
        made: LateTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            content.shape,
            strides=content.stride(),
            storage_offset=content.storage_offset(),
            dtype=content.dtype,
            device=torch.device("cpu"),
        )
        made.content, made.memory = content, memory
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @override
    def data_ptr(self) -> int:
        return self.content.data_ptr()

    @override
    def untyped_storage(self) -> torch.UntypedStorage:
        return self.content.untyped_storage()

    @override
    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        self.memory.users.add(stream)

    @override
    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> torch.Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        source = self if dtype in (None, self.dtype) else torch.Tensor.to(self, dtype)
        if device is None or device.type == "cuda":
            return source.clone() if copy and source is self else source
        target = torch.empty(source.shape, dtype=source.dtype)
        if non_blocking:
            pinned(self.memory.device, target)
        return target.copy_(source, non_blocking=non_blocking)

    @override
    def cpu(self, *_: Any) -> torch.Tensor:
        return self.to("cpu")

    @override
    def tolist(self) -> Any:
        return self.cpu().tolist()

    @override
    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LateTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten.copy_.default:
            return _copy(args[0], args[1], non_blocking=bool([*args[2:], False][0]))
        if func is _aten._foreach_copy_.default:
            # torch copies one by one where not all are on one device.
            for target, source in zip(args[0], args[1], strict=True):
                _copy(target, source, non_blocking=bool([*args[2:], False][0]))
            return None
        if func in (_aten.detach.default, _aten.alias.default) or func.is_view:
            return _view(func, args, kwargs)
        return _compute(func, args, kwargs)


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a tensor that is on a device."""
    assert isinstance(tensor, LateTensor)
    return tensor.content


def pinned(device: Device, tensor: torch.Tensor) -> None:
    """Make the memory of a CPU tensor page-locked, as that from torch's host allocator is."""
    first, end = span_of(tensor)
    device.pin(first, end - first)
    weakref.finalize(tensor, device.forget_pinned, first)


def on_device(device: Device, content: torch.Tensor) -> LateTensor:
    """Return a tensor of the device whose numbers are those of a CPU tensor, in the same memory."""
    return LateTensor(content, Memory(device, content))


def new(device: Device, content: torch.Tensor) -> LateTensor:
    """Return a tensor that a kernel on the current stream fills with what a CPU tensor holds now."""
    memory = torch.empty_like(content)
    poison(memory)
    made, filling = on_device(device, memory), content.clone()
    device.queue("fill", lambda: _assign(memory, filling), writes=[span_of(memory)])
    return made


def _assign(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _view(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    memory = next(each for each in tree_leaves(args) if isinstance(each, LateTensor)).memory
    given, named = tree_map_only(LateTensor, lambda each: each.content, (args, kwargs))
    found = func(*given, **named)
    return tree_map_only(torch.Tensor, lambda each: LateTensor(each, memory), found)


def _copy(target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
    if not isinstance(source, LateTensor):
        assert isinstance(target, LateTensor)
        _copy_to_device(target, source, non_blocking=non_blocking)
        return target
    device, numbers = source.memory.device, source.content
    goes_to_host = not isinstance(target, LateTensor)
    into = target if goes_to_host else content_of(target)
    is_async = non_blocking and device.is_pinned(into) if goes_to_host else True
    if goes_to_host and not device.is_used(span_of(into)):
        poison(into)
    name = "copy to the host" if goes_to_host else "copy"
    copying = device.queue(
        name, lambda: _assign(into, numbers), reads=[span_of(numbers)], writes=[span_of(into)]
    )
    if not is_async:
        device.wait(copying)
    return target


def _copy_to_device(target: LateTensor, source: torch.Tensor, *, non_blocking: bool) -> None:
    device, into = target.memory.device, target.content
    is_late = non_blocking and device.is_pinned(source)
    numbers = source if is_late else source.clone()
    copying = device.queue(
        "copy from the host",
        lambda: _assign(into, numbers),
        reads=[span_of(numbers)],
        writes=[span_of(into)],
    )
    if device.is_pinned(source) and not non_blocking:
        device.wait(copying)


def _compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Queue any other operation."""
    leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, LateTensor)]
    device = leaves[0].memory.device
    if kwargs.get("device") is not None:
        kwargs["device"] = "cpu"
    kwargs.pop("pin_memory", None)
    given, named = tree_map_only(
        torch.Tensor,
        lambda each: each.content if isinstance(each, LateTensor) else each.clone(),
        (args, kwargs),
    )
    if func in _WAITS:
        device.current.synchronize()
        found = func(*given, **named)
        return on_device(device, found) if isinstance(found, torch.Tensor) else found
    changed = [
        args[place].content
        for place, each in enumerate(func._schema.arguments)
        if each.alias_info is not None and each.alias_info.is_write and place < len(args)
    ]
    reads = [span_of(each.content) for each in leaves]
    if changed:
        act: Callable[[], None] = lambda: func(*given, **named)  # noqa: E731 - queued
        device.queue(str(func), act, reads=reads, writes=[span_of(each) for each in changed])
        return args[0]
    # Shapes are known at once, from an execution without numbers.
    bare = tree_map_only(torch.Tensor, lambda each: each.to("meta"), (given, named))
    results: Any = func(*bare[0], **bare[1])
    made = tree_map_only(torch.Tensor, lambda each: _empty(device, each), results)
    targets = [each.content for each in tree_leaves(made) if isinstance(each, LateTensor)]

    def compute() -> None:
        with torch.no_grad():
            found = tree_leaves(func(*given, **named))
        for target, each in zip(targets, found, strict=True):
            _assign(target, each)

    device.queue(str(func), compute, reads=reads, writes=[span_of(each) for each in targets])
    return made


def _empty(device: Device, like: torch.Tensor) -> LateTensor:
    memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    poison(memory)
    return on_device(device, memory)
