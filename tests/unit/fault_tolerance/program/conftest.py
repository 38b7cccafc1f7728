"""Megatron's parser, and the arguments that it gives without flags."""

import argparse

import pytest
from megatron.training import arguments as megatron_arguments


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args([])
    args.moe_ft_strategy = "none"
    return args
