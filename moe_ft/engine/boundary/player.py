"""Answers to the receives of a stage that replays alone, from the boundary logs of its neighbours.

The k-th receive of an iteration from a neighbour in a direction is that neighbour's k-th send: the wire
relies on the same order. megatron/fault_tolerance/seams/pipeline_tap.py calls this instead of communicating.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from moe_ft.engine.boundary.reading import NeighbourLog
from moe_ft.errors import UnrecoverableError
from moe_ft.format.boundary import Direction, SentTensor
from moe_ft.state.slices import DTYPES, dtype_name


class BoundaryPlayer:
    """Answers the receives of one rank. Owned by the training thread."""

    def __init__(
        self,
        rank: int,
        logs: Mapping[int, NeighbourLog],
        live_from: Mapping[int, int] | None = None,
    ) -> None:
        """Take logs by global rank: of the neighbours that do not replay, to all others links are live.

        Args:
            live_from: by global rank, the iteration with which a neighbour joins the replay: from then on
                the link to it is live too.
        """
        self._rank = rank
        self._logs = logs
        self._live_from = live_from or {}
        self._iteration = -1  # before the first one
        self._received: Counter[tuple[int, Direction]] = Counter()

    def answers_for(self, neighbour: int) -> bool:
        """Return whether a neighbour's log replaces it: receives come from it, sends go nowhere."""
        live_from = self._live_from.get(neighbour)
        is_live = live_from is not None and self._iteration >= live_from
        return neighbour in self._logs and not is_live

    def begin(self, iteration: int) -> None:
        """Begin an iteration, or begin it again."""
        self._iteration = iteration
        self._received.clear()

    def receive(
        self,
        neighbour: int,
        direction: Direction,
        dtype: torch.dtype,
        shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the next tensor from a neighbour, in host memory of its own.

        Args:
            shape: None if only the sender knows it.

        Raises:
            UnrecoverableError: if the log does not have it, or has one of another shape or type.
            CorruptStateError: if it is damaged.
        """
        ordinal = self._received[neighbour, direction]
        what = self._describe(neighbour, direction, ordinal)
        logged = self._logs[neighbour].get(self._iteration)
        if logged is None:
            raise UnrecoverableError(
                f"{what} is missing: the log of rank {neighbour} does not have the iteration"
            )
        sent = logged.find(self._rank, direction, ordinal)
        if sent is None:
            raise UnrecoverableError(f"{what} is missing: the log of the iteration ends before it")
        wanted = sent.shape if shape is None else tuple(shape)
        if (wanted, dtype_name(dtype)) != (sent.shape, sent.dtype):
            raise UnrecoverableError(
                f"{what} has shape {list(sent.shape)} and type {sent.dtype} in the log, but must have "
                f"{list(wanted)} and {dtype_name(dtype)}"
            )
        self._received[neighbour, direction] += 1
        return _to_tensor(sent, logged.read(sent))

    def end(self) -> None:
        """Raise UnrecoverableError if a log has more for this rank than the iteration has asked for."""
        for neighbour, log in self._logs.items():
            logged = log.get(self._iteration) if self.answers_for(neighbour) else None
            if logged is None:
                continue
            for direction in Direction:
                ordinal = self._received[neighbour, direction]
                if ordinal < logged.num_sent(self._rank, direction):
                    raise UnrecoverableError(
                        f"{self._describe(neighbour, direction, ordinal)} was not received: the replay "
                        "differs from the iteration"
                    )

    def _describe(self, neighbour: int, direction: Direction, ordinal: int) -> str:
        return (
            f"tensor {ordinal} that rank {self._rank} receives {direction} from rank {neighbour} in "
            f"iteration {self._iteration}"
        )


def _to_tensor(sent: SentTensor, data: memoryview) -> torch.Tensor:
    if not data:
        return torch.empty(sent.shape, dtype=DTYPES[sent.dtype])
    # A copy: the log may be read-only, and autograd may write into what it is given.
    return torch.frombuffer(bytearray(data), dtype=DTYPES[sent.dtype]).reshape(sent.shape)
