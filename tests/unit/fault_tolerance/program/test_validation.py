"""Refused flags have one rule each, with reason and remedy; what cannot be trained is refused."""

import argparse
from collections import Counter
from pathlib import Path

import pytest

from megatron.fault_tolerance.program.validation import PROGRAM_REFUSALS, REFUSALS, check_program
from megatron.fault_tolerance.seams.flag_classes import megatron_flags, names_of, untested_flags
from megatron.fault_tolerance.seams.refusals import check_refusals
from moe_ft.config.flag_table import FLAGS, REFUSED_HERE, Kind, flag_classes, names_in
from moe_ft.config.rules import Rule
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from tests.unit.fault_tolerance.parsing import parse

ROOT = Path(__file__).parents[4]
RULES = {rule.flag: rule for rule in REFUSALS if flag_classes()[rule.dest].kind is Kind.REFUSED}


def test_every_refused_flag_has_one_rule() -> None:
    rules = Counter(rule.dest for rule in REFUSALS if rule.flag in RULES)
    assert rules == Counter(names_of(Kind.REFUSED))


def test_table_knows_the_flags_that_this_program_refuses_and_others_may_read() -> None:
    names = {name for each in FLAGS[REFUSED_HERE].values() for name in names_in(each)}
    assert names == {rule.dest for rule in PROGRAM_REFUSALS}


def test_every_refused_flag_is_in_the_documentation(parser: argparse.ArgumentParser) -> None:
    text = (ROOT / "docs/flags.md").read_text()
    written = megatron_flags(parser)
    assert [rule.flag for rule in REFUSALS if f"`{written[rule.dest]}" not in text] == []


def used(rule: Rule, parser: argparse.ArgumentParser) -> object:
    """Return a value of a flag that is not its default."""
    (action,) = [each for each in parser._actions if each.dest == rule.dest]
    if action.nargs == 0:
        return True
    return {int: 2, float: 0.5}.get(action.type, "given")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", RULES)
def test_refused_flag_is_refused_with_its_reason_and_remedy(
    name: str, args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    rule = RULES[name]
    setattr(args, rule.dest, used(rule, parser))
    refused_with = ["none", *(kind.name for kind in registry.kinds())]
    if rule.strategies is not None:
        check_refusals(args, REFUSALS)
        assert megatron_flags(parser)[rule.dest] in untested_flags(args, parser)
        refused_with = [kind.name for kind in registry.kinds() if rule.strategies(kind)]
    assert refused_with
    for strategy in refused_with:
        args.moe_ft_strategy = strategy
        with pytest.raises(ConfigError, match="is not supported") as refusal:
            check_refusals(args, REFUSALS)
        assert str(refusal.value).startswith(rule.flag)
        remedy = rule.remedy.format(others="dense, partial or sparse")
        assert str(refusal.value).endswith(f"{rule.reason}. {remedy}.")


@pytest.mark.parametrize("name", sorted({rule.dest for rule in REFUSALS}))
def test_flag_that_a_megatron_does_not_have_is_not_refused(
    name: str, args: argparse.Namespace
) -> None:
    delattr(args, name)
    check_refusals(args, REFUSALS)


@pytest.mark.parametrize("rule", PROGRAM_REFUSALS, ids=lambda rule: rule.flag)
def test_flag_that_only_this_program_refuses_is_left_to_a_script(
    rule: Rule, args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    setattr(args, rule.dest, used(rule, parser))
    args.moe_ft_strategy = "sparse"
    check_refusals(args)


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
