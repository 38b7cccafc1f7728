"""Links of a simulated rank to its neighbours in the pipeline, and the schedule that runs over them.

It stands for Megatron's schedules and for megatron/fault_tolerance/seams/pipeline_tap.py, which calls the
same functions of moe_ft: a boundary log records what is sent, a player answers for other stages.
"""

from typing import Any

import torch

from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.format.boundary import Direction
from moe_ft.loop.training_loop import RecordSend
from moe_ft.planning.boundary_log import PipelineTraffic
from tests.simulation.active import World
from tests.simulation.model import CROSSING_SHAPE, NUM_MICROBATCHES, Model
from tests.simulation.shape import Shape


def traffic_of(shape: Shape) -> PipelineTraffic:
    return PipelineTraffic(
        num_stages=shape.stages,
        num_chunks=1,
        num_microbatches=NUM_MICROBATCHES,
        shape=CROSSING_SHAPE,
        element_bytes=4,
    )


class Links:
    """Links of one rank. Made by all ranks, in the order of the pipeline.

    Attributes:
        pipeline: group of the ranks that are linked.
        record: records what is sent, if that is logged.
        player: answers for some neighbours in a local replay.
    """

    def __init__(self, world: World, shape: Shape, rank: int, timeout_s: float) -> None:
        self._rank = rank
        self.record: RecordSend | None = None
        self.player: BoundaryPlayer | None = None
        groups, process = world.collectives, world.process
        ranks = range(rank % shape.width, shape.num_ranks, shape.width)
        self.pipeline = groups.new_group(process, tuple(ranks), timeout_s)
        self._previous = rank - shape.width if rank >= shape.width else None
        self._next = rank + shape.width if rank + shape.width < shape.num_ranks else None
        self._groups: dict[tuple[int, Direction], Any] = {}
        for neighbour in (self._previous, self._next):
            if neighbour is not None:
                ends = tuple(sorted((rank, neighbour)))
                for direction in Direction:
                    group = groups.new_group(process, ends, timeout_s)
                    self._groups[neighbour, direction] = group

    def run(self, model: Model) -> None:
        """Run forward and backward of all micro-batches."""
        model.begin_pass()
        for came_from, goes_to, direction in (
            (self._previous, self._next, Direction.FORWARD),
            (self._next, self._previous, Direction.BACKWARD),
        ):
            for _ in range(NUM_MICROBATCHES):
                received = self._receive(came_from, direction)
                self._send(goes_to, direction, model.compute(received))

    def _answers_for(self, neighbour: int) -> bool:
        return self.player is not None and self.player.answers_for(neighbour)

    def _send(self, neighbour: int | None, direction: Direction, content: bytes) -> None:
        if neighbour is None or self._answers_for(neighbour):
            return
        if self.record is not None:
            tensor = torch.frombuffer(bytearray(content), dtype=torch.float32)
            self.record(neighbour, direction, tensor.reshape(CROSSING_SHAPE))
        group = self._groups[neighbour, direction]
        work = group.begin("link", content, source=group.own)
        if work.error:
            raise RuntimeError(work.error)

    def _receive(self, neighbour: int | None, direction: Direction) -> bytes:
        if neighbour is None:
            return b""
        if self._answers_for(neighbour):
            assert self.player is not None
            tensor = self.player.receive(neighbour, direction, torch.float32, CROSSING_SHAPE)
            return tensor.view(torch.uint8).numpy().tobytes()
        group = self._groups[neighbour, direction]
        work = group.begin("link", None, source=1 - group.own)
        work.wait()
        content: bytes = work.values[1 - group.own]
        return content
