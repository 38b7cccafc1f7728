"""Eight booleans in a byte, the lowest bit first."""

import torch


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """Return ``[ceil(n / 8)]`` uint8 of ``[n]`` booleans; bits beyond the last are 0."""
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8))
    return (padded.view(-1, 8) << _places(flags)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the ``[count]`` booleans that `pack_bits` was given."""
    bits = (packed[:, None] >> _places(packed)) & 1
    return bits.view(-1)[:count].to(torch.bool)


def _places(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)
