"""All that ranks of tests have in common: they are forked from a process that has imported this.

Importing takes seconds a process, of which Megatron's tokenizers, with transformers, are the larger part.
"""

import argparse
import functools
import gc
import inspect

import torch

from moe_ft.cluster.forked_rank import without_driver

with without_driver():
    import megatron.core.tokenizers.text.text_tokenizer
    from megatron.training.arguments import add_megatron_arguments

    import pretrain_gpt_moe
    from moe_ft.engine.links import listener
    from moe_ft.loop import failure_report, leaving

# Megatron's parsers read the sources of its classes, four times a start.
inspect.getsource = functools.cache(inspect.getsource)  # type: ignore[assignment]
add_megatron_arguments(argparse.ArgumentParser())

# No claim of the tests is one on time, and cores may be slow or busy.
for name in ("_MEETING_S", "_STEP_S", "_ANSWER_S"):
    setattr(leaving, name, 10.0)
for name in ("_STORE_DEADLINE_S", "_HURRIED_STORE_DEADLINE_S"):
    setattr(failure_report, name, 10.0)
listener.STRANGER_S = 30.0

gc.collect()
gc.freeze()  # collections of ranks leave alone what they share, or pages are copied

__all__ = ["megatron", "pretrain_gpt_moe", "torch"]
