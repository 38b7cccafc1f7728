"""A pretraining script that imports moe_ft instead of being started by `moe_ft run`."""

import argparse

import pretrain_own
from megatron.core.enums import ModelType
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron.fault_tolerance import add_arguments, pretrain


def add_all_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of this script and those of moe_ft."""
    own: argparse.ArgumentParser = pretrain_own.add_own_arguments(parser)
    both: argparse.ArgumentParser = add_arguments(own)
    return both


if __name__ == "__main__":
    args = parse_and_validate_args(add_all_arguments)
    args.min_lr = pretrain_own.LOWEST_LR
    pretrain(
        pretrain_cfg_container_from_args(args),
        pretrain_own.provide_datasets,
        ModelType.encoder_or_decoder,
        pretrain_own.forward_step,
        model_provider=pretrain_own.provide_model,
    )
