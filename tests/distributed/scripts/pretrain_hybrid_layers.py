"""A pretraining script whose model is no GPT: layers of attention, dense and MoE layers, in any order."""

from typing import Any

import pretrain_own
from hybrid_layers import stack
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> HybridModel:
    """Build this rank's part of the model that --hybrid-layer-pattern describes."""
    args = get_args()
    return HybridModel(
        config=config or core_transformer_config_from_args(args),
        hybrid_stack_spec=stack,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        hybrid_layer_pattern=args.hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


if __name__ == "__main__":
    pretrain_own.main(provide=provide_model)
