"""Training in which a test sets the bytes of a snapshot, however fast the machine copies."""

from collections.abc import Sequence
from pathlib import Path

import pretrain_gpt_moe
from moe_ft.engine.snapshots.profile import SnapshotProfile
from tests.harness import JobResult, run_ranks

Budgets = Sequence[tuple[int, float]]


def train_with_budgets(
    flags: Sequence[str], world_size: int, budgets: Budgets, *, log_dir: Path
) -> JobResult:
    """Run a job in which snapshots of at most ``bytes`` cost no time from ``iteration`` on.

    Nothing has been measured before the first of these ``(iteration, bytes)``.
    """
    return run_ranks(_train, world_size, list(flags), list(budgets), log_dir=log_dir)


def _train(flags: list[str], budgets: Budgets) -> None:
    num_iterations = 0
    note_iteration = SnapshotProfile.note_iteration

    def count(profile: SnapshotProfile, seconds: float) -> None:
        nonlocal num_iterations
        num_iterations += 1
        note_iteration(profile, seconds)

    def allowed(profile: SnapshotProfile) -> float | None:
        sizes = [size for start, size in budgets if start <= num_iterations]
        return sizes[-1] if sizes else None

    SnapshotProfile.note_iteration = count  # type: ignore[method-assign,assignment]
    SnapshotProfile.copied_bytes = property(allowed)  # type: ignore[assignment]
    SnapshotProfile.flow_bytes = property(allowed)  # type: ignore[assignment]
    pretrain_gpt_moe.main(flags)
