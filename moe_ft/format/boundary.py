"""The index of a boundary log: the tensors that a rank has sent to other pipeline stages in one iteration.

The tensors are in a data file next to it, a valid safetensors file; the encoding is that of
format/encoding.py. State is described by format/index.py.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, override

import msgspec

from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import Body, Checksum, check_path, decodable
from moe_ft.format.packings import DTYPE_BYTES
from moe_ft.format.records import Count, JobNumbers


class Direction(StrEnum):
    """Directions in which tensors cross a stage boundary."""

    FORWARD = "forward"  # activations, to the next stage
    BACKWARD = "backward"  # gradients, to the previous one


class SentTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor that was sent.

    Attributes:
        neighbour: global rank that receives it.
        direction: the same rank may be both neighbours, so this belongs to the key.
        ordinal: how many were sent before it in this iteration, to this rank in this direction; also how many
            that rank has received before it.
        dtype: as safetensors names it.
        offset: in bytes, from the start of the data file.
    """

    neighbour: Count
    direction: Direction
    ordinal: Count
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    dtype: str
    offset: Count
    checksum: Checksum

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def name(self) -> str:
        """Name of the tensor in the data file."""
        return f"{self.direction}/to_{self.neighbour:05d}/{self.ordinal}"


@decodable
class BoundaryIndex(Body, frozen=True, forbid_unknown_fields=True):
    """Description of one data file of a boundary log.

    Attributes:
        rank: global rank that has sent the tensors.
        iteration: the one that ran: it made the state of the next number.
        header_bytes, header_checksum: of the safetensors header, with its length field and padding.
        sent: in the order in which they were sent.
        numbers: of the state that the iteration began with; unset if they were not known, as in the first
            iteration of a start.
        record_settings: settings, by flag, whose effects are in records: learning rates, loss scales, which
            states are evaluated.
    """

    rank: Count
    node: str
    iteration: Count
    file: str
    file_bytes: Count
    header_bytes: Count
    header_checksum: Checksum
    sent: tuple[SentTensor, ...]
    numbers: JobNumbers | msgspec.UnsetType = msgspec.UNSET
    record_settings: dict[str, Any] = {}

    @override
    def check(self, where: str) -> None:
        super().check(where)
        check_path(self.file, where)
        keys = set()
        for each in self.sent:
            keys.add((each.neighbour, each.direction, each.ordinal))
            if each.dtype not in DTYPE_BYTES:
                raise CorruptStateError(f"{where}: {each.name} has the unknown type {each.dtype}")
            if not self.header_bytes <= each.offset <= self.file_bytes - each.num_bytes:
                raise CorruptStateError(f"{where}: {each.name} lies outside its file")
        if "/" in self.file or len(keys) < len(self.sent):
            raise CorruptStateError(
                f"{where} names a file elsewhere, or a tensor twice: it is not a boundary log"
            )
