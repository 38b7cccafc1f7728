"""All that ranks of tests under Megatron-Bridge have in common, after tests/warm.py: see there.

Bridge takes functions of Megatron by name when it is imported, so Megatron is made ready for CPUs before.
"""

import gc

from megatron.fault_tolerance.cpu import adam, device
from megatron.fault_tolerance.launch import environment
from moe_ft.cluster.forked_rank import without_driver

device.install()
adam.install()
environment._use_prebuilt_dataset_helper()

with without_driver():
    import megatron.bridge.training.gpt_step
    import megatron.bridge.training.pretrain
    import megatron.bridge.training.utils.omegaconf_utils

gc.collect()
gc.freeze()

__all__ = ["megatron"]
