"""A pretraining script that calls `pretrain` as Megatron wanted it before 0.19."""

import pretrain_own
from megatron.core.enums import ModelType
from megatron.training import pretrain

if __name__ == "__main__":
    pretrain(
        pretrain_own.provide_datasets,
        pretrain_own.provide_model,
        ModelType.encoder_or_decoder,
        pretrain_own.forward_step,
        args_defaults={"tokenizer_type": "NullTokenizer"},
    )
