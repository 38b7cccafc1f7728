"""A late device of a real process: what names CUDA gets it, until the context ends.

The device runs operations in the thread that waits for them, so at most one thread may use it at a time.
"""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.device.queues import Device, Event, Stream
from tests.device.tensors import CUDA, new
from tests.simulation.active import Patches

_MAKING = ("empty", "full", "ones", "tensor", "zeros")


@contextmanager
def late_process(seed: Hashable, *, is_late: bool = False) -> Iterator[Device]:
    """Put a late device into this process.

    Args:
        is_late: whether nothing runs before it must; else the seed decides.
    """
    device, patches = Device(seed, threading.get_ident), Patches()
    if is_late:
        device.choose_eagerness = lambda: 0.0  # type: ignore[method-assign]
        device.default.eagerness = device.freed.eagerness = 0.0
    answers: dict[str, Callable[..., Any]] = {
        "Stream": lambda *_, **__: Stream(device),
        "Event": lambda *_, **__: Event(device),
        "stream": device.using,
        "current_stream": lambda *_: device.current,
        "current_device": lambda: 0,
        "set_device": device.set_current,
        "is_initialized": lambda: True,
        "synchronize": lambda *_: device.synchronize(),
        "mem_get_info": lambda *_: (0, 0),
    }
    try:
        for name, answer in answers.items():
            patches.set(torch.cuda, name, answer)
        for name in _MAKING:
            patches.set(torch, name, _making(device, getattr(torch, name)))
        patches.set(torch.Tensor, "to", _to(device, torch.Tensor.to))
        yield device
    finally:
        patches.restore()


def _names_device(device: Any) -> bool:
    return str(device) in ("cuda", str(CUDA)) or (type(device) is int and device == 0)


def _making(device: Device, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if not _names_device(kwargs.get("device")):
            return plain(*args, **kwargs)
        return new(device, plain(*args, **{**kwargs, "device": "cpu"}))

    return make


def _to(device: Device, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if _names_device(args[0] if args else kwargs.get("device")):
            return new(device, plain(tensor, *args[1:]))
        return plain(tensor, *args, **kwargs)

    return to
