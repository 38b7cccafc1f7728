"""Division of replicated state among the data-parallel ranks of a stage, by what else each of them saves."""

from collections.abc import Sequence
from dataclasses import dataclass

from moe_ft.planning.experts import ExpertLayout
from moe_ft.planning.sharding import adaptive_shares


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """Bytes that a rank of the stage saves, and the ranks that share replicated state with it.

    Attributes:
        always_bytes: that every snapshot of this rank holds.
        unit_bytes: of the largest rotating unit of the stage.
        replicated_bytes: state that all data-parallel ranks have and that adaptive sharding divides for each
            snapshot; 0 for a division that stays.
        ep_ranks: ``[data-parallel rank]`` its expert-parallel rank.
    """

    always_bytes: int
    unit_bytes: int
    replicated_bytes: int = 0
    ep_ranks: tuple[int, ...] = ()

    def divide(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the shares for ``[expert-parallel rank]`` selected experts, None for those of the start."""
        if not self.replicated_bytes:
            return None
        loads = [counts[ep_rank] * self.unit_bytes for ep_rank in self.ep_ranks]
        return tuple(adaptive_shares(self.replicated_bytes, loads))

    def possible(
        self, experts: ExpertLayout, possible_k: Sequence[int]
    ) -> list[tuple[int, ...] | None]:
        """Return each division that snapshots will need.

        All layers together take consecutive places around the expert-parallel ranks, so only the rank at
        which they begin matters.

        Args:
            possible_k: experts per layer in a snapshot; empty for automatic k, where ranks with room take as
                many as the others.
        """
        divisions = dict.fromkeys([None, self.divide([0] * experts.ep_size)])
        for k in possible_k:
            least, num_more = divmod(experts.num_layers * k, experts.ep_size)
            for start in range(experts.ep_size):
                counts = [
                    least + ((rank - start) % experts.ep_size < num_more)
                    for rank in range(experts.ep_size)
                ]
                divisions[self.divide(counts)] = None
        return list(divisions)
