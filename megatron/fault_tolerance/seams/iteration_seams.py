"""Seams in an iteration of any training loop: forward, backward and Megatron's optimizer step.

Before `step_with_ready_grads` of the outermost optimizer gradients are ready and no weight has changed.
Inside it the state is torn. After it the state is that of the next iteration. `get_grad_norm` is watched:
clipping uses a double that a loop may round.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.fault_tolerance.seams.stack import Function, Layer, Layers
from moe_ft.faults import Phase
from moe_ft.files.progress import note_progress
from moe_ft.loop.listeners import Listeners
from moe_ft.state.tensors import inner_optimizers

_COPY = "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params"


class IterationSeams:
    """Calls listeners as an iteration passes. Owned by the training thread."""

    def __init__(self, listeners: Listeners, before_step: Callable[[], None]) -> None:
        """Call something before the step of every iteration that is not replayed."""
        self._listeners = listeners
        self._loop = listeners.loop
        self._before_step = before_step
        self._inner: list[Any] = []

    def begin_forward(self) -> None:
        """Note a forward pass, of which the first one begins the iteration."""
        note_progress()
        if self._loop.phase in (Phase.SETUP, Phase.BETWEEN):
            self._listeners.enter(Phase.FORWARD)

    def watch(self, output: Any) -> None:
        """Note when a forward pass goes backward; the schedule decides which one is the first."""
        may_be_first = self._loop.phase is Phase.FORWARD and isinstance(output, torch.Tensor)
        if may_be_first and output.requires_grad:
            output.register_hook(self._begin_backward)

    def _begin_backward(self, _: torch.Tensor) -> None:  # returns None: the gradient stays
        if self._loop.phase is Phase.FORWARD:
            self._listeners.enter(Phase.BACKWARD)

    def install(self, optimizer: Any, layers: Layers) -> None:
        """Wrap the optimizer's functions."""
        self._inner = inner_optimizers(optimizer)
        self._mark_torn(layers)
        functions = {
            "step_with_ready_grads": self._step,
            "prepare_grads": self._prepare_grads,
            "get_grad_norm": self._get_grad_norm,
        }
        found = {
            f"ChainedOptimizer.{name}": around
            for name, around in functions.items()
            if hasattr(optimizer, name)
        }
        layers.put(Layer.LISTENERS, found, of=optimizer)

    def begin_capture(self, original: Function) -> None:
        """Have other threads leave the device alone: their calls would break the capture that follows."""
        self._listeners.before_capture()
        original()

    def _mark_torn(self, layers: Layers) -> None:
        """Mark the rank torn from its first inner step until the last copy into its own parameter slice."""

        def torn_from(original: Function, *args: Any, **kwargs: Any) -> Any:
            self._listeners.begin_update()
            return original(*args, **kwargs)

        def torn_until(original: Function, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._listeners.end_update()
            return result

        if self._inner:
            first, last, copy = self._inner[0].optimizer, self._inner[-1], _COPY.split(".")[1]
            layers.put(Layer.LISTENERS, {"Optimizer.step": torn_from}, of=first)
            if hasattr(last, copy):
                layers.put(Layer.LISTENERS, {_COPY: torn_until}, of=last)

    def _prepare_grads(self, original: Function) -> Any:
        if not self._loop.is_replaying:
            self._listeners.note_reduced_gradients()
        return original()

    def _step(self, original: Function) -> Any:
        if self._loop.is_replaying:
            result = original()
            self._listeners.end_update()
            return result
        self._before_step()
        self._listeners.note_final_gradients()
        with self._noting_inner_step():
            result = original()
        self._listeners.end_update()
        self._listeners.enter(Phase.AFTER_STEP)
        return result

    def _get_grad_norm(self, original: Function) -> Any:
        norm = original()
        self._loop.grad_norm = None if norm is None else float(norm)
        return norm

    @contextmanager
    def _noting_inner_step(self) -> Iterator[None]:
        """Stop between the inner step and the copy to the model weights, if a fault waits there."""

        def step(original: Function, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._listeners.enter(Phase.IN_STEP)
            return result

        with Layers() as layers:
            if self._inner and self._listeners.is_awaited(Phase.IN_STEP):
                # The last one of the chain: the state is then as torn as it gets.
                layers.put(Layer.FAULTS, {"Optimizer.step": step}, of=self._inner[-1].optimizer)
            yield
