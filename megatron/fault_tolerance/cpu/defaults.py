"""Defaults of Megatron's flags that suit a machine without a GPU."""

import argparse

from megatron.core.transformer.enums import AttnBackend

# Features that need a GPU.
CPU_DEFAULTS = {
    "distributed_backend": "gloo",
    "attention_backend": AttnBackend.unfused,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "num_workers": 0,
}
# Features that need the kernels of Transformer Engine or Apex.
UNFUSED_DEFAULTS = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
}


def set_cpu_defaults(parser: argparse.ArgumentParser) -> None:
    """Turn off in Megatron's parser all that a CPU cannot do; flags can still turn it on."""
    parser.set_defaults(**UNFUSED_DEFAULTS, **CPU_DEFAULTS)
