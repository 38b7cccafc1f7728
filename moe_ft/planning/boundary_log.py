"""Size of the boundary log: the bytes that a rank sends to other pipeline stages, and how many are kept.

The log holds every tensor that crosses a stage boundary, at its sender, so that one stage can run its
iterations again while the others keep their state. engine/boundary/ keeps it. Source: MoEvement, section 3.4.
"""

import math
from dataclasses import dataclass

from moe_ft.arithmetic import round_up
from moe_ft.format.packings import ALIGNMENT_BYTES

_HEADER_ALIGNMENT_BYTES = 4096
# A tensor in the header of a safetensors file, with its name, and the gap behind it.
_TENSOR_HEADER_BYTES = 320
_FILE_HEADER_BYTES = 128
_INDEX_BYTES = 32 << 10  # without the tensors, each of which takes as much as in the header
_SPARE_ITERATIONS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTraffic:
    """Tensors that a pipeline schedule sends in one iteration. All of them have one shape.

    Attributes:
        num_chunks: model chunks of each of them: 1, or the virtual stages of the interleaved schedule.
        num_microbatches: the most of an iteration, for each data-parallel rank.
        shape: ``(sequence, micro-batch, hidden)`` on one rank: context and sequence parallelism divide the
            first.
        element_bytes: of the type that is sent.
    """

    num_stages: int
    num_chunks: int
    num_microbatches: int
    shape: tuple[int, int, int]
    element_bytes: int

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self.shape) * self.element_bytes

    def num_sends(self, stage: int) -> int:
        """Return the tensors that a rank of a stage sends.

        Each of its chunks sends an activation and a gradient for every micro-batch, but the model's last
        chunk sends no activation and its first one no gradient.
        """
        num_ends = (stage == 0) + (stage == self.num_stages - 1)
        return (2 * self.num_chunks - num_ends) * self.num_microbatches

    def sent_bytes(self, stage: int) -> int:
        """Return the bytes that a rank of a stage sends."""
        return self.num_sends(stage) * self.tensor_bytes

    def slot_bytes(self, stage: int) -> int:
        """Return the bytes of a file that holds what a rank of a stage sends."""
        sends = self.num_sends(stage)
        return header_bytes(sends) + sends * round_up(self.tensor_bytes, ALIGNMENT_BYTES)


def header_bytes(num_sends: int) -> int:
    """Return the bytes that are kept for the header of a file with so many tensors."""
    return round_up(_FILE_HEADER_BYTES + num_sends * _TENSOR_HEADER_BYTES, _HEADER_ALIGNMENT_BYTES)


def index_bytes(num_sends: int) -> int:
    """Return the most bytes that the index of such a file takes."""
    return _INDEX_BYTES + header_bytes(num_sends)


def num_slots(longest_window: int, interval: int) -> int:
    """Return the iterations whose log is kept, one in each slot.

    A replay begins with the first snapshot of the newest complete window, and the next window is complete at
    the earliest one iteration after its last snapshot. A recovery by some stages alone rests on all these
    logs until a window after it is complete, whose own logs are needed besides. One slot more is for a window
    that comes late.
    """
    return 3 * longest_window - 1 + interval + _SPARE_ITERATIONS


def log_bytes(traffic: PipelineTraffic, stage: int, *, longest_window: int, interval: int) -> int:
    """Return the bytes of host memory that the log of a rank takes."""
    slot_bytes = traffic.slot_bytes(stage) + index_bytes(traffic.num_sends(stage))
    return num_slots(longest_window, interval) * slot_bytes


def most_log_bytes(traffic: PipelineTraffic, *, longest_window: int, interval: int) -> int:
    """Return the bytes of the log of the rank that has the largest one."""
    return max(
        log_bytes(traffic, stage, longest_window=longest_window, interval=interval)
        for stage in range(traffic.num_stages)
    )
