"""Counts the tokens that each expert got, on this rank, by hooks on the routers.

Adding the counts up over ranks is the engine's business.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter


class RouterLoad:
    """Tokens per expert since the last `begin`. Owned by the training thread."""

    def __init__(self) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        self._handles: list[Any] = []

    def start(self, model: Sequence[torch.nn.Module]) -> None:
        """Hook all routers of the model chunks."""
        for chunk in model:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    self._handles.append(module.register_forward_hook(self._count))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin(self) -> None:
        """Forget all counts: an iteration begins."""
        self._counts = {}

    def counts(self) -> dict[str, torch.Tensor]:
        """Return ``[expert]`` tokens by layer name ("layer.3"), on the device."""
        return dict(self._counts)

    def _count(self, router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        # Full recomputation runs the forward pass twice, the first time without gradients; evaluation
        # never has them.
        if not torch.is_grad_enabled():
            return
        routing_map = output[1]
        name = f"layer.{router.layer_number - 1}"
        tokens = routing_map.detach().sum(dim=0, dtype=torch.int64)
        if name in self._counts:
            self._counts[name] += tokens
        else:
            self._counts[name] = tokens
