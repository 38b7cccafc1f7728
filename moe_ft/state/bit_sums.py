"""Exact sums of the bits of tensors: one that has changed, or moved to another row, changes the sum.

The words of a tensor are added as integers, modulo 2^64, with an odd weight for each row. So the sum has no
order, is the same on every device, and any one flipped bit changes it.
"""

import torch

_ROW = 4096  # words
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, an int64 without dimensions on its device. Waits for no GPU."""
    raw = tensor.detach()
    if raw.is_complex():
        raw = torch.view_as_real(raw)
    words = raw.contiguous().view(-1).view(_WORDS[raw.element_size()])
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    weights = 2 * torch.arange(len(rows), device=words.device) + 1
    return (rows * weights).sum() - words[whole:].sum(dtype=torch.int64)
