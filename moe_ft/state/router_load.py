"""Counts of the tokens that each expert receives on this rank, taken by hooks on the routers.

On request the hooks also sum the gate's probabilities of each expert over all tokens, before the top-k are
chosen and before capacity drops any (MoEvement, Appendix B, soft-count). Scores of a sigmoid gate are divided
by their sum over the experts, as in Megatron's balancing losses, whose function computes them here too.

A router that is called several times for a token counts it each time; with --mtp-use-repeated-layer this is
once per depth. The engine adds the counts of all ranks.

A CUDA graph replays operations and runs no hooks. So counts are added up on the device, in tensors that stay
where they are: an addition that runs while a graph is captured becomes a part of it. Passes that only prepare
a capture are of no iteration, and not counted.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter

from moe_ft.state.parameters import global_name

_PROBABILITY_UNITS = 2**20
_KEPT = "moe_ft_{}"  # attribute of a router, no buffer: graphs add to it for as long as the router lives


class RouterLoad:
    """Tokens per expert since the last `begin`. Owned by the training thread."""

    def __init__(self) -> None:
        self._counts: dict[str, torch.Tensor] = {}
        self._probabilities: dict[str, torch.Tensor] = {}
        self._names: dict[torch.nn.Module, str] = {}
        self._remove: list[Callable[[], None]] = []

    def start(self, model: Sequence[torch.nn.Module], *, sums_probabilities: bool = False) -> None:
        """Hook all routers of the model chunks; on request also sum the gate's probabilities."""
        self._names = routers_of(model)
        for module, name in self._names.items():
            self._counts[name] = _sums_of(module, "tokens", torch.int64)
            self._remove.append(module.register_forward_hook(self._count).remove)
            if sums_probabilities:
                self._probabilities[name] = _sums_of(module, "probabilities", torch.float64)
                self._watch_gate(module)

    def close(self) -> None:
        """Remove the hooks."""
        for remove in self._remove:
            remove()
        self._remove.clear()

    def begin(self) -> None:
        """Reset all counts, because an iteration begins or is repeated."""
        for sums in (*self._counts.values(), *self._probabilities.values()):
            sums.zero_()

    def counts(self) -> dict[str, torch.Tensor]:
        """Return ``[expert]`` tokens by layer name ("layer.3"), on the device."""
        return dict(self._counts)

    def probabilities(self) -> dict[str, torch.Tensor]:
        """Return ``[expert]`` sums of the gate's probabilities by layer name, in units of 2^-20.

        They are integers, so that sums over ranks do not depend on the order.
        """
        return {
            name: (sums * _PROBABILITY_UNITS).round().to(torch.int64)
            for name, sums in self._probabilities.items()
        }

    def _watch_gate(self, router: Any) -> None:
        """Wrap the router's gate to see its probabilities; hooks see only the chosen experts."""
        routing, is_own = router.routing, "routing" in vars(router)  # a layer may have wrapped it

        def watched(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if _is_counted():
                self._add_gate(router, logits, kwargs.get("padding_mask"))
            return routing(logits, *args, **kwargs)

        router.routing = watched
        self._remove.append(
            lambda: setattr(router, "routing", routing) if is_own else delattr(router, "routing")
        )

    @torch.no_grad()
    def _add_gate(
        self, router: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None
    ) -> None:
        _, scores = compute_routing_scores_for_aux_loss(
            logits.detach().view(-1, logits.shape[-1]),
            router.topk,
            router.score_function,
            fused=router.config.moe_router_fusion,
            padding_mask=None if padding_mask is None else padding_mask.reshape(-1),
        )
        self._probabilities[self._names[router]] += scores.sum(dim=0, dtype=torch.float64)

    def _count(self, router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if not _is_counted():
            return
        probabilities, routing_map = output
        if router.config.moe_pad_expert_input_to_capacity:
            # The map includes the padding up to an expert's capacity, with probability 0.
            routing_map = routing_map & (probabilities.detach() != 0)
        self._counts[self._names[router]] += routing_map.detach().sum(dim=0, dtype=torch.int64)


def _is_counted() -> bool:
    """Return whether a forward pass is one of an iteration, or is captured in order to be.

    Full recomputation runs the forward pass twice, the first time without gradients. Evaluation has no
    gradients at all. Captures of layers are prepared by passes over tensors without a meaning.
    """
    if is_graph_capturing() and not torch.cuda.is_current_stream_capturing():
        return False
    return torch.is_grad_enabled()


def _sums_of(router: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return ``[expert]`` sums that a router keeps, 0 at first; the same ones each time."""
    attribute = _KEPT.format(name)
    if not hasattr(router, attribute):
        num_experts, device = router.config.num_moe_experts, router.weight.device
        setattr(router, attribute, torch.zeros(num_experts, dtype=dtype, device=device))
    found: torch.Tensor = getattr(router, attribute)
    return found.zero_()


def routers_of(model: Sequence[torch.nn.Module]) -> dict[torch.nn.Module, str]:
    """Return the routers of the model chunks, and the names of their layers ("layer.3")."""
    found = {}
    for chunk in model:
        modules = dict(chunk.named_modules())
        for path, module in modules.items():
            if isinstance(module, TopKRouter):
                found[module] = global_name(f"{path}.weight", modules)[0].layer_name
    return found


def table(
    counts: Mapping[str, torch.Tensor], layers: Sequence[str], num_experts: int
) -> torch.Tensor:
    """Return ``[layer, expert]`` counts of some layers, on the device; 0 for layers without counts."""
    if not layers:
        return torch.zeros((0, num_experts), dtype=torch.int64)
    counted = next(iter(counts.values()), torch.zeros(num_experts, dtype=torch.int64))
    nothing = torch.zeros_like(counted)
    return torch.stack([counts.get(layer, nothing) for layer in layers])
