"""Writing one safetensors file, without a second copy of its tensors in memory.

The library's own writer makes bytes of every tensor first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from moe_ft.convert.verifying import Part, write_all
from moe_ft.engine.memory.layout import encode_header
from moe_ft.format.encoding import checksum
from moe_ft.format.packings import DTYPE_BYTES


@dataclass(frozen=True, slots=True)
class Description:
    """A tensor before it is there; its type has safetensors' name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_tensors(
    path: Path,
    described: Mapping[str, Description],
    tensors: Iterable[tuple[str, torch.Tensor]],
    metadata: Mapping[str, str],
) -> list[Part]:
    """Write a file; return its parts.

    Args:
        described: all tensors by name.
        tensors: the same, in any order; each is written before the next one is asked for.
    """
    # As the library does: what needs the largest alignment comes first.
    names = sorted(described, key=lambda name: (-DTYPE_BYTES[described[name].dtype], name))
    declared: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets, end = {}, 0
    for name in names:
        each = described[name]
        offsets[name], end = end, end + each.num_bytes
        declared[name] = {
            "dtype": each.dtype,
            "shape": list(each.shape),
            "data_offsets": [offsets[name], end],
        }
    header = encode_header(declared)
    parts = {"": Part("the header", len(header), checksum(header))}
    with path.open("wb", buffering=0) as file:
        write_all(file, memoryview(header))
        for name, tensor in tensors:
            content = content_of(tensor)
            assert len(content) == described[name].num_bytes
            parts[name] = Part(name, len(content), checksum(content))
            file.seek(len(header) + offsets[name])
            write_all(file, content)
    return [parts[name] for name in ["", *names]]


def content_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor, in place if it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
