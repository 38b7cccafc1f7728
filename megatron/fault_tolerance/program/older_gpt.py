"""GPT for Megatron 0.18, under the names that `megatron.training.models.gpt` has since 0.19.

`pretrain` of that version takes a function that builds the model, in place of a configuration.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


@dataclass(kw_only=True)
class GPTModelConfig:
    """Settings of a model, as far as model.py asks for them."""

    transformer: Any
    share_embeddings_and_output_weights: bool
    transformer_layer_spec: Any = None  # of --spec

    def build(
        self,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> GPTModel:
        """Build this rank's part of the model, or one of its virtual stages; Megatron calls it."""
        args = get_args()
        spec = self.transformer_layer_spec
        spec = spec(self, vp_stage=vp_stage) if callable(spec) else spec
        return GPTModel(
            config=config or self.transformer,
            transformer_layer_spec=spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
            share_embeddings_and_output_weights=self.share_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            rope_scaling=args.use_rope_scaling,
            seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
            mtp_block_spec=mtp_block_spec(self, spec, vp_stage),
            pg_collection=pg_collection,
            vp_stage=vp_stage,
        )


def gpt_config_from_args(args: argparse.Namespace) -> GPTModelConfig:
    """Return the settings of the model that Megatron's arguments describe."""
    return GPTModelConfig(
        transformer=core_transformer_config_from_args(args),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        transformer_layer_spec=None if args.spec is None else import_module(args.spec),
    )


def default_layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Return Megatron's spec of the layers of a virtual stage."""
    return get_gpt_decoder_block_spec(
        config.transformer, vp_stage=vp_stage, **_options(config.transformer)
    )


def mtp_block_spec(config: GPTModelConfig, _: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's spec of multi-token prediction; None if the model has none."""
    if not config.transformer.mtp_num_layers:
        return None
    options = _options(config.transformer)
    last_layer = get_gpt_decoder_layer_specs(config.transformer, vp_stage=vp_stage, **options)[-1]
    with_te = options["use_transformer_engine"]
    return get_gpt_mtp_block_spec(config.transformer, last_layer, with_te, vp_stage=vp_stage)


def _options(transformer: Any) -> dict[str, Any]:
    return {
        "use_transformer_engine": transformer.transformer_impl == "transformer_engine",
        "normalization": transformer.normalization,
        "qk_l2_norm": transformer.qk_l2_norm,
    }
