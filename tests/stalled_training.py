"""Training on a clock that advances only in copies that training waits for."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import pretrain_gpt_moe
from moe_ft.engine.agreement import StageSum
from moe_ft.engine.clock import Clock
from moe_ft.engine.snapshots.profile import Stall
from moe_ft.state.record import RecordTaker
from tests.harness import JobResult, run_ranks

COUNTS_S, RECORD_S = 1000.0, 20.0


def train_on_slow_copies(flags: Sequence[str], world_size: int, *, log_dir: Path) -> JobResult:
    """Run a job in which copying counts takes COUNTS_S and copying a record takes RECORD_S."""
    return run_ranks(_train, world_size, list(flags), log_dir=log_dir)


def _train(flags: list[str]) -> None:
    now_s = 0.0

    def slow(original: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        @wraps(original)
        def act(*args: Any) -> Any:
            nonlocal now_s
            now_s += seconds
            return original(*args)

        return act

    class SlowCopies(Clock):
        def perf_counter(self) -> float:
            return now_s

    make_stall = Stall.__init__
    Stall.__init__ = lambda stall, clock: make_stall(stall, SlowCopies())  # type: ignore[method-assign,assignment]
    StageSum.begin = slow(StageSum.begin, COUNTS_S)  # type: ignore[method-assign]
    RecordTaker.capture = slow(RecordTaker.capture, RECORD_S)  # type: ignore[method-assign]
    pretrain_gpt_moe.main(flags)
