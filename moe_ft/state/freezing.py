"""Freezing of units while an iteration is replayed: they compute, but are not trained.

Freezing must not change collectives or graphs. Parameters whose gradients are reduced together with others
therefore keep their gradients, which are dropped afterwards.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from moe_ft.state.parameters import LocalParameter
from moe_ft.units import UnitId, UnitKind

# Transformer Engine's grouped linear layers read requires_grad from the first of their weights only.
_GROUPED = re.compile(r"(?P<module>.*\.experts\.linear_fc[12])\.(?:weight|bias)\d+$")
_COUPLING_MARKS = (
    "sequence_parallel",  # summed over tensor-parallel ranks, all in one buffer
    "average_gradients_across_tp_domain",
    "shared_embedding",  # summed over the first and the last stage
    "pipeline_parallel",  # summed over all stages
    "flextron_router_pp_sync",
)


def grouped_layers(parameters: Iterable[LocalParameter]) -> frozenset[str]:
    """Return the layers whose experts on a rank can only be frozen together."""
    return frozenset(each.unit.layer_name for each in parameters if _grouped_module(each.name))


class Freezing:
    """Freezes units of one rank. Owned by the training thread."""

    def __init__(
        self,
        parameters: Sequence[LocalParameter],
        *,
        tp_size: int,
        is_possible: Callable[[UnitId], bool],
    ) -> None:
        """Determine which parameters can be frozen.

        Args:
            tp_size: number of tensor-parallel ranks.
            is_possible: tells whether autograd computes the weight gradients of a unit. If not, they are
                computed and dropped.
        """
        self._parameters = tuple(parameters)
        self._freezable = [
            each
            for each in parameters
            if each.parameter.requires_grad
            and is_possible(each.unit)
            and not _is_coupled(each, tp_size)
        ]

    @contextmanager
    def frozen(self, units: Collection[UnitId]) -> Iterator[None]:
        """Skip the weight gradients of these units where possible.

        All ranks that hold one of the units call this with the same units.
        """
        chosen = self._to_freeze(units)
        for parameter in chosen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in chosen:
                parameter.requires_grad_(True)

    def _to_freeze(self, units: Collection[UnitId]) -> list[torch.nn.Parameter]:
        trained_modules = {
            _grouped_module(each.name) for each in self._freezable if each.unit not in units
        }
        return [
            each.parameter
            for each in self._freezable
            if each.unit in units
            and (
                _grouped_module(each.name) is None
                or _grouped_module(each.name) not in trained_modules
            )
        ]

    def drop_gradients(self, units: Collection[UnitId]) -> None:
        """Make the optimizer skip these units. Call this between clipping and the step."""
        for local in self._parameters:
            master: Any = local.master
            if master is not None and local.unit in units:
                master.grad = None
                if hasattr(master, "decoupled_grad"):
                    master.decoupled_grad = None


def _is_coupled(local: LocalParameter, tp_size: int) -> bool:
    """Return whether the gradient of a parameter is reduced together with others.

    The embedding is also the start of the first stage's graph: with full recomputation, a block whose input
    needs no gradient computes none for its weights either.
    """
    if local.unit.kind in (UnitKind.EMBEDDING, UnitKind.OTHER):
        return True
    is_marked = any(getattr(local.parameter, mark, False) for mark in _COUPLING_MARKS)
    is_qk_norm = "q_layernorm" in local.name or "k_layernorm" in local.name
    return is_marked or (is_qk_norm and tp_size > 1)


def _grouped_module(name: str) -> str | None:
    match = _GROUPED.match(name)
    return None if match is None else match["module"]
