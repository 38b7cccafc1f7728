"""The window of snapshots that is being taken, and its progress on this rank."""

from dataclasses import dataclass, field
from typing import Any

from moe_ft.engine.memory.layout import LazyLayout
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.snapshots.job import SnapshotJob, SnapshotState
from moe_ft.strategies.interface import WindowPlan


@dataclass(kw_only=True, slots=True)
class OpenWindow:
    """Snapshots of consecutive iterations, which count only together. Owned by the training thread.

    Attributes:
        layout: of the region that all of them go into.
        is_last: whether it holds the state that training has ended with.
        jobs: the snapshots that were begun.
        is_given_up: no further one is taken, because one has failed or an iteration had none.
        is_broken: one could not be begun on this rank.
    """

    plan: WindowPlan
    layout: LazyLayout
    region: Region
    is_last: bool = False
    jobs: list[SnapshotJob] = field(default_factory=list)
    is_given_up: bool = False
    is_broken: bool = False

    def break_off(self) -> None:
        """Have the window fail: the next snapshot cannot be begun on this rank."""
        self.is_given_up = self.is_broken = True

    @property
    def is_growing(self) -> bool:
        """True if the next iteration needs a snapshot."""
        return not self.is_given_up and len(self.jobs) < len(self.plan.snapshots)

    @property
    def last(self) -> SnapshotJob | None:
        """The last job that was begun, None if the first one could not be."""
        return self.jobs[-1] if self.jobs else None

    @property
    def has_failed(self) -> bool:
        """True if a snapshot has, or will when its copy ends."""
        return self.is_broken or any(job.has_failed for job in self.jobs)

    @property
    def is_protected(self) -> bool:
        """True if all peers have all snapshots that are complete."""
        return all(job.is_protected for job in self.jobs)

    @property
    def state(self) -> SnapshotState:
        """Progress of all of them together."""
        if self.is_growing or any(job.state is SnapshotState.RUNNING for job in self.jobs):
            return SnapshotState.RUNNING
        if self.is_given_up or self.has_failed:
            return SnapshotState.FAILED
        return SnapshotState.COMPLETE

    def facts(self) -> dict[str, Any]:
        """Return what the event log says of the window, nothing if its strategy has nothing to say."""
        if not self.plan.facts:
            return {}
        sizes = [job.request.num_bytes for job in self.jobs]
        return {"length": len(self.jobs), "bytes": sizes, **self.plan.facts}
