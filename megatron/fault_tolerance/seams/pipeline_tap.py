"""Taps on the pipeline's links: they record what a rank sends, play what it would receive, and time waits.

Before some ranks of a pipeline use live links without the others, all of them open the links together.

All schedules of Megatron (1F1B, interleaved, with and without overlap) move tensors between stages in
`P2PCommunicator._communicate`, which is wrapped here. The logs themselves are moe_ft/engine/boundary/.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.seams.collectives import EndedWork
from megatron.fault_tolerance.seams.stack import COLLECTIVES, FINALIZE, Layer, Layers
from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.format.boundary import Direction
from moe_ft.loop.training_loop import RecordSend

_Communicate = Callable[..., Any]
_COMMUNICATE = "P2PCommunicator._communicate"
_EXCHANGES = (*COLLECTIVES, "dist_all_gather_func", "dist_reduce_scatter_func")
# Iterations of which one has its exchanges timed on a GPU: two events for each cost the host microseconds,
# and layers with experts have thousands.
_EXCHANGES_EVERY = 8


def open_links(group: dist.ProcessGroup) -> None:
    """Use the group of a pipeline once. Called by all its ranks, before some of them use it alone.

    NCCL makes a communicator in the first call of a group, which takes all its ranks; the batched transfers
    of a replay reach only some.
    """
    dist.all_reduce(torch.ones(1, device=torch.cuda.current_device()), group=group)


@contextmanager
def recording(record: RecordSend) -> Iterator[None]:
    """Have every tensor recorded that this process sends to another pipeline stage."""

    def communicate(original: _Communicate, link: P2PCommunicator, **given: Any) -> Any:
        for name, neighbour, direction in _sends(link):
            if given[name] is not None:
                record(neighbour, direction, given[name])
        return original(link, **given)

    with Layers().put(Layer.LOG, {_COMMUNICATE: communicate}):
        yield


@contextmanager
def playing(player: BoundaryPlayer) -> Iterator[None]:
    """Have receives answered from logs: what would be sent to a rank with a log goes nowhere.

    Links to neighbours without a log stay live.
    """
    with Layers().put(Layer.REPLAY, {_COMMUNICATE: partial(_play, player)}):
        yield


class IdleTime:
    """Time of an iteration in which a rank waits for others. Owned by the training thread.

    That is for what it receives in the pipeline, and for what finishes the gradients after the last backward
    pass (`finalize_model_grads`). Exchanges are all other collectives that the thread or the stream waits
    for: in layers with experts or tensor parallelism, and around the optimizer's step. On a GPU events on
    the current stream tell both, and nothing waits for them.
    """

    def __init__(self) -> None:
        self._waits: list[tuple[Any, Any]] = []
        self._exchanges: list[tuple[Any, Any]] | None = None
        self._is_waiting = False

    @contextmanager
    def timing(self, config: Any, iteration: int) -> Iterator[None]:
        """Take the times of an iteration; on a GPU those of exchanges only now and then.

        Args:
            config: of the model, whose function that finishes gradients is wrapped meanwhile.
        """
        self._waits = []
        self._exchanges = None
        received = {_COMMUNICATE: self._communicate, "recv": self._run}
        with Layers().put(Layer.IDLE, received) as layers:
            if config.finalize_model_grads_func is not None:
                layers.put(Layer.IDLE, {FINALIZE: self._run}, of=config)
            if not _has_device_time() or iteration % _EXCHANGES_EVERY == 0:
                self._exchanges = []
                layers.put(Layer.IDLE, dict.fromkeys(_EXCHANGES, self._exchange))
            yield

    def seconds(self) -> float | None:
        """Return the sum of an iteration that has ended; None if the device is not that far."""
        return _sum_s(self._waits)

    def exchange_seconds(self) -> float | None:
        """Return the same of exchanges; None also where they were not timed."""
        return None if self._exchanges is None else _sum_s(self._exchanges)

    def _communicate(self, original: _Communicate, link: P2PCommunicator, **given: Any) -> Any:
        if not (given["recv_prev"] or given["recv_next"]):
            return original(link, **given)
        *received, requests = self._run(original, link, **given)
        if isinstance(requests, dict):  # with --overlap-p2p-communication it waits for them later
            requests = {name: _Timed(each, self._run) for name, each in requests.items()}
        return *received, requests

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        begin, self._is_waiting = _now(), True
        try:
            return original(*args, **kwargs)
        finally:
            self._is_waiting = False
            self._waits.append((begin, _now()))

    def _exchange(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (
            kwargs.get("async_op")  # somebody waits for it later
            or self._is_waiting
            or self._exchanges is None
            or _is_captured()
        ):
            return original(*args, **kwargs)
        begin = _now()
        try:
            return original(*args, **kwargs)
        finally:
            self._exchanges.append((begin, _now()))


class _Timed:
    """Handle of a transfer whose wait is timed."""

    def __init__(self, request: Any, run: Callable[..., Any]) -> None:
        self._request = request
        self._run = run

    def wait(self) -> Any:
        """Wait for the transfer."""
        return self._run(lambda: self._request.wait())  # a frame shows that this waits


def _has_device_time() -> bool:
    return torch.cuda.is_available() and not cpu_device.is_active()


def _is_captured() -> bool:
    """Return whether the stream is captured into a graph, whose events have no times."""
    return _has_device_time() and torch.cuda.is_current_stream_capturing()


def _sum_s(spans: Sequence[tuple[Any, Any]]) -> float | None:
    if not _has_device_time():
        return float(sum(end - begin for begin, end in spans))
    if not all(end.query() for _, end in spans):
        return None
    return float(sum(begin.elapsed_time(end) for begin, end in spans)) / 1e3


def _now() -> Any:
    """Return the time, or an event that will know when the current stream came here."""
    if not _has_device_time():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _sends(link: P2PCommunicator) -> tuple[tuple[str, int, Direction], ...]:
    """Return the arguments that are sent, each with its receiver and direction."""
    return (
        ("tensor_send_prev", link.prev_rank, Direction.BACKWARD),
        ("tensor_send_next", link.next_rank, Direction.FORWARD),
    )


def _play(
    player: BoundaryPlayer, original: _Communicate, link: P2PCommunicator, **given: Any
) -> Any:
    """Do what `_communicate` does, from logs where there are some."""
    live, handles = dict(given), {}
    for name, neighbour, _ in _sends(link):
        if given[name] is not None and player.answers_for(neighbour):
            live[name] = None
            handles[name.removeprefix("tensor_")] = EndedWork()
    played: dict[str, torch.Tensor] = {}
    for name, neighbour, direction in (
        ("recv_prev", link.prev_rank, Direction.FORWARD),
        ("recv_next", link.next_rank, Direction.BACKWARD),
    ):
        if given[name] and player.answers_for(neighbour):
            live[name], handles[name] = False, EndedWork()
            played[name] = _received(player, link, neighbour, direction, given["tensor_shape"])
    is_live = any(live[name] is not None for name, _, _ in _sends(link))
    is_live |= live["recv_prev"] or live["recv_next"]
    from_previous, from_next, requests = original(link, **live) if is_live else (None, None, None)
    if not given.get("wait_on_reqs", True):
        requests = _merged(requests, handles)
    return played.get("recv_prev", from_previous), played.get("recv_next", from_next), requests


def _received(
    player: BoundaryPlayer, link: P2PCommunicator, neighbour: int, direction: Direction, shape: Any
) -> torch.Tensor:
    config = link.config
    is_fixed = not (config.variable_seq_lengths or config.mtp_standalone)
    assert config.pipeline_dtype is not None
    tensor = player.receive(
        neighbour, direction, config.pipeline_dtype, shape if is_fixed else None
    )
    return tensor.to(torch.cuda.current_device()).requires_grad_()


def _merged(requests: Any, handles: Mapping[str, EndedWork]) -> Any:
    """Return handles for everything that was asked for, in the form in which Megatron returns its own."""
    if isinstance(requests, list):  # a ring exchange has none
        return requests
    return {**(requests or {}), **handles}
