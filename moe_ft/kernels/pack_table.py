"""Segments that are packed together: by kernels on a GPU, by the reference elsewhere."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moe_ft.kernels.packing import Segment, pack_by_reference, unpack_by_reference

if TYPE_CHECKING:
    from moe_ft.kernels.triton_packing import KernelTable


class PackTable:
    """Segments that are packed and unpacked together, any number of times.

    The table keeps the tensors; replacing one of them requires another table.
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
            ``[segment]`` int64, on the same device: the number of weights that were not rounded from their
            masters, which then cannot be restored. On a GPU packing continues after the return.
        """
        if not self._is_on_gpu:
            return pack_by_reference(self.segments, buffer)
        return self._kernel_table().pack(buffer)

    def unpack(self, buffer: torch.Tensor) -> None:
        """Unpack all tensors; on a GPU this continues after the return."""
        if self._is_on_gpu:
            self._kernel_table().unpack(buffer)
        else:
            unpack_by_reference(self.segments, buffer)

    def _kernel_table(self) -> "KernelTable":
        if self._on_device is None:
            from moe_ft.kernels.triton_packing import KernelTable  # noqa: PLC0415 - Triton comes with GPUs

            self._on_device = KernelTable(self.segments)
        return self._on_device
