"""A pretraining script that fills in Megatron's arguments without Megatron's parser."""

import argparse

import pretrain_own
from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.global_vars import set_args

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=int, default=16)
    set_args(parser.parse_known_args()[0])
    pretrain(
        object(),
        pretrain_own.provide_datasets,
        ModelType.encoder_or_decoder,
        pretrain_own.forward_step,
    )
