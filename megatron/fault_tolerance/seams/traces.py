"""Trace of an iteration on one rank: exact sums of outputs of modules, of gradients and of the rest.

Two traces are equal if forward and backward gave the same bits. Sums are of words as integers, modulo 2^64:
they have no order, and any one bit that differs changes them. They stay on the device until the iteration
is over. A mistake is followed back to where it has come in: the first module in the order of the model, or
the last parameter whose gradient differs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moe_ft.planning.opinions import Depth, IterationPart
from moe_ft.state.bit_sums import MIX, bit_sum
from moe_ft.state.random_states import current_rng
from moe_ft.state.tensors import buffer_places, named_parameters, raw_tensor

# Modules whose outputs are traced, by the last part of their names; and whole layers.
_TRACED = frozenset(
    (
        *("embedding", "self_attention", "cross_attention", "router", "experts", "shared_experts"),
        *("mlp", "final_layernorm", "output_layer", "eh_proj"),
    )
)


class Trace:
    """Sums of one rank in the run that is traced. Owned by the training thread."""

    def __init__(self, model: Sequence[Any], stage: int, num_stages: int) -> None:
        """Trace nothing yet.

        Args:
            model: chunks as DDP wraps them.
        """
        self._model = model
        self._modules: list[tuple[Depth, str, torch.nn.Module]] = []
        for chunk_index, chunk in enumerate(model):
            at = chunk_index * num_stages + stage
            for number, (words, module) in enumerate(_traced(chunk, "", "")):
                self._modules.append((Depth(IterationPart.FORWARD, at, number), words, module))
        self._parameters = {
            parameter: (
                Depth(
                    IterationPart.BACKWARD,
                    -(int(name[5 : name.index(".")]) * num_stages + stage),
                    -number,
                ),
                f"gradient of {name.replace('.module', '')}",
            )
            for number, (name, parameter) in enumerate(named_parameters(model))
            if parameter.requires_grad
        }
        self._buffers = buffer_places(model)
        self._sums: dict[Any, torch.Tensor] = {}

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Trace what runs in this context, from the beginning."""
        self._sums = {}
        hooks = [
            module.register_forward_hook(self._adding(depth)) for depth, _, module in self._modules
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    def _adding(self, depth: Depth) -> Callable[..., None]:
        def add(module: Any, inputs: Any, output: Any) -> None:  # noqa: ARG001 - torch gives them
            for each in _tensors(output):
                before = self._sums.get(depth, 0)
                self._sums[depth] = bit_sum(each) + MIX * before

        return add

    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Sum up gradients that are complete and not reduced yet; a second call changes nothing."""
        for each in parameters:
            gradient = getattr(each, "main_grad", None)
            gradient = each.grad if gradient is None else gradient
            if gradient is not None and each in self._parameters and each not in self._sums:
                self._sums[each] = bit_sum(gradient)

    def note_all_gradients(self) -> None:
        """Sum up the gradients that are not noted yet, and buffers and random numbers as they are now."""
        self.note_gradients(self._parameters)
        for name, (module, key) in self._buffers.items():
            if (buffer := module._buffers[key]) is not None:
                self._sums[name] = bit_sum(buffer)
        random = repr(current_rng()).encode()
        self._sums["random numbers"] = bit_sum(
            torch.frombuffer(bytearray(random), dtype=torch.uint8)
        )

    def note_losses(self, losses: Any) -> None:
        """Add what forward and backward have returned."""
        for each in _tensors(losses):
            self._sums["loss"] = bit_sum(each) + MIX * self._sums.get("loss", 0)

    def values(self) -> list[int]:
        """Return the sums of the run, ``[place]``; 0 where nothing came by. Waits for the device."""
        keys = [*(each[0] for each in self._modules), *self._parameters, *self._rest()]
        found = [self._sums.get(key) for key in keys]
        zero = torch.zeros((), dtype=torch.int64)
        return [int(each) for each in torch.stack([zero if x is None else x.cpu() for x in found])]

    def _rest(self) -> list[str]:
        return [*self._buffers, "random numbers", "loss"]

    def first_difference(
        self, own: Sequence[int], other: Sequence[int]
    ) -> tuple[Depth, str] | None:
        """Return where two runs differ first, and words for it; None if they are equal."""
        places = [(depth, words) for depth, words, _ in self._modules]
        places += [*self._parameters.values()]
        places += [(Depth(IterationPart.REST, 0, n), words) for n, words in enumerate(self._rest())]
        found = [place for place, a, b in zip(places, own, other, strict=True) if a != b]
        return min(found, default=None)


def _traced(
    module: torch.nn.Module, name: str, layer: str
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield words and modules that are traced, in the order in which their forward passes end."""
    is_layer = hasattr(module, "layer_number") and name.isdigit()
    layer = f"layer {module.layer_number}" if is_layer else layer
    for key, child in module.named_children():
        yield from _traced(child, key, layer)
    if is_layer:
        yield f"forward pass of {layer}", module
    elif name in _TRACED:
        yield f"forward pass of {name}{f' of {layer}' if layer else ''}", module


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield raw_tensor(value)
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
