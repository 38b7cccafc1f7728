"""Answers to a lost node: the same for ranks and for who only sees their command line."""

import argparse
from functools import partial

import pytest

from moe_ft.command_lines import flag_value
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.flags import add_flags, config_from, lines_on_old_words, part_types
from moe_ft.config.lost_nodes import answer_of
from moe_ft.strategies.registry import option_types

SPARE, WITHOUT, ELASTIC = "--moe-ft-spare", "--moe-ft-without-spare", "--moe-ft-elastic"


def parse(words: list[str]) -> tuple[MoeFtConfig, list[str]]:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, part_types(option_types()).values())
    assert SPARE not in parser.format_help().replace(WITHOUT, "")
    args = parser.parse_args(words)
    return config_from(args, option_types()), lines_on_old_words(args)


@pytest.mark.parametrize(
    ("words", "answer", "line"),
    [
        ([], "crowd", ""),
        ([ELASTIC], "shrink", ""),
        ([WITHOUT, "auto"], "crowd", ""),
        *(([WITHOUT, each], each, "") for each in ("end", "wait", "crowd", "share", "shrink")),
        ([f"{WITHOUT}=crowd", ELASTIC], "crowd", ""),
        ([SPARE, "wait"], "wait", f"{SPARE}=wait is {WITHOUT} wait now: write that"),
        ([f"{SPARE}=restart"], "end", f"{SPARE}=restart is {WITHOUT} end now: write that"),
        ([SPARE, "restart", ELASTIC], "shrink", f"{SPARE}=restart is {WITHOUT} shrink now: "),
        ([WITHOUT, "off"], "end", f"{WITHOUT}=off is {WITHOUT} end now: write that"),
        (
            [WITHOUT, "off", SPARE, "wait"],
            "wait",
            f"{SPARE}=wait and {WITHOUT}=off are {WITHOUT} wait now: write that",
        ),
        ([WITHOUT, "reroute"], "share", f"{WITHOUT}=reroute is {WITHOUT} share now: write that"),
        ([WITHOUT, "reroute", ELASTIC], "share", f"{WITHOUT}=reroute is {WITHOUT} share now: "),
        (
            [SPARE, "wait", WITHOUT, "reroute"],
            "share",
            f"{SPARE}=wait and {WITHOUT}=reroute are {WITHOUT} share now: write that",
        ),
        ([SPARE, "wait", WITHOUT, "share"], "share", f"{SPARE}=wait is {WITHOUT} share now"),
    ],
    ids=" ".join,
)
def test_words_of_today_and_of_before_ask_for_one_thing(
    words: list[str], answer: str, line: str
) -> None:
    config, lines = parse(words)
    assert config.answer_to_lost_nodes == answer
    assert answer_of(partial(flag_value, words), ELASTIC in words) == answer
    assert bool(line) == len(lines) and all(each.startswith(line) for each in lines)


def test_word_that_never_was_one_is_refused() -> None:
    with pytest.raises(argparse.ArgumentError, match=f"{WITHOUT}: invalid choice: 'restart'"):
        parse([WITHOUT, "restart"])
