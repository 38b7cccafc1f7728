"""pretrain_gpt_moe.py whose flex dispatcher finds a stand-in for DeepEP (tests/deep_ep_on_cpus.py).

With MOST_STUCK_S, a rank that waits in it for a dead one is ended after these seconds.
"""

import os

import pretrain_gpt_moe
from megatron.fault_tolerance.repair import watcher
from tests.deep_ep_on_cpus import install

if __name__ == "__main__":
    if most_s := os.environ.get("MOST_STUCK_S"):
        watcher.STUCK_S = float(most_s)
    install()
    pretrain_gpt_moe.main()
