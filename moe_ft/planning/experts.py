"""The experts of a pipeline stage: on which ranks they are, and the type of counts of their tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError

Counts = npt.NDArray[np.int64]  # [layer, expert]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayout:
    """The experts of one stage and the expert-parallel ranks that hold them.

    Attributes:
        num_layers: MoE layers of the stage.
        num_experts: in each of them.
        ep_size: expert-parallel ranks; rank r holds the r-th equal part of every layer's experts.
    """

    num_layers: int
    num_experts: int
    ep_size: int

    def __post_init__(self) -> None:
        if self.num_experts < 1 or self.ep_size < 1 or self.num_experts % self.ep_size:
            raise PlanError(
                f"{self.num_experts} experts cannot be divided equally among {self.ep_size} ranks"
            )

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

        Args:
            k: experts per layer.
            start: position of the first layer.
        """
        return tuple((start + layer * k) % self.num_experts for layer in range(self.num_layers))
