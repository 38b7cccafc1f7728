"""Exact sums of the bits of tensors: one that has changed, or moved to another row, changes the sum.

The bytes of a tensor are added as integers of 64 bits, modulo 2^64, with an odd weight for each row. So the
sum is the same on every device and for every place in memory, and any one flipped bit changes it.
"""

import torch

_ROW = 512  # words of 8 bytes
_BLOCK_BYTES = 1 << 25  # what is copied at a time, where words are not aligned
MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # odd: no bit is lost by a product
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor's bits, an int64 without dimensions on its device. Waits for no GPU."""
    raw = tensor.detach()
    if raw.is_complex():
        raw = torch.view_as_real(raw)
    flat, size = raw.contiguous().view(-1), raw.element_size()
    whole = flat.numel() // (8 // size) * (8 // size)
    total = flat[whole:].view(WORDS[size]).sum(dtype=torch.int64)
    for block in flat[:whole].split(_BLOCK_BYTES // size):
        is_aligned = block.storage_offset() * size % 8 == 0
        words = (block if is_aligned else block.clone()).view(torch.int64)
        total = total * MIX + _sum_of_rows(words)
    return total


def _sum_of_rows(words: torch.Tensor) -> torch.Tensor:
    whole = words.numel() // _ROW * _ROW
    if not whole:
        return -words.sum()
    rows = words[:whole].view(-1, _ROW).sum(1)
    weights = 2 * torch.arange(len(rows), device=words.device) + 1
    return (rows * weights).sum() - words[whole:].sum()
