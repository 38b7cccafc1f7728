"""Items of a conversion: tensors of the model in the kinds and types that are asked for; shards of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from moe_ft.config.stock_defects import SHIFTED_MASTERS, SHIFTED_REMEDY
from moe_ft.convert.model import Model
from moe_ft.convert.tensors import KINDS, GlobalTensor
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.format.packings import DTYPE_BYTES
from moe_ft.state.slices import DTYPES

# Choices of --dtype, with safetensors' names.
WEIGHT_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED = 1 << 22  # elements at a time, which copies are made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One tensor in one kind.

    Attributes:
        dtype: safetensors' name of the type to write.
    """

    tensor: GlobalTensor
    kind: str
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in the destination, without what its format adds."""
        return self.tensor.numel * DTYPE_BYTES[self.dtype]

    def read(self, model: Model) -> torch.Tensor:
        """Return the tensor in the type to write.

        Raises:
            CorruptStateError: if it is a master of which the weight is not the rounded value.
        """
        kind = self.kind
        has_more = "master" in self.tensor.iterations and self.tensor.dtype != "F32"
        if self.dtype == "F32" and kind == "weight" and has_more:
            kind = "master"  # all bits, where they are asked for
        found = model.read(self.tensor, kind)
        if kind == "master" and self.tensor.has_own_weight:
            _check_master(model.place, self.tensor.name, found, model.read(self.tensor, "weight"))
        return found.to(DTYPES[self.dtype]).contiguous()


def _check_master(place: str, name: str, master: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise CorruptStateError unless a master, rounded as optimizers do, is the weight bit for bit."""
    bits = _BITS[weight.element_size()]
    num = 0
    for part, expected in zip(
        master.flatten().split(_COMPARED), weight.flatten().split(_COMPARED), strict=True
    ):
        rounded = part.to(weight.dtype)
        differ = rounded.view(bits) != expected.view(bits)
        # Devices round what is not a number to others of its many forms.
        num += int((differ & ~(rounded.isnan() & expected.isnan())).sum())
    if num:
        raise CorruptStateError(
            f"{place}: the fp32 master of {name} is not its weight, in {num} of {weight.numel()} elements "
            f"after rounding to {weight.dtype}. {SHIFTED_MASTERS}; its moments are then wrong too. Convert "
            "the weights alone, which are right (leave out --dtype fp32, give --what weights); for masters, "
            f"{SHIFTED_REMEDY}."
        )


Shards = Sequence[Sequence[Item]]


def list_items(
    tensors: Iterable[GlobalTensor], *, with_optimizer: bool, dtype: str | None
) -> list[Item]:
    """Return the items of a conversion.

    Args:
        with_optimizer: whether masters and moments are converted too.
        dtype: one of WEIGHT_DTYPES for weights of numbers with a point, None for their own types.

    Raises:
        ConfigError: if a tensor that is trained has no moments.
    """
    found = []
    for tensor in tensors:
        own = tensor.dtype
        is_converted = dtype is not None and not tensor.buffer
        found.append(
            Item(
                tensor=tensor,
                kind="weight",
                dtype=WEIGHT_DTYPES[dtype] if is_converted and dtype is not None else own,
            )
        )
        if with_optimizer:
            found += _optimizer_items(tensor)
    return found


def _optimizer_items(tensor: GlobalTensor) -> list[Item]:
    kinds = [kind for kind in KINDS if kind != "weight" and kind in tensor.iterations]
    saved = {kind for block in tensor.blocks for kind in block.slices} - {"weight"}
    if absent := sorted(saved - set(kinds)):
        raise ConfigError(
            f"--what=all needs {absent[0]} of {tensor.name}, which did not exist yet when it was saved. "
            "Convert a checkpoint after the first step of the optimizer, or give --what weights."
        )
    return [
        Item(tensor=tensor, kind=kind, dtype=tensor.blocks[0].slices[kind][0].entry.dtype)
        for kind in kinds
    ]


def into_shards(items: Iterable[Item], shard_bytes: int) -> list[list[Item]]:
    """Return items in shards of at most some bytes; an item that is larger is a shard of its own."""
    shards: list[list[Item]] = []
    room = 0
    for item in items:
        if not shards or item.num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(item)
        room -= item.num_bytes
    return shards
