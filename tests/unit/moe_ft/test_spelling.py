"""Words that nobody knows are answered with those that may be meant."""

import argparse

import pytest

from moe_ft.spelling import explained, hint, nearest

FLAGS = ("--moe-ft-strategy", "--moe-ft-persist-dir", "--moe-ft-data", "--num-layers")


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("--moe-ft-stategy", "--moe-ft-strategy"),
        ("--moe-ft-strateg", "--moe-ft-strategy"),
        ("--moe_ft_strategy", "--moe-ft-strategy"),
        ("--persist-dir", "--moe-ft-persist-dir"),
        ("--moe-ft-num-layer", "--num-layers"),
        ("--num_layers", "--num-layers"),
    ],
)
def test_flag_that_resembles_one_is_found_with_and_without_its_prefix(
    word: str, found: str
) -> None:
    assert nearest(word, FLAGS) == [found]


def test_flag_that_shares_only_the_prefix_resembles_none() -> None:
    assert not hint("--moe-ft-zzzz", FLAGS)


def test_hint_names_several_words_where_it_may() -> None:
    names = ("mixtral-8x7b", "mixtral-8x22b", "deepseek-v3")
    wanted = " Did you mean mixtral-8x7b or mixtral-8x22b?"
    assert hint("Mixtral", names, most=3, cutoff=0.4) == wanted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--jsn --lnes=3",
            "unrecognized arguments: --jsn --lnes=3. Did you mean --json and --lines?",
        ),
        ("--zzz", "unrecognized arguments: --zzz."),
        ("--hiden 3", "unrecognized arguments: --hiden 3."),
        ("--lines no", "argument --lines: invalid int value: 'no'."),
        ("--what weight", "--what=weight must be one of weights, all. Did you mean weights?"),
        ("--what zzz", "--what=zzz must be one of weights, all. Name one of them."),
        ("--ranks 3", "--ranks=3 must be one of 1, 2. Name one of them."),
    ],
)
def test_errors_of_argparse_say_what_may_be_meant(words: str, message: str) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--lines", type=int)
    parser.add_argument("--what", choices=("weights", "all"))
    parser.add_argument("--ranks", type=int, choices=(1, 2))
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    try:
        _, others = parser.parse_known_args(words.split())
        error = f"unrecognized arguments: {' '.join(others)}"
    except argparse.ArgumentError as refused:
        error = str(refused)
    assert explained(error, parser) == message
