"""Lockstep of a local recovery: all ranks meet before each iteration that some stage runs again.

Ranks that run nothing again learn from these meetings that the others make progress. So they wait for many
iterations, but never longer for one than the timeout of the job's groups; and they hear of a rank that has
died at the next meeting. The plan says which iterations these are, the same on all ranks.
"""

from moe_ft.engine.agreement import Agreement


class Lockstep:
    """Meetings of one local recovery. Owned by the training thread; every rank comes to each of them."""

    def __init__(self, everyone: Agreement, first: int, target: int) -> None:
        """Prepare.

        Args:
            everyone: all ranks of the job.
            first: the first iteration that any stage runs again.
            target: iteration of the state that all stages reach.
        """
        self._everyone, self._next, self._target = everyone, first, target

    def before(self, iteration: int) -> None:
        """Meet before an iteration that this rank runs again, and before those that only others have run.

        Raises:
            RuntimeError: if a rank does not come in time, or has died.
        """
        while self._next <= min(iteration, self._target):
            self._everyone.barrier()
            self._next += 1

    def end(self) -> None:
        """Wait until all ranks have the state of the target; see `before`."""
        self.before(self._target)
