"""All that ranks of tests have in common: they are forked from a process that has imported this.

Importing takes seconds a process, of which Megatron's tokenizers, with transformers, are the larger part.
"""

import argparse
import functools
import gc
import inspect

import megatron.core.tokenizers.text.text_tokenizer
from megatron.training.arguments import add_megatron_arguments

import pretrain_gpt_moe

# Megatron's parsers read the sources of its classes, four times a start.
inspect.getsource = functools.cache(inspect.getsource)
add_megatron_arguments(argparse.ArgumentParser())

gc.collect()
gc.freeze()  # collections of ranks leave alone what they share, or pages are copied

__all__ = ["megatron", "pretrain_gpt_moe"]
