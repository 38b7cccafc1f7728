"""Experts of a job and of its pipeline stages: their ranks, and counts of their tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ft.units import UnitId, UnitKind

Counts = npt.NDArray[np.int64]  # [layer, expert]
Expert = tuple[str, int]  # layer name, number


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertFacts:
    """Facts about the experts of a job and the tokens that they will get.

    Attributes:
        num_experts: per MoE layer, over all ranks; 0 for a model without experts.
        ep_rank, ep_size: this rank's place among the expert-parallel ranks.
        tokens_per_sample: sequence length times top-k.
        samples_per_iteration: average over the planned run.
    """

    num_experts: int
    ep_rank: int
    ep_size: int
    tokens_per_sample: int
    planned_samples: int
    samples_per_iteration: int

    @property
    def planned_tokens(self) -> int:
        """Tokens times top-k that a layer processes in the whole planned run."""
        return self.planned_samples * self.tokens_per_sample

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens times top-k of an iteration, averaged over the planned run."""
        return self.samples_per_iteration * self.tokens_per_sample


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """The experts of one stage and the expert-parallel ranks that hold them.

    Attributes:
        ep_size: expert-parallel ranks; rank r holds the r-th equal part of every layer's experts.
    """

    num_layers: int
    num_experts: int
    ep_size: int

    @property
    def num_local(self) -> int:
        """Experts of one layer on one rank."""
        return self.num_experts // self.ep_size

    def rank_of(self, expert: int) -> int:
        """Return the expert-parallel rank that holds an expert."""
        return expert // self.num_local

    def expert_at(self, position: int) -> int:
        """Return the expert at a position of the interleaved order.

        Consecutive positions are on consecutive ranks; positions wrap around.
        """
        position %= self.num_experts
        return position % self.ep_size * self.num_local + position // self.ep_size

    def first_cursors(self, k: int, start: int = 0) -> tuple[int, ...]:
        """Return the positions at which the layers begin, so that layer and rank interleave (Fig. 4).

        With k experts per layer, the experts of all layers together go around the ranks.
        """
        return tuple((start + layer * k) % self.num_experts for layer in range(self.num_layers))


def experts_of_stage(
    units_of_ranks: Sequence[Iterable[UnitId]], num_experts: int
) -> tuple[list[str], set[Expert]]:
    """Return the layers of a stage in which experts are trained, and the untrained experts in them."""
    trained = {unit for units in units_of_ranks for unit in units if unit.kind is UnitKind.EXPERT}
    ordered = sorted(trained, key=lambda each: (each.block, each.layer))
    layers = list(dict.fromkeys(unit.layer_name for unit in ordered))
    known = {(unit.layer_name, unit.expert) for unit in trained}
    everyone = {(layer, expert) for layer in layers for expert in range(num_experts)}
    return layers, everyone - known
