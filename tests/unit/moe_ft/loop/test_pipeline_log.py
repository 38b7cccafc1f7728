"""Sends are logged while an iteration runs, and at no other time."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.loop.checkpoints import PipelineLog
from moe_ft.loop.listeners import LoopState
from tests.unit.fault_tolerance.loops import ended
from tests.unit.moe_ft.engine.boundary.logs import NEXT, PREVIOUS, SmallLog, small_log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[SmallLog]:
    """Return a log that has started."""
    with small_log(tmp_path) as found:
        yield found


@pytest.fixture
def link() -> Iterator[P2PCommunicator]:
    """Return links on which nothing is sent."""
    found = P2PCommunicator.__new__(P2PCommunicator)
    found.prev_rank, found.next_rank = PREVIOUS, NEXT
    found.config = Namespace(timers=None)
    with Patches() as patches:

        def communicate(link: P2PCommunicator, **given: Any) -> Any:
            return None, None, None

        patches.set(P2PCommunicator, "_communicate", communicate)
        yield found


def listener_of(log: SmallLog | None, loop: LoopState) -> PipelineLog:
    checkpoints: Any = Namespace(
        boundary_log=None if log is None else log.log, last_numbers=lambda: None
    )
    listener = PipelineLog(checkpoints, MegatronLoop(), loop)
    listener.after_recovery()
    return listener


def send(link: P2PCommunicator) -> None:
    link.send_forward(torch.ones(8, dtype=torch.bfloat16), is_last_stage=False)


def test_iteration_is_logged_and_evaluation_and_replay_are_not(
    log: SmallLog, link: P2PCommunicator
) -> None:
    loop = LoopState(iteration=3)
    listener = listener_of(log, loop)
    loop.is_replaying = True
    listener.begin_attempt()
    send(link)
    loop.is_replaying, loop.is_in_iteration = False, True
    for _ in range(2):  # the second attempt replaces the first
        listener.begin_attempt()
        send(link)
    loop.is_in_iteration = False
    listener.end_iteration(ended(4))
    send(link)
    listener.begin_attempt()
    send(link)
    log.worker.work()
    assert log.held() == [3]
    (slot,) = (each for each in log.slots if each.iteration == 3)
    assert slot.index_path.read_text().count('"neighbour":') == 1
    listener.close()


def test_log_is_committed_before_the_step_in_which_the_rank_may_die(
    log: SmallLog, link: P2PCommunicator
) -> None:
    listener = listener_of(log, LoopState(iteration=3, is_in_iteration=True))
    listener.begin_attempt()
    send(link)
    listener.before_step()
    log.worker.work()
    assert log.held() == [3]
    listener.end_iteration(ended(4))
    log.worker.work()
    assert log.held() == [3]
    listener.close()


def test_log_after_a_repair_takes_the_place_of_the_one_before(
    log: SmallLog, link: P2PCommunicator
) -> None:
    before = P2PCommunicator._communicate
    listener = listener_of(log, LoopState(iteration=3, is_in_iteration=True))
    listener.begin_attempt()
    send(link)
    listener.suspend(3)
    assert P2PCommunicator._communicate is before
    listener.after_recovery()
    listener.begin_attempt()
    send(link)
    listener.before_step()
    log.worker.work()
    (slot,) = (each for each in log.slots if each.iteration == 3)
    assert slot.index_path.read_text().count('"neighbour":') == 1
    listener.close()
    assert P2PCommunicator._communicate is before
