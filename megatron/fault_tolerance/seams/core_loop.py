"""Part of a training loop that is the same for all loops on `megatron.core`: its replays and its links."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, override

from megatron.fault_tolerance.seams import pipeline_tap, replay
from moe_ft.format.records import Counted
from moe_ft.loop.training_loop import LoopParts, RecordSend, RunAgain, TrainingLoop
from moe_ft.recovery.borders import Borders
from moe_ft.state.parameters import LocalParameter


class CoreLoop(TrainingLoop):
    """A loop whose model, optimizer and pipeline are those of `megatron.core`."""

    @abstractmethod
    def run_forward_backward(self, parts: LoopParts, before: Counted, after: Counted) -> None:
        """Run forward and backward of one iteration again; gradients are zero, and ready afterwards.

        Called by all ranks.

        Args:
            before: of the state in which the iteration begins.
            after: of the state that it made.

        Raises:
            ConfigError: if the iteration would not be the same as before.
        """

    @override
    def replaying(
        self, parts: LoopParts, parameters: Sequence[LocalParameter], borders: Borders | None
    ) -> AbstractContextManager[RunAgain]:
        return replay.replaying(self.run_forward_backward, parts, parameters, borders)

    @override
    def open_links(self, pipeline: Any) -> None:
        pipeline_tap.open_links(pipeline)

    @override
    def recording(self, record: RecordSend) -> AbstractContextManager[None]:
        return pipeline_tap.recording(record)
