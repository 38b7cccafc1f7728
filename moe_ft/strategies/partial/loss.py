"""Cost of a recovery for the whole job, added up from its stages."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_ft.planning.token_ledger import Loss, job_plt
from moe_ft.strategies.interface import JobLoss


@dataclass(frozen=True, kw_only=True)
class PartialLoss(JobLoss):
    """Tokens whose updates a recovery has dropped. PLT is of the whole planned run, also for Dynamic-K.

    Attributes:
        repeated_tokens: tokens that some experts are trained with again.
        total_lost_tokens: by all recoveries of the state so far.
        per_expert: lost by this recovery, ``[expert]`` by layer name.
        k_snapshot, k_persist: from now on.
    """

    repeated_tokens: int
    total_lost_tokens: int
    per_expert: Mapping[str, tuple[int, ...]]
    k_snapshot: int
    k_persist: int

    def fields(self) -> dict[str, Any]:
        """Return the fields of the recovery's event."""
        return {
            "lost_tokens": self.lost_tokens,
            "plt": self.plt,
            "repeated_tokens": self.repeated_tokens,
            "total_lost_tokens": self.total_lost_tokens,
            "total_plt": self.total_plt,
            "lost_per_expert": {layer: list(lost) for layer, lost in self.per_expert.items()},
            "k_snapshot": self.k_snapshot,
            "k_persist": self.k_persist,
        }


def job_loss(
    losses: Iterable[Loss], planned_tokens: int, k_snapshot: int, k_persist: int
) -> PartialLoss:
    """Return what a recovery has cost the whole job.

    Args:
        losses: of all ranks; ranks of one stage have equal ones.
        planned_tokens: tokens times top-k that a layer processes in the whole planned run.
        k_snapshot: from now on, as `k_persist`.
        k_persist: see `k_snapshot`.
    """
    lost: dict[str, tuple[int, ...]] = {}
    repeated, accumulated = dict(lost), dict(lost)
    for loss in losses:
        lost |= loss.lost
        repeated |= loss.repeated
        accumulated |= loss.accumulated
    lost_tokens, plt = job_plt(lost, planned_tokens)
    total_lost_tokens, total_plt = job_plt(accumulated, planned_tokens)
    return PartialLoss(
        lost_tokens=lost_tokens,
        plt=plt,
        repeated_tokens=job_plt(repeated, planned_tokens)[0],
        total_lost_tokens=total_lost_tokens,
        total_plt=total_plt,
        per_expert=lost,
        k_snapshot=k_snapshot,
        k_persist=k_persist,
    )
