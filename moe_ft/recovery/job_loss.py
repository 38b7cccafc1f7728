"""What a recovery has cost the whole job, added up from its stages, and what the strategy makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.token_ledger import Loss, job_plt
from moe_ft.strategies.partial.strategy import PartialStrategy


@dataclass(frozen=True, kw_only=True, slots=True)
class JobLoss:
    """What a recovery has cost, in the whole job.

    Attributes:
        lost_tokens, plt: by this recovery; repeated_tokens: that some experts are trained with again.
        total_lost_tokens, total_plt: by all recoveries of the state so far. PLT is of the whole
            planned run, also for Dynamic-K.
        per_expert: lost by this recovery, ``[expert]`` by layer name.
        k_snapshot, k_persist: from now on.
    """

    lost_tokens: int
    plt: float
    repeated_tokens: int
    total_lost_tokens: int
    total_plt: float
    per_expert: Mapping[str, tuple[int, ...]]
    k_snapshot: int
    k_persist: int


def add_up(losses: Sequence[Loss], strategy: PartialStrategy, experts: ExpertFacts) -> JobLoss:
    """Add up what all stages have lost, and let the strategy act on it.

    Args:
        losses: of all ranks.
        strategy: of this rank; all decide alike.
        experts: of the job.
    """
    lost: dict[str, tuple[int, ...]] = {}
    repeated: dict[str, tuple[int, ...]] = {}
    accumulated: dict[str, tuple[int, ...]] = {}
    for loss in losses:
        lost.update(loss.lost)
        repeated.update(loss.repeated)
        accumulated.update(loss.accumulated)
    planned = experts.planned_tokens
    lost_tokens, plt = job_plt(lost, planned)
    total_lost_tokens, total_plt = job_plt(accumulated, planned)
    strategy.raise_k(total_plt, plt)
    return JobLoss(
        lost_tokens=lost_tokens,
        plt=plt,
        repeated_tokens=job_plt(repeated, planned)[0],
        total_lost_tokens=total_lost_tokens,
        total_plt=total_plt,
        per_expert=lost,
        k_snapshot=strategy.k_snapshot,
        k_persist=strategy.k_persist,
    )
