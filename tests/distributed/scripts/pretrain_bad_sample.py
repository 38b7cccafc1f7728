"""The script with its own data, of which one sample cannot be read: `--bad-sample INDEX`."""

import sys

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
    return read(self, index)


Sums.__getitem__ = read_or_raise  # type: ignore[method-assign]
if __name__ == "__main__":
    pretrain_own.main()
