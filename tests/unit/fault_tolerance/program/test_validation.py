"""Models and data that pretrain_gpt_moe.py cannot train are refused before anything is built."""

import pytest

from megatron.fault_tolerance.program.validation import check_program
from moe_ft.errors import ConfigError
from tests.unit.fault_tolerance.parsing import parse


def test_blend_of_weights_and_prefixes_is_checked_prefix_by_prefix() -> None:
    with pytest.raises(ConfigError, match="/nowhere/b: /nowhere/b.idx does not exist"):
        check_program(parse("--data-path", "0.3", "/nowhere/b"))


def test_local_experts_with_a_bias_are_refused() -> None:
    args = parse("--mock-data")
    args.add_bias_linear = True
    with pytest.raises(ConfigError, match="--transformer-impl=local needs --disable-bias-linear"):
        check_program(args)


def test_recomputing_layernorm_needs_transformer_engine() -> None:
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm")
    with pytest.raises(ConfigError, match="--recompute-modules layernorm needs the package"):
        check_program(parse("--mock-data", *flags))
