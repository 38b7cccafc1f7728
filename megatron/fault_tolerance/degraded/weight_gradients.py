"""Gradients of weights that are put off: a backward pass gives those of inputs, and weights come later.

Megatron's local layers, attention, experts and output among them, compute both in one autograd function. Here
it keeps what the product for the weight needs. Layers of Transformer Engine do that themselves. Embeddings,
routers, norms, biases, and layers whose sequence or input gradient is divided by tensor parallelism compute
all at once. Weights have to come in the order of backward passes, or sums of fp32 change.

Source: ReCycle (decoupled backward passes).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.planning.schedules import Turn


class LateGradients:
    """Products for gradients of weights. Owned by the training thread.

    Attributes:
        model: chunks that are trained.
    """

    def __init__(self) -> None:
        self.model: Sequence[Any] = ()
        self._delayed: list[Any] | None = None  # modules of Transformer Engine
        self._kept: dict[Turn, list[tuple[Any, torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self._now: Turn | None = None

    def install(self, patches: Patches) -> None:
        """Change the layers, before they are built, until the patches end."""
        function = layers.LinearWithGradAccumulationAndAsyncCommunication
        original = function.backward

        def backward(ctx: Any, grad_output: torch.Tensor) -> Any:
            return self._backward(original, ctx, grad_output)

        patches.set(function, "backward", staticmethod(backward))
        check = TransformerConfig.__post_init__

        def delay(config: TransformerConfig) -> None:
            # Megatron's validation allows it only with its own schedule that puts gradients off.
            check(config)
            config.delay_wgrad_compute = config.transformer_impl == "transformer_engine"

        patches.set(TransformerConfig, "__post_init__", delay)
        patches.wrap(schedules, "backward_step", self._step)

    @contextmanager
    def put_off(self, turn: Turn) -> Iterator[None]:
        """Keep what the gradients of weights need in backward passes of a turn."""
        self._now = turn
        try:
            yield
        finally:
            self._now = None

    @torch.no_grad()
    def run(self, turn: Turn) -> None:
        """Add the gradients of the weights for a turn."""
        for weight, given, grad_output in self._kept.pop(turn, ()):
            rows, columns = layers.prepare_input_tensors_for_wgrad_compute(grad_output, given)
            weight.main_grad.add_(rows.t().matmul(columns))  # as the hook of DDP does
        self._run_delayed()

    def _backward(self, original: Callable[..., Any], ctx: Any, grad_output: torch.Tensor) -> Any:
        is_more_than_two_products = (
            ctx.sequence_parallel
            or ctx.allreduce_dgrad
            or ctx.gradient_accumulation_fusion
            or ctx.use_bias
            or ctx.grad_output_buffer is not None
            or getattr(ctx, "gtp_remat_size", 1) > 1
        )
        if self._now is None or is_more_than_two_products:
            return original(ctx, grad_output)
        given, weight = ctx.saved_tensors
        self._kept[self._now].append((weight, given, grad_output))
        return (grad_output.matmul(weight), *[None] * (len(ctx.needs_input_grad) - 1))

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run at once what Transformer Engine has put off, where Megatron's own schedule runs."""
        result = original(*args, **kwargs)
        if self._now is None:
            self._run_delayed()
        return result

    def _run_delayed(self) -> None:
        """Run what modules of Transformer Engine have put off: the oldest of each, as the first B was."""
        if self._delayed is None:
            self._delayed = [
                each
                for chunk in self.model
                for each in chunk.modules()
                if (store := getattr(each, "wgrad_store", None)) and store.delay_wgrad_compute()
            ]
        for each in self._delayed:
            each.backward_dw()
