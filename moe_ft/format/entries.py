"""Entries of indexes and manifests: unit versions, their tensors, parameters, and files."""

from collections.abc import Iterable
from typing import Annotated

import msgspec

from moe_ft.format.encoding import Checksum, check_path
from moe_ft.format.packings import DTYPE_BYTES, PackedPiece, Packing, pieces
from moe_ft.format.records import Count, Gaps

UNCUT = "whole."  # begins the keys of tensors whose range is their own, not that of a parameter
FROZEN = "frozen"  # among the origins: all parameters that are not trained

LevelName = Annotated[str, msgspec.Meta(pattern="^(full|compute)$")]
_DType = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(DTYPE_BYTES)})$")]
_Packing = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(Packing)})$")]


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor of a unit version: a flat range of one parameter's weight, master or moment.

    Attributes:
        key: "param" (fp32 master), "weight" (the one that forward uses) or the optimizer's own name, after
            `UNCUT` if the optimizer's tensor has another shape than the parameter.
        start, end: flat range in the parameter as this rank holds it, or in a tensor of another shape, in
            elements.
        dtype: safetensors' name of the type that the live tensor has.
        offset: in bytes, from the start of the unit.
        is_absent: the tensor did not exist yet; its bytes mean nothing.
        packing: how the file keeps its numbers.
    """

    parameter: str
    key: str
    start: Count
    end: Count
    dtype: _DType
    offset: Count
    is_absent: bool = False
    packing: _Packing = Packing.EXACT.value


class UnitEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One unit version in a data file.

    Attributes:
        offset: in bytes, from the start of the file.
        checksum: XXH3-64 of its num_bytes bytes.
        incarnation: number of the start whose processes saved it.
        file: the data file: on storage relative to the persist directory, in memory a name in the directory
            of the index; empty for the index's own file.
        routed_tokens: number of tokens that an expert has received so far.
        gaps: ranges of an expert's tokens whose updates recoveries have dropped.
        num_repeated: optimizer steps that a peer has made with other rounding since it got state; unset if
            none, since earlier versions refuse it.
    """

    offset: Count
    num_bytes: Count
    iteration: Count
    level: LevelName
    checksum: Checksum
    tensors: tuple[TensorEntry, ...]
    incarnation: Count = 0
    file: str = ""
    routed_tokens: Count = 0
    gaps: Gaps = ()
    num_repeated: Annotated[int, msgspec.Meta(ge=1)] | msgspec.UnsetType = msgspec.UNSET

    @property
    def version(self) -> tuple[int, int]:
        """Order among the versions of one unit; later versions are greater."""
        return self.incarnation, self.iteration


class EntryPlace(msgspec.Struct, frozen=True):
    """The part of a unit version's entry that says where it lies; see `UnitEntry`."""

    offset: Count
    num_bytes: Count
    checksum: Checksum
    file: str = ""


class EntryHead(msgspec.Struct, frozen=True):
    """The part of a unit version's entry that says which one it is, and in which file; see `UnitEntry`."""

    iteration: Count
    level: LevelName
    file: str = ""


class GlobalPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Place of a block of a rank's tensor in a tensor of the whole model.

    Attributes:
        key: of the model's tensor in Megatron's checkpoints, with global numbers of layers.
        shape: of the model's tensor; that of experts has the experts of its layer as first dimension.
        offset: of the block in it.
        start, extent: corner and lengths of the block in the rank's tensor.
    """

    key: str
    shape: tuple[Count, ...]
    offset: tuple[Count, ...]
    start: tuple[Count, ...]
    extent: tuple[Count, ...]


class ParameterEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a parameter for ranks that divide the model differently.

    Attributes:
        shape: as this rank holds it.
        tp_dim: dimension that tensor parallelism divides, -1 if none.
        tp_size, tp_rank: number of pieces, and the position of this one.
        num_halves: 2 if two matrices are stacked (SwiGLU's gate and up) and each is divided separately.
        dtype: safetensors' name of the type of the weight that forward uses; unset in earlier versions.
        places: of its blocks in the tensors of the model; unset in earlier versions.
    """

    shape: tuple[Count, ...]
    tp_dim: int = -1
    tp_size: int = 1
    tp_rank: int = 0
    num_halves: int = 1
    dtype: str | msgspec.UnsetType = msgspec.UNSET
    places: tuple[GlobalPlace, ...] | msgspec.UnsetType = msgspec.UNSET


class ModelPlaces(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rest of what Megatron's checkpoints hold of a rank's model, besides its parameters.

    Attributes:
        buffers: places, in the tensors of the model, of buffers, by their names in records.
        objects: keys of objects that are no tensors, such as FP8 states of modules; here they are empty.
        problem: reason for which Megatron could not describe the model; empty if it did.
    """

    buffers: dict[str, tuple[GlobalPlace, ...]] = {}
    objects: tuple[str, ...] = ()
    problem: str = ""


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's files of a checkpoint on storage; paths are relative to the persist directory."""

    rank: Count
    index: str
    index_checksum: Checksum
    data: str
    num_bytes: Count

    def check_paths(self, where: str) -> None:
        """Raise CorruptStateError if a path leaves the persist directory."""
        check_path(self.index, where)
        check_path(self.data, where)


def tensor_pieces(tensor: TensorEntry) -> tuple[PackedPiece, ...]:
    """Return the parts of a tensor in its file; their offsets count from the start of the tensor."""
    return pieces(tensor.dtype, tensor.end - tensor.start, Packing(tensor.packing))


def tensor_bytes(tensor: TensorEntry) -> int:
    """Return the size of one tensor in its file, in bytes."""
    last = tensor_pieces(tensor)[-1]
    return last.offset + last.num_bytes


def lossy_packings(units: Iterable[UnitEntry]) -> dict[str, str]:
    """Return how tensors are kept that have not their own bits, by their key ("param", "exp_avg", ...).

    If units have different packings for one key, all are named, and also that a peer has repeated steps.
    """
    found: dict[str, set[str]] = {}
    for unit in units:
        for tensor in unit.tensors:
            if Packing(tensor.packing).is_lossy and not tensor.is_absent:
                found.setdefault(tensor.key, set()).add(tensor.packing)
            if unit.num_repeated and not tensor.is_absent:
                found.setdefault(tensor.key, set()).add("what a peer computed")
    return {key: " or ".join(sorted(names)) for key, names in sorted(found.items())}
