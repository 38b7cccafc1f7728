"""The script with its own data, of which one sample cannot be read: `--bad-sample INDEX`."""

import sys
from typing import Any

import pretrain_own
import torch
from pretrain_own import Sums

at = sys.argv.index("--bad-sample")
bad_sample = int(sys.argv[at + 1])
del sys.argv[at : at + 2]
read = Sums.__getitem__


def read_or_raise(self: Sums, index: int) -> dict[str, torch.Tensor]:
    if index == bad_sample:
        raise ValueError(f"sample {index} is damaged")
    found: dict[str, torch.Tensor] = read(self, index)
    return found


data: Any = Sums
data.__getitem__ = read_or_raise
if __name__ == "__main__":
    pretrain_own.main()
