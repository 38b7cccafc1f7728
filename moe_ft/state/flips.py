"""Flips of single bits in the memory of this rank, as a faulty device makes them, for --moe-ft-inject-fault.

The tensor follows from a number: those after it are in other parts of the model (experts, router, embedding,
the rest). Bits change behind autograd's back: no version of a tensor is counted. moe_ft/loop/faults.py says
when.

Not reached: what a CUDA graph computes, since graphs run no hooks, and parameters of modules whose parts
Megatron runs one by one.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from math import log2
from typing import Any

import torch

from moe_ft.faults import FlipTarget
from moe_ft.state.bit_sums import WORDS
from moe_ft.state.parameters import home_part, name_in_model
from moe_ft.state.quantized import is_quantized, quantized_parts
from moe_ft.state.tensors import named_optimizer_tensors

Flip = Callable[[str, torch.Tensor], None]
CallOff = Callable[[], None]
_PARTS = (".experts.", ".router.", "embedding", "")
_LAYER = re.compile(r"\.layers\.\d+$")
_SPREAD = 2654435761  # Knuth's multiplicative hash


def arm(target: FlipTarget, built: Any, number: int, flip: Flip) -> CallOff:
    """Have `flip` called once with a tensor and its name, now or when it is there. Training thread.

    A forward pass of the iteration begins next.

    Args:
        built: model chunks, optimizer and scheduler.
        number: chooses the tensor.

    Returns:
        A function that calls it off, if it has not happened.
    """
    model, optimizer, _ = built

    def flip_named(name: str, tensor: torch.Tensor) -> None:
        flip(name_in_model(model, name), tensor)

    if target is FlipTarget.MOMENT:
        flip_named(*_pick([*_moments(model, optimizer)], number))
        return lambda: None
    if target is FlipTarget.ACTIVATION:
        return _flip_output(*_pick(_layers(model), number), flip_named)
    name, (module, parameter) = _pick([*_parameters(model)], number)
    if target is FlipTarget.GRADIENTS:
        return _flip_gradient(name, parameter, flip_named)
    return _flip_weight(name, module, parameter, flip_named)


def flip_bit(tensor: torch.Tensor, number: int, bit: int | None = None) -> tuple[int, int]:
    """Flip one bit in place, and return the flat index of its element and the bit.

    Args:
        number: chooses the element, one that is not 0 if there is any.
        bit: from the lowest; None for the highest one of the mantissa, so that numbers stay finite.
    """
    data = tensor.data
    index = number * _SPREAD % data.numel()
    if data[_place(index, data)] == 0 and len(others := data.reshape(-1).nonzero()):
        index = int(others[index % len(others)])
    size = 8 * data.element_size()
    if bit is None:
        is_float = data.dtype.is_floating_point
        bit = -int(log2(torch.finfo(data.dtype).eps)) - 1 if is_float else size // 4
    bit %= size
    # The highest one is the sign of the integer.
    mask = 1 << bit if bit < size - 1 or size == 8 else -(1 << bit)
    data.view(WORDS[data.element_size()])[_place(index, data)].bitwise_xor_(mask)
    return index, bit


def _place(index: int, data: torch.Tensor) -> tuple[int, ...]:
    found: list[int] = []
    for length in reversed(data.shape):
        index, place = divmod(index, length)
        found.insert(0, place)
    return tuple(found)


def _pick[Kind](named: Sequence[tuple[str, Kind]], number: int) -> tuple[str, Kind]:
    """Choose by a number, whose successors choose from other parts of the model."""
    by_part: dict[str, list[tuple[str, Kind]]] = {}
    for each in named:
        by_part.setdefault(next(part for part in _PARTS if part in each[0]), []).append(each)
    parts = [*by_part.values()]
    of_part = parts[number % len(parts)]
    return of_part[number // len(parts) % len(of_part)]


def _modules(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for chunk_index, chunk in enumerate(model):
        yield from ((f"chunk{chunk_index}.{path}", each) for path, each in chunk.named_modules())


def _parameters(model: Sequence[Any]) -> Iterator[tuple[str, tuple[Any, torch.nn.Parameter]]]:
    """Yield trained parameters that forward uses, with their modules; homes of experts are none."""
    for path, module in _modules(model):
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and home_part(parameter) is None:
                yield f"{path}.{key}", (module, parameter)


def _layers(model: Sequence[Any]) -> list[tuple[str, Any]]:
    """Return the layers of this rank, or the chunks of a rank without any."""
    named = [*_modules(model)]
    layers = [each for each in named if _LAYER.search(each[0])] or named[:1]
    return [(f"{path}.output", module) for path, module in layers]


def _moments(model: Sequence[Any], optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in named_optimizer_tensors(model, optimizer):
        if not name.endswith(("/param", "/master_param", "/step", ".scale")) and tensor.numel():
            yield name, tensor


def _flip_weight(
    name: str, module: torch.nn.Module, parameter: torch.nn.Parameter, flip: Flip
) -> CallOff:
    """Flip when the module runs: only then weights of other ranks have come for sure."""

    def hook(*_: Any) -> None:
        call_off()
        parts = quantized_parts(parameter) if is_quantized(parameter) else [("", parameter)]
        flip(name, next(iter(parts))[1])

    call_off: CallOff = module.register_forward_pre_hook(hook).remove
    return call_off


def _flip_gradient(name: str, parameter: Any, flip: Flip) -> CallOff:
    """Flip before DDP gets the gradient, which may reduce it at once."""

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        call_off()
        if getattr(parameter, "grad_added_to_main_grad", False):  # by a fused kernel
            flip(name, parameter.main_grad)
            return gradient
        changed = gradient.clone()
        flip(name, changed)
        return changed

    call_off: CallOff = parameter.register_hook(hook).remove
    return call_off


def _flip_output(name: str, module: torch.nn.Module, flip: Flip) -> CallOff:
    def hook(_: Any, inputs: Any, output: Any) -> None:
        results = output if isinstance(output, tuple) else (output,)
        found = [each for each in results if isinstance(each, torch.Tensor) and each.numel()]
        if found:
            call_off()
            flip(name, found[0])

    call_off: CallOff = module.register_forward_hook(hook).remove
    return call_off
