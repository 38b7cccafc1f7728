"""pretrain_gpt_moe.py whose layers are captured by a stand-in (tests/graphs_on_cpus.py)."""

import sys

from tests.graphs_on_cpus import train_with_graphs

if __name__ == "__main__":
    train_with_graphs(sys.argv[1:])
