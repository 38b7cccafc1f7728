"""Jobs in which snapshots change while they run: there are none, or windows of one length or another.

What is compared so runs in the same processes, seconds apart; jobs of their own would differ by more than
what snapshots cost. A turn begins with iterations that are left out, until both regions of a rank have held
a window of its length.
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.training import training

import pretrain_gpt_moe
from benchmarks.sparse_jobs import LONGEST_WINDOW
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.engine import CheckpointEngine
from moe_ft.engine.snapshots import copying
from moe_ft.engine.snapshots.profile import SnapshotProfile
from moe_ft.strategies.interface import WindowPlan
from moe_ft.strategies.sparse.strategy import SparseStrategy

_patches = Patches()  # for as long as the process runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to take snapshots.

    Attributes:
        window: snapshots in a window, None for what the strategy itself wants, 0 for no snapshots.
    """

    name: str
    window: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A run of iterations in which snapshots are taken alike.

    Attributes:
        start: iteration of the first state that the turn is about.
        measured: iterations of the states whose snapshots are measured; the iteration that follows each
            bears the cost.
    """

    variant: Variant
    start: int
    measured: range


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """Use of time by the training loop.

    Attributes:
        sleep_s: sleep for so long instead of forward and backward; None to compute.
        link_bytes_per_s: copies into regions take at least as long as over a link of this rate, for whose
            rest they wait without a core; None to copy as fast as the host can.
    """

    sleep_s: float | None = None
    link_bytes_per_s: float | None = None


def plan_turns(
    variants: Sequence[Variant], num_rounds: int, num_measured: int, first: int
) -> list[list[Turn]]:
    """Return ``[round]`` turns of all variants, every other round in opposite order.

    Args:
        variants: to be compared.
        num_rounds: how often each has a turn.
        num_measured: iterations of a turn, a multiple of the windows.
        first: where the first turn begins.
    """
    rounds: list[list[Turn]] = []
    for number in range(num_rounds):
        rounds.append([])
        for variant in variants if number % 2 == 0 else reversed(variants):
            longest = LONGEST_WINDOW if variant.window is None else max(variant.window, 1)
            start = first + 2 * longest
            measured = range(start, start + num_measured)
            rounds[-1].append(Turn(variant=variant, start=first, measured=measured))
            first = measured.stop
    return rounds


def train_in_turns(flags: list[str], turns: Sequence[Turn], loop: Loop, folder: str) -> None:
    """Train on this rank, with strategy `sparse`; the last turn's end is the number of iterations.

    Args:
        flags: of the job.
        turns: in their order.
        loop: what forward, backward and copies are.
        folder: gets, as JSON, ``[iteration]`` of each fence how long ago the iteration before had ended,
            and the processor time of this rank's threads so far, in seconds.
    """
    times: dict[int, tuple[float, float]] = {}
    _take_turns(
        {
            state: turn.variant.window
            for turn in turns
            for state in range(turn.start, turn.measured.stop)
        }
    )
    _note_times(times)
    if loop.sleep_s is not None:
        _sleep_instead(loop.sleep_s)
    if loop.link_bytes_per_s is not None:
        _copy_over_link(loop.link_bytes_per_s)
    pretrain_gpt_moe.main(flags)
    times_path(Path(folder), int(os.environ["RANK"])).write_text(json.dumps(times))


def times_path(folder: Path, rank: int) -> Path:
    """Return where a rank's times are."""
    return folder / f"times_{rank}.json"


def _take_turns(window_of: dict[int, int | None]) -> None:
    """Have the strategy plan windows of the turn's length, and the engine take none if it is 0."""
    plan_window, is_due = SparseStrategy.plan_window, CheckpointEngine._is_due

    def plan_as_told(
        strategy: SparseStrategy, iteration: int, *, is_whole: bool = False
    ) -> WindowPlan:
        own = strategy.length.now
        strategy.length.now = window_of.get(iteration) or own
        plan = plan_window(strategy, iteration, is_whole=is_whole)
        strategy.length.now = own
        return plan

    def is_due_as_told(engine: CheckpointEngine, iteration: int) -> bool:
        return window_of.get(iteration) != 0 and is_due(engine, iteration)

    _patches.set(SparseStrategy, "plan_window", plan_as_told)
    _patches.set(CheckpointEngine, "_is_due", is_due_as_told)


def _note_times(times: dict[int, tuple[float, float]]) -> None:
    """Note what a fence is reached after; the engine measures it from the second iteration on."""
    note = SnapshotProfile.note_forward_backward

    def note_too(profile: SnapshotProfile, seconds: float) -> None:
        times[len(times) + 2] = seconds, time.process_time()
        note(profile, seconds)

    _patches.set(SnapshotProfile, "note_forward_backward", note_too)


def _sleep_instead(seconds: float) -> None:
    """Replace forward and backward; gradients stay what they are, which is zero."""

    def sleep(**_: Any) -> list[dict[str, torch.Tensor]]:
        time.sleep(seconds)
        return [{"lm loss": torch.ones(1)}]

    def get(*_: Any, **__: Any) -> Callable[..., Any]:
        return sleep

    _patches.set(training, "get_forward_backward_func", get)


def _copy_over_link(bytes_per_s: float) -> None:
    """Have copies take longer, as over PCIe; the two ranks have a link each."""
    copy_all = copying.StateCopier._copy_all

    def copy_slowly(copier: Any, copies: Sequence[Any]) -> set[tuple[str, str]]:
        start = time.perf_counter()
        absent = copy_all(copier, copies)
        seconds = sum(copy.target.nbytes for copy in copies) / bytes_per_s
        time.sleep(max(0.0, start + seconds - time.perf_counter()))
        return absent

    _patches.set(copying.StateCopier, "_copy_all", copy_slowly)
