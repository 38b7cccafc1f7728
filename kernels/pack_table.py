"""Segments that are packed together: by kernels where they are on a GPU, by the reference elsewhere."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kernels.packing import Segment, pack_by_reference, unpack_by_reference

if TYPE_CHECKING:
    from kernels.triton_packing import KernelTable


class PackTable:
    """Segments that are packed and unpacked together, again and again.

    It keeps the tensors; whoever replaces one makes another table.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Take segments, all on one device.

        Raises:
            ValueError: if one of them cannot be packed.
        """
        for segment in segments:
            segment.check()
        self.segments = tuple(segments)
        self._is_on_gpu = bool(segments) and segments[0].tensor.is_cuda
        self._on_device: KernelTable | None = None

    def pack(self, buffer: torch.Tensor) -> torch.Tensor:
        """Pack all tensors.

        Args:
            buffer: ``[n]`` uint8, on the tensors' device; on a GPU aligned to 16 bytes.

        Returns:
            ``[segment, 2]`` int64, on the same device: the bits of what `sum_segment` returns for each
            segment, and how many of its weights were not rounded from their masters, which then do not come
            back. On a GPU packing goes on after the return.
        """
        if not self._is_on_gpu:
            return pack_by_reference(self.segments, buffer)
        return self._kernel_table().pack(buffer)

    def unpack(self, buffer: torch.Tensor, *, with_sums: bool = True) -> torch.Tensor:
        """Unpack all tensors; return as `pack` does the sums of what was in the buffer.

        Lines must be filled up with zeros, as `pack` does.

        Without sums, for content that is known to be intact, they may be 0.
        """
        if not self._is_on_gpu:
            return unpack_by_reference(self.segments, buffer, with_sums=with_sums)
        return self._kernel_table().unpack(buffer)

    def _kernel_table(self) -> "KernelTable":
        if self._on_device is None:
            from kernels.triton_packing import KernelTable  # noqa: PLC0415 - Triton comes with GPUs

            self._on_device = KernelTable(self.segments)
        return self._on_device
