"""Copies of tensors that are sent, into host memory, ordered before Megatron frees them.

A schedule frees an activation right after it was sent. From a GPU the copy runs on a stream of its own: it
begins when the tensor is ready, and the allocator does not give the memory away before it has ended.
"""

import torch


class SendCopier:
    """Copies tensors into host memory. Owned by the training thread."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensor: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a tensor; from a GPU, only begin to, and leave the tensor free to be freed.

        Args:
            tensor: of any type.
            target: ``[bytes]`` in host memory, pinned if the tensor is on a GPU.
        """
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if not source.is_cuda:
            target.copy_(source)
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(source.device)
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self._stream)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all copies so far; None if they have ended already."""
        return None if self._stream is None else self._stream.record_event()
