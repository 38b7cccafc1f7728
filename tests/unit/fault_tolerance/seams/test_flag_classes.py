"""Every flag of the installed Megatron is classified once, and its class follows from what it does."""

import argparse
import re
from pathlib import Path

import pytest
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu.device import CPU_DEFAULTS, UNFUSED_DEFAULTS
from megatron.fault_tolerance.program.arguments import REFUSALS
from megatron.fault_tolerance.seams.flag_classes import names_of, untested_flags, untested_line
from megatron.fault_tolerance.seams.refusals import check_refusals
from moe_ft.config.flag_table import FLAGS, FlagClass, Kind, flag_classes, names_in
from moe_ft.strategies import registry

TESTS = Path(__file__).parents[3]


def test_every_flag_of_the_installed_parser_is_in_the_table(
    parser: argparse.ArgumentParser,
) -> None:
    flags = {action.dest for action in parser._actions}
    unclassified = sorted(flags - flag_classes().keys())
    assert not unclassified, "look at what these do, and put them into flag_table.py"
    gone = sorted(flag_classes().keys() - flags)
    assert not gone, "Megatron has these no more: take them out of flag_table.py"


def test_flag_that_decides_something_is_read_by_megatron() -> None:
    # A flag that nothing reads is neutral, or is refused because a user expects an effect.
    folder = Path(megatron_arguments.__file__).parents[1]
    words: set[str] = set()
    for path in (*folder.glob("core/**/*.py"), *folder.glob("training/**/*.py")):
        words.update(re.findall(r"[.\"'](\w+)", path.read_text(encoding="utf-8")))
    decides = (Kind.FINGERPRINT, Kind.REPLAY, Kind.RECORD, Kind.BEGINNING)
    read = [dest for dest, each in flag_classes().items() if each.kind in decides]
    assert [dest for dest in read if dest not in words] == []


def test_no_flag_is_in_the_table_twice_and_no_class_has_another_mark() -> None:
    found = [(names, *each.split()) for of in FLAGS.values() for each, names in of.items()]
    assert sum(len(names_in(names)) for names, *_ in found) == len(flag_classes())
    assert {tuple(mark) for _, _, *mark in found} == {(), ("untested",)}


def test_names_are_sorted_within_their_class() -> None:
    for subject, classes in FLAGS.items():
        for heading, names in classes.items():
            assert names_in(names) == sorted(names_in(names), key=str.lower), (subject, heading)


def test_defaults_are_neither_refused_nor_untested(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    for strategy in registry.names():
        args.moe_ft_strategy = strategy
        check_refusals(args, REFUSALS)
    assert untested_flags(args, parser) == []


def test_flag_of_a_megatron_that_the_table_does_not_know_is_untested() -> None:
    newer = argparse.ArgumentParser()
    newer.add_argument("--no-gravity", dest="gravity", action="store_false")
    newer.add_argument("--lr")
    given = newer.parse_args(["--no-gravity", "--lr", "1"])
    assert untested_flags(given, newer) == ["--no-gravity"]
    assert untested_flags(given, newer, {"gravity"}) == []


@pytest.mark.parametrize("kind", [Kind.FINGERPRINT, Kind.REPLAY])
def test_captured_flag_that_is_not_called_untested_is_in_a_test(
    kind: Kind, parser: argparse.ArgumentParser
) -> None:
    paths = [*TESTS.glob("*.py"), *(TESTS / "distributed").glob("*.py")]
    words = set(re.findall(r"[\w-]+", " ".join(path.read_text() for path in paths)))
    ours = {**CPU_DEFAULTS, **UNFUSED_DEFAULTS}
    names = {
        dest: {
            dest,
            *(
                form
                for each in parser._actions
                if each.dest == dest
                for flag in each.option_strings
                for form in (flag, flag.lstrip("-").replace("-", "_"))  # as the array writes it
            ),
        }
        for dest in names_of(kind)
    }
    missing = [
        dest
        for dest, each in flag_classes().items()
        if each.kind is kind and each.is_tested and dest not in ours and not names[dest] & words
    ]
    assert missing == []


def test_class_names_kind_and_mark() -> None:
    assert flag_classes()["fp8"] == FlagClass(Kind.REPLAY, is_tested=False)
    assert flag_classes()["lr"] == FlagClass(Kind.RECORD, is_tested=True)


def test_untested_flags_are_named_in_one_line() -> None:
    assert untested_line(["--a", "--b"]) == ["no test of moe_ft runs with --a, --b"]
    assert untested_line([]) == []


def test_flags_that_a_parser_requires_do_not_keep_it_from_being_compared() -> None:
    newer = argparse.ArgumentParser()
    newer.add_argument("--corpus", required=True)
    newer.add_argument("--shares", type=float, default="0.5")
    assert untested_flags(newer.parse_args(["--corpus", "here"]), newer) == ["--corpus"]
