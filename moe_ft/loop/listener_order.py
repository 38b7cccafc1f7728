"""The listeners of a training loop, in the order in which they are called."""

import os
from collections.abc import Sequence
from pathlib import Path

from moe_ft.config.config import MoeFtConfig
from moe_ft.events import EventLog
from moe_ft.loop.checkpoints import Checkpoints, PipelineLog
from moe_ft.loop.failure_report import FailureReport
from moe_ft.loop.faults import Faults
from moe_ft.loop.hangs import Hangs
from moe_ft.loop.leaving import BreakpointWriter
from moe_ft.loop.listeners import Listeners, LoopState
from moe_ft.loop.metrics import Metrics
from moe_ft.loop.progress import Digests, ProgressListener, ReportsTraining
from moe_ft.loop.protects import Protects
from moe_ft.loop.routers import Routers, SlotTables
from moe_ft.loop.training_loop import TrainingLoop
from moe_ft.loop.weight_check import WeightCheck


def listeners_of(
    config: MoeFtConfig,
    training: TrainingLoop,
    rank: int,
    *,
    on_sigterm: bool,
    warnings: Sequence[str] = (),
) -> Listeners:
    """Return everything that acts at the seams of a loop on one rank.

    The order matters: hangs are watched from the start to the end; metrics are served until the log has its
    last event; the log is opened before anything is recovered, and closed last; what protects the run is
    said before what it continues from; weights are checked before ranks vote on a step; the events of an
    iteration come before the reports of the engine; what it has sent is committed before a window that it
    completes makes older logs superfluous; after a failure a breakpoint comes before its report. Without
    `on_sigterm`, SIGTERM is left alone. Rank 0 prints the warnings where it says what protects the run.
    """
    loop = LoopState()
    # Without a directory the log is never started, and drops what is written to it.
    log = EventLog(Path(config.observability.event_log or os.devnull), rank)
    breakpoints = BreakpointWriter(loop, log)
    faults, routers = Faults(config.fault.faults, log), Routers(config, log)
    checkpoints = Checkpoints(config, training, loop, log, faults, routers, breakpoints)
    report = FailureReport(
        config, loop, log, on_sigterm=on_sigterm, before_report=breakpoints.on_sigterm
    )
    return Listeners(
        loop,
        [
            Hangs(config.recovery, loop, log, training.timeout_s(), report.tell_of_hang),
            Metrics(config.observability, config.memory, rank),
            ProgressListener(config, training, loop, log),
            Protects(config, training, loop, log, checkpoints, warnings, on_sigterm=on_sigterm),
            faults,
            routers,
            SlotTables(log),
            Digests(config.observability, training, loop, log),
            WeightCheck(config.checks.check_weights, training, loop, log),
            PipelineLog(checkpoints, training, loop),
            checkpoints,
            ReportsTraining(loop, rank),
            report,
        ],
    )
