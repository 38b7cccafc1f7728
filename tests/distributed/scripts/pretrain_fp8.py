"""pretrain_gpt_moe.py with FP8 parameters, of stand-ins for Transformer Engine (tests/fp8_training.py)."""

import sys

from tests.fp8_training import train_with_fp8_parameters

if __name__ == "__main__":
    train_with_fp8_parameters(sys.argv[1:])
