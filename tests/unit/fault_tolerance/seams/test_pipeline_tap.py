"""Taps on the pipeline's links: what is recorded, what is played, and what stays live."""

import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel import mappings

from megatron.fault_tolerance.seams import pipeline_tap as module
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.pipeline_tap import IdleTime, open_links, playing, recording
from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.format.boundary import Direction
from tests.simulation import collectives
from tests.unit.moe_ft.engine.boundary.logs import RANK, TRAFFIC, open_log, sends_of, small_log
from tests.unit.simulation.simulated import Simulated

SHAPE = TRAFFIC.shape
RECEIVED = torch.full(SHAPE, 7.0)


class _Wire:
    """Stands for the network: notes what is asked of it, and answers every receive with one tensor."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def communicate(self, link: P2PCommunicator, **given: Any) -> Any:
        self.calls.append(given)
        requests = None if given.get("wait_on_reqs", True) else {"live": object()}
        return (
            RECEIVED if given["recv_prev"] else None,
            RECEIVED if given["recv_next"] else None,
            requests,
        )


@pytest.fixture
def wire() -> Iterator[_Wire]:
    """Put it below the taps."""
    found = _Wire()
    with Patches() as patches:

        def communicate(link: P2PCommunicator, **given: Any) -> Any:
            return found.communicate(link, **given)

        patches.set(P2PCommunicator, "_communicate", communicate)
        patches.set(torch.cuda, "current_device", lambda: "cpu")
        yield found


def link_of(previous: int, following: int, **settings: Any) -> P2PCommunicator:
    """Return the links of a rank."""
    link = P2PCommunicator.__new__(P2PCommunicator)
    link.prev_rank, link.next_rank = previous, following
    common = {"variable_seq_lengths": False, "mtp_standalone": False, "timers": None}
    link.config = Namespace(**{**common, "pipeline_dtype": torch.bfloat16, **settings})
    return link


@pytest.fixture
def player(tmp_path: Path) -> BoundaryPlayer:
    """Return a player for rank 2, the last stage: rank 1 has a log of iteration 0."""
    with small_log(tmp_path) as log:
        log.take(0)
    player = BoundaryPlayer(2, {RANK: open_log(tmp_path)[0]})
    player.begin(0)
    return player


def test_sends_in_both_directions_are_recorded_before_they_are_sent(wire: _Wire) -> None:
    link, found = link_of(0, 2), []
    forward, backward = torch.ones(1), torch.zeros(1)

    def record(neighbour: int, direction: Direction, tensor: torch.Tensor) -> None:
        assert len(wire.calls) == 0
        found.append((neighbour, direction, tensor))

    with recording(record):
        link.send_forward_backward_recv_forward_backward(
            forward, backward, recv_prev=True, recv_next=False, tensor_shape=SHAPE
        )
    assert found == [(0, Direction.BACKWARD, backward), (2, Direction.FORWARD, forward)]
    assert wire.calls[0]["tensor_send_next"] is forward


def test_receives_alone_are_not_recorded_and_nothing_is_after_the_tap(wire: _Wire) -> None:
    link, found = link_of(0, 2), []
    with recording(lambda *sent: found.append(sent)):
        link.recv_forward(SHAPE, is_first_stage=False)
        link.send_forward(torch.ones(1), is_last_stage=True)
    link.send_forward(torch.ones(1), is_last_stage=False)
    assert not found
    assert len(wire.calls) == 2


def test_receives_are_played_and_sends_swallowed(wire: _Wire, player: BoundaryPlayer) -> None:
    link = link_of(RANK, 0)
    with playing(player):
        first = link.recv_forward(SHAPE, is_first_stage=False)
        second = link.send_backward_recv_forward(torch.ones(1), SHAPE, is_first_stage=False)
    expected = [tensor for _, _, tensor in sends_of(0)]
    assert first.equal(expected[0]) and second.equal(expected[1])
    assert first.requires_grad and first.is_leaf
    assert not wire.calls


def test_link_to_a_neighbour_without_a_log_stays_live(wire: _Wire, player: BoundaryPlayer) -> None:
    link, activation = link_of(RANK, 3), torch.ones(1)
    with playing(player):
        received, gradient = link.send_forward_backward_recv_forward_backward(
            activation, torch.zeros(1), recv_prev=True, recv_next=True, tensor_shape=SHAPE
        )
    assert received.equal(next(sends_of(0))[2])
    assert gradient is RECEIVED
    (call,) = wire.calls
    assert (call["tensor_send_next"], call["recv_next"]) == (activation, True)
    assert (call["tensor_send_prev"], call["recv_prev"]) == (None, False)


def test_overlapped_communication_gets_handles_for_all_that_it_asked_for(
    wire: _Wire, player: BoundaryPlayer
) -> None:
    with playing(player):
        received, handles = link_of(RANK, 0).send_forward_recv_forward(
            None, recv_prev=True, tensor_shape=SHAPE, overlap_p2p_comm=True
        )
        assert received is not None and set(handles) == {"recv_prev"}
        handles["recv_prev"].wait()
        _, handles = link_of(RANK, 3).send_forward_recv_forward(
            torch.ones(1), recv_prev=True, tensor_shape=SHAPE, overlap_p2p_comm=True
        )
        assert set(handles) == {"recv_prev", "live"}
        _, handles = link_of(RANK, 0).send_backward_recv_backward(
            torch.ones(1), recv_next=False, tensor_shape=SHAPE, overlap_p2p_comm=True
        )
        assert set(handles) == {"send_prev"}


def test_shape_of_variable_lengths_comes_from_the_log(wire: _Wire, player: BoundaryPlayer) -> None:
    link = link_of(RANK, 0, variable_seq_lengths=True)
    with playing(player):
        assert tuple(link.recv_forward((1,), is_first_stage=False).shape) == SHAPE
    assert not wire.calls


def test_links_are_open_when_all_ranks_of_the_pipeline_have_used_its_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    with Simulated() as world, Patches() as patches:
        dist = collectives.Distributed()
        patches.set(module, "dist", dist)

        def act(rank: int) -> None:
            groups: list[Any] = [dist.new_group([2, 0]), dist.new_group([3, 1])]
            world.kernel.sleep(20.0 * rank)
            open_links(groups[rank % 2])
            world.say(rank)

        for rank in range(4):
            world.rank(lambda rank=rank: act(rank), rank, 4)
        world.run()
    found = {rank: round(now) for now, rank in world.trace}
    assert found == {0: 40, 1: 60, 2: 40, 3: 60}


class _Clock:
    """A device's time, which goes on by one second at each look."""

    def __init__(self) -> None:
        self.now_s, self.reached_s = 0.0, float("inf")

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def event(self, *, enable_timing: bool) -> Any:
        """Return an event that is recorded at the next look."""
        assert enable_timing
        found = Namespace(at_s=0.0)
        found.record = lambda: setattr(found, "at_s", self())
        found.query = lambda: found.at_s <= self.reached_s
        found.elapsed_time = lambda end: 1e3 * (end.at_s - found.at_s)
        return found


def ask(link: P2PCommunicator, **given: Any) -> Any:
    sends = dict.fromkeys(("tensor_send_next", "tensor_send_prev"))
    receives = dict.fromkeys(("recv_prev", "recv_next"), False)
    return link._communicate(**{**sends, **receives, "tensor_shape": SHAPE, **given})


@pytest.fixture(params=["cpu", "gpu"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> _Clock:
    found = _Clock()
    monkeypatch.setattr(module, "_has_device_time", lambda: request.param == "gpu")
    monkeypatch.setattr(time, "perf_counter", found)
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    return found


def test_waits_for_receives_and_for_the_gradients_of_all_ranks_are_idle_time(
    wire: _Wire, clock: _Clock
) -> None:
    idle, link = IdleTime(), link_of(0, 2)
    config = Namespace(finalize_model_grads_func=lambda model: f"{model} done")
    for _ in range(2):  # each iteration has its own
        with idle.timing(config, 0):
            ask(link, recv_prev=True)
            ask(link, tensor_send_next=RECEIVED)
            assert config.finalize_model_grads_func("model") == "model done"
        assert idle.seconds() == 2.0
    ask(link, recv_prev=True)
    assert idle.seconds() == 2.0, "not outside of iterations"


def test_collectives_of_layers_are_exchanges_and_those_that_finish_gradients_are_not(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("all_to_all_single", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, lambda *_, **__: "done")
    monkeypatch.setattr(mappings, "dist_all_gather_func", lambda *_, **__: "done")
    captured = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured[0])
    idle = IdleTime()
    config = Namespace(finalize_model_grads_func=lambda _: torch.distributed.all_reduce(RECEIVED))
    for iteration in (8, 9):
        with idle.timing(config, iteration):
            assert torch.distributed.all_to_all_single(RECEIVED, RECEIVED) == "done"
            mappings.dist_all_gather_func(RECEIVED, RECEIVED)
            torch.distributed.all_reduce(RECEIVED, async_op=True)
            config.finalize_model_grads_func("model")
        assert idle.seconds() == 1.0
        is_timed = iteration == 8 or not module._has_device_time()
        assert idle.exchange_seconds() == (2.0 if is_timed else None)
    captured[0] = True  # into a CUDA graph, which takes no times
    with idle.timing(config, 16):
        torch.distributed.all_to_all_single(RECEIVED, RECEIVED)
    assert idle.exchange_seconds() == (0.0 if module._has_device_time() else 1.0)


def test_receive_that_is_waited_for_later_is_timed_where_that_is(
    wire: _Wire, clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Namespace(wait=lambda: "it is there")
    monkeypatch.setattr(
        wire, "communicate", lambda *_, **__: (RECEIVED, None, {"recv_prev": answer})
    )
    idle = IdleTime()
    with idle.timing(Namespace(finalize_model_grads_func=None), 0):
        _, _, requests = ask(link_of(0, 2), recv_prev=True, wait_on_reqs=False)
        assert idle.seconds() == 1.0
        assert requests["recv_prev"].wait() == "it is there"
    assert idle.seconds() == 2.0


def test_device_that_is_not_that_far_has_no_idle_time_yet(wire: _Wire, clock: _Clock) -> None:
    idle, clock.reached_s = IdleTime(), 1.0
    with idle.timing(Namespace(finalize_model_grads_func=None), 0):
        ask(link_of(0, 2), recv_next=True)
    assert idle.seconds() == (None if module._has_device_time() else 1.0)
