"""Jobs that run iterations again while they train, with units frozen or not, to compare their times.

Between two iterations of the stock loop one iteration is run again in each variant, through the replay that
recovers windows (moe_ft/loop/resumption.py), in the same process and in turns. What is trained in
between is of no use.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import training

import pretrain_gpt_moe
from megatron.fault_tolerance.seams import replay as replay_module
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.engine import CheckpointEngine
from moe_ft.format.records import IterationRecord
from moe_ft.loop import checkpoints
from moe_ft.loop.listeners import Listeners
from moe_ft.loop.resumption import Replay
from moe_ft.loop.training_loop import LoopParts
from moe_ft.recovery.checkpointing import Checkpointing
from moe_ft.recovery.start import start
from moe_ft.state.record import CapturedRecord, IterationFacts, encode
from moe_ft.units import UnitId

NUM_WARM_UP = 4  # iterations

Units = frozenset[UnitId]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayVariant:
    """A way to run an iteration again.

    Attributes:
        share: of the units that are frozen.
        skips: whether their weight gradients are left out, where that is possible; if not, all are
            computed, and those of frozen units dropped.
    """

    name: str
    share: float
    skips: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OneIteration:
    """A conversion of which one iteration has to be run again, on a state that is in place."""

    records: tuple[IterationRecord, IterationRecord]
    frozen: Units
    num_replays: int = 1

    def frozen_units(self, position: int) -> Units:
        """Return the same at every position."""
        return self.frozen

    def load(self, position: int) -> None:
        """Put nothing back."""


class ReplayTurns:
    """One rank's replays between iterations. Owned by the training thread.

    Attributes:
        times: by name of the variant, ``[round]`` the seconds of the iteration, of its forward and backward,
            and the processor times of both; "" for those of the stock loop.
    """

    def __init__(self, variants: tuple[ReplayVariant, ...], num_rounds: int) -> None:
        self._variants, self._rounds_left = variants, num_rounds
        self.times: dict[str, list[tuple[float, ...]]] = {each.name: [] for each in variants}
        self.times[""] = []
        self._running: Checkpointing | None = None
        self._loop: LoopParts | None = None
        self._captured: CapturedRecord | None = None
        self._begin = self._forward_backward = (0.0, 0.0)

    def install(self) -> None:
        """Enter the stock loop, for as long as the process runs."""
        patches = Patches()
        capture = Checkpointing.capture
        is_due = CheckpointEngine._is_due
        begin, end = Listeners.begin_iteration, Listeners.end_iteration
        begin_training = Listeners.begin_training
        get_function = training.get_forward_backward_func

        def start_and_remember(*args: Any) -> Checkpointing:
            self._running = start(*args)
            return self._running

        def remember_record(running: Checkpointing, facts: IterationFacts) -> CapturedRecord:
            self._captured = capture(running, facts)
            return self._captured

        def remember_loop(listeners: Listeners, loop: LoopParts) -> None:
            self._loop = loop
            begin_training(listeners, loop)

        def begin_iteration(listeners: Listeners, iteration: int) -> None:
            begin(listeners, iteration)
            self._begin = _now()

        def end_iteration(listeners: Listeners, *args: Any, **options: Any) -> None:
            if listeners.loop.iteration >= NUM_WARM_UP:
                self._note("")
            end(listeners, *args, **options)

        patches.set(checkpoints, "start", start_and_remember)
        patches.set(Checkpointing, "capture", remember_record)
        patches.set(Listeners, "begin_iteration", begin_iteration)
        patches.set(Listeners, "end_iteration", end_iteration)
        patches.set(Listeners, "begin_training", remember_loop)
        patches.set(
            Listeners, "replay_if_due", lambda listeners, *args: self._replay(listeners, *args)
        )
        patches.set(
            CheckpointEngine,
            "_is_due",
            lambda engine, iteration: iteration < NUM_WARM_UP and is_due(engine, iteration),
        )
        patches.set(
            training,
            "get_forward_backward_func",
            lambda *args, **options: self._timed(get_function(*args, **options)),
        )

    def _note(self, name: str) -> None:
        whole, part = _since(self._begin), self._forward_backward
        self.times[name].append((whole[0], part[0], whole[1], part[1]))

    def _timed(self, forward_backward: Callable[..., Any]) -> Callable[..., Any]:
        def run(**options: Any) -> Any:
            start = _now()
            result = forward_backward(**options)
            self._forward_backward = _since(start)
            return result

        return run

    def _replay(
        self, listeners: Listeners, forward_backward: Callable[..., Any] | None = None
    ) -> None:
        """Run one iteration again in each variant; every other round in opposite order."""
        if (
            forward_backward is None
            or listeners.loop.iteration < NUM_WARM_UP
            or self._rounds_left == 0
        ):
            return
        assert self._captured is not None and self._loop is not None
        loop = replace(self._loop, forward_backward=forward_backward)
        record = encode(self._captured)
        self._rounds_left -= 1
        listeners.loop.is_replaying = True
        for variant in self._variants[:: 1 if self._rounds_left % 2 else -1]:
            replay = self._make_replay(variant, record)
            dist.barrier()
            self._begin = _now()
            with Patches() as patches:
                if not variant.skips:
                    patches.set(replay_module, "can_freeze", lambda config: False)
                replay.run(loop)
            self._note(variant.name)
        listeners.loop.is_replaying = False

    def _make_replay(self, variant: ReplayVariant, record: IterationRecord) -> Replay:
        assert self._running is not None
        parameters = self._running.met.live.parameters
        units = sorted({each.unit for each in parameters})
        num_frozen = round(len(units) * variant.share)
        # Spread over all kinds and layers alike.
        chosen = {units[index * len(units) // num_frozen] for index in range(num_frozen)}
        conversion: Any = OneIteration(records=(record, record), frozen=frozenset(chosen))
        return Replay(conversion, parameters, MegatronLoop(), lambda iteration: None)


def _now() -> tuple[float, float]:
    """Return a point in time, and the processor time of all threads so far."""
    return time.perf_counter(), time.process_time()


def _since(start: tuple[float, float]) -> tuple[float, float]:
    now = _now()
    return now[0] - start[0], now[1] - start[1]


def train_and_replay(
    flags: list[str], variants: tuple[ReplayVariant, ...], num_rounds: int, folder: str
) -> None:
    """Train on this rank, with strategy `sparse`, and write the times."""
    turns = ReplayTurns(variants, num_rounds)
    turns.install()
    pretrain_gpt_moe.main(flags)
    (Path(folder) / f"times_{os.environ['RANK']}.json").write_text(json.dumps(turns.times))
