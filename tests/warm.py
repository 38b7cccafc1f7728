"""All that ranks of tests have in common: they are forked from a process that has imported this.

Importing takes seconds a process, of which Megatron's tokenizers, with transformers, are the larger part.
"""

import gc

import megatron.core.tokenizers.text.text_tokenizer

import pretrain_gpt_moe

gc.collect()
gc.freeze()  # collections of ranks leave alone what they share, or pages are copied

__all__ = ["megatron", "pretrain_gpt_moe"]
