"""Megatron's arguments of a small GPT on 8 ranks, with flags of moe_ft, as a test of a rule needs them."""

import argparse

from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.program.arguments import add_flags
from tests.demo_model import model_flags


def parse(*flags: str) -> argparse.Namespace:
    """Return the arguments as parsed, not validated."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser = add_flags(megatron_arguments.add_megatron_arguments(parser))
    args = parser.parse_args([*model_flags(), "--transformer-impl", "local", *flags])
    args.world_size, args.rank = 8, 0
    return args
