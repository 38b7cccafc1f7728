"""Rules of CONTRIBUTING.md that a machine can check: sizes, a test for each file, openings of docstrings."""

import ast
import re

import pytest

from tests.unit.source import (
    ROOT,
    Function,
    check_rule,
    definitions,
    product_files,
    python_files,
    text_of,
)

FUNCTION_LINES, FILE_LINES = 60, 450
QUESTION = re.compile(r"(What|Which|How|Whether|Where|Who|When)\b")
# Files of the product without a test file of their own, each with the reason.
TESTED_ELSEWHERE = {
    "pretrain_gpt_moe.py": "the program itself: run by every test in tests/distributed",
    "moe_ft/config/flag_table.py": "a table: program/test_flag_classes.py compares it with Megatron's parser",
    "moe_ft/convert/model.py": "a protocol: the tests of the three kinds of models fill it",
    "megatron/fault_tolerance/repair/transport.py": "a protocol: test_gloo.py and test_nccl.py fill it",
    "moe_ft/recovery/facts.py": "a dataclass without behavior: every test of a job fills it",
}


# Functions that build decoders, each with the reason. Where threads do so for the same types, msgspec may
# end the process (SIGSEGV).
BUILDS_DECODERS = {
    "moe_ft/format/encoding.py::decodable": "a decorator of classes: modules call it while they are imported",
    "moe_ft/commands/run_summary.py::_LeftOut.typed": "a command that reads events has one thread",
}


def lines_of(function: Function) -> int:
    """Return the number of lines from `def` to the end; decorators do not count."""
    return (function.end_lineno or 0) - function.lineno + 1


def unit_test_of(path: str) -> str:
    """Return where the unit tests of a file of the product are: tests/unit mirrors the tree."""
    folder, _, name = path.removeprefix("megatron/").rpartition("/")
    return "/".join(each for each in ("tests/unit", folder, f"test_{name}") if each)


def has_unit_test(path: str) -> bool:
    return (ROOT / unit_test_of(path)).exists()


def test_functions_are_short() -> None:
    wrong = [
        name
        for path in python_files()
        for name, node in definitions(path)
        if isinstance(node, Function) and lines_of(node) > FUNCTION_LINES
    ]
    check_rule(wrong, f"split functions of more than {FUNCTION_LINES} lines")


def test_files_are_short() -> None:
    wrong = [path for path in python_files() if len(text_of(path).splitlines()) > FILE_LINES]
    check_rule(wrong, f"split files of more than {FILE_LINES} lines by subject")


def test_every_file_of_the_product_has_a_test_of_its_name() -> None:
    wrong = [
        path
        for path in product_files()
        if not path.endswith(("/__init__.py", "/__main__.py"))
        if path not in TESTED_ELSEWHERE and not has_unit_test(path)
    ]
    example = f" (such as {unit_test_of(wrong[0])})" if wrong else ""
    check_rule(wrong, f"add unit tests{example} or a reason to TESTED_ELSEWHERE")


@pytest.mark.parametrize("path", TESTED_ELSEWHERE)
def test_file_that_is_listed_as_tested_elsewhere_exists_and_has_no_test(path: str) -> None:
    assert (ROOT / path).exists(), "remove it from TESTED_ELSEWHERE"
    assert not has_unit_test(path), f"{unit_test_of(path)} exists: remove the entry"
    assert TESTED_ELSEWHERE[path]


def builds_a_decoder(call: ast.AST) -> bool:
    """Return whether a call makes msgspec build what it knows of a type, unless that is there already."""
    if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("msgspec."):
        return False
    name = ast.unparse(call.func).rpartition(".")[2]
    return name in ("convert", "Decoder") or "type" in {each.arg for each in call.keywords}


def test_decoders_are_built_while_modules_are_imported() -> None:
    found = {
        name
        for path in product_files()
        for name, node in definitions(path)
        if isinstance(node, Function) and any(map(builds_a_decoder, ast.walk(node)))
    }
    check_rule(found - {*BUILDS_DECODERS}, "build the decoder once, at the level of the module")
    assert found >= {*BUILDS_DECODERS}, "remove it from BUILDS_DECODERS"


def test_no_docstring_opens_with_a_question_word() -> None:
    wrong = [
        name
        for path in python_files()
        for name, node in definitions(path)
        if QUESTION.match(ast.get_docstring(node) or "")
    ]
    check_rule(wrong, "open with a verb (functions) or a noun (modules, classes)")


@pytest.mark.parametrize(
    ("path", "test"),
    [
        ("moe_ft/engine/memory/pool.py", "tests/unit/moe_ft/engine/memory/test_pool.py"),
        ("kernels/packing.py", "tests/unit/kernels/test_packing.py"),
        (
            "megatron/fault_tolerance/seams/hooks.py",
            "tests/unit/fault_tolerance/seams/test_hooks.py",
        ),
        ("pretrain_gpt_moe.py", "tests/unit/test_pretrain_gpt_moe.py"),
    ],
)
def test_unit_tests_mirror_the_tree(path: str, test: str) -> None:
    assert unit_test_of(path) == test
