"""pretrain_gpt_moe.py whose optimizer state is parked on the host between steps (PARKED: buffers, chunks)."""

import os
import sys

from tests.parked_state import train_chunked, train_parked

if __name__ == "__main__":
    train = {"buffers": train_parked, "chunks": train_chunked}[os.environ["PARKED"]]
    train(sys.argv[1:])
