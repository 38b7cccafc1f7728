"""Logs what crosses stage boundaries while iterations run; evaluation and replays leave no trace.

The tap is seams/pipeline_tap.py, the log moe_ft/engine/boundary/log.py. Checkpoints have it opened.
"""

from contextlib import ExitStack

from megatron.fault_tolerance.seams.pipeline_tap import recording
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.loop.checkpoints import Checkpoints
from moe_ft.loop.listeners import EndedIteration, LoopListener, LoopState


class PipelineLog(LoopListener):
    """Records one rank's sends. Owned by the training thread. Does nothing without --moe-ft-upstream-log."""

    def __init__(self, checkpoints: Checkpoints, loop: LoopState) -> None:
        self._checkpoints, self._loop = checkpoints, loop
        self._log: BoundaryLog | None = None
        self._tap = ExitStack()

    def after_recovery(self) -> None:
        """Tap the links, if there is a log."""
        self._log = self._checkpoints.boundary_log
        if self._log is not None:
            self._tap.enter_context(recording(self._log.record))

    def begin_attempt(self) -> None:
        """Begin the log of the iteration, or begin it again."""
        if self._log is not None and self._loop.is_in_iteration and not self._loop.is_replaying:
            self._log.begin(self._loop.iteration, self._checkpoints.last_numbers())

    def before_step(self) -> None:
        """Have the log of the iteration committed: nothing is sent once gradients are ready.

        A rank that dies in its step may leave other stages with the state after it, which need this log.
        """
        if self._log is not None:
            self._log.end()

    def end_iteration(self, ended: EndedIteration) -> None:
        """Have the log committed of an iteration whose step was skipped."""
        if self._log is not None:
            self._log.end()

    def suspend(self, iteration: int) -> None:
        """Leave the links alone until there is another log."""
        self._log = None
        self._tap.close()

    def close(self) -> None:
        """Leave Megatron's links as they were."""
        self._tap.close()
