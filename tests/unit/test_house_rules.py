"""Rules of CONTRIBUTING.md that a machine can check: tests of files, decoders, pickles, docstrings."""

import ast
import re

from tests.unit.source import (
    Function,
    check_rule,
    definitions,
    module_name,
    product_files,
    python_files,
    tree_of,
)

QUESTION = re.compile(r"(What|Which|How|Whether|Where|Who|When)\b")
# Files that no unit test imports and no mutation of the simulation is in, each with the reason.
TESTED_ELSEWHERE = {
    **dict.fromkeys(
        [
            f"moe_ft/commands/{name}.py"
            for name in ("convert", "doctor", "examples", "parsers", "removal")
        ],
        "commands: tests call moe_ft.cli",
    ),
    **dict.fromkeys(
        [
            f"megatron/fault_tolerance/bridge/{name}.py"
            for name in ("dialect", "fields", "launch", "loop", "refusals", "versions", "view")
        ],
        "import Megatron-Bridge: tests/bridge has its own environment",
    ),
    "moe_ft/convert/densify.py": "a command: tests/distributed/test_whole_states.py calls moe_ft.cli",
    "moe_ft/commands/pages.py": "printed by `moe_ft plan`: commands/test_plan.py",
    "moe_ft/recovery/peers.py": "ranks meet with it: recovery/test_meet.py",
    "megatron/fault_tolerance/checkpointer.py": "test_checkpointer.py imports it from its package",
    "megatron/fault_tolerance/seams/traces.py": "tests/distributed/test_iteration_check.py",
    "megatron/fault_tolerance/seams/iteration_seams.py": "run by the simulation, and test_hooks.py",
    "megatron/fault_tolerance/program/older_gpt.py": "of Megatron 0.18: make test-versions",
    "megatron/fault_tolerance/degraded/sharing.py": "tests/distributed/test_shared.py",
    "pretrain_gpt_moe.py": "the program itself: run by every test in tests/distributed",
}
# Functions that build decoders, each with the reason. Where threads do so for the same types, msgspec may
# end the process (SIGSEGV).
BUILDS_DECODERS = {
    "moe_ft/format/encoding.py::decodable": "a decorator of classes: modules call it while they are imported",
}


# Files that name a collective of torch which unpickles, or a pickle, each with the reason.
MAY_UNPICKLE = {
    **dict.fromkeys(
        [f"megatron/fault_tolerance/{name}.py" for name in ("seams/collectives", "seams/stack")],
        "answers what Megatron gathers by `all_gather_object`",
    ),
    "moe_ft/convert/torch_metadata.py": "reads checkpoints of others, and knows their few classes",
}
UNPICKLES = re.compile(
    r"(all_gather|gather)_object|(broadcast|scatter|send|recv)_object_list|(c|cloud)?pickle|dill|shelve|marshal"
)


def imported_by(path: str) -> set[str]:
    """Return the modules of the product that a file imports, itself or names of."""
    modules = {module_name(each) for each in product_files()}
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & modules


def is_code(path: str) -> bool:
    return not path.endswith(("/__init__.py", "/__main__.py"))


def test_every_file_of_the_product_is_named_by_a_unit_test_or_a_mutation() -> None:
    readers = [path for path in python_files() if path.startswith("tests/unit/")]
    readers += [path for path in python_files() if re.match(r"tests/simulation/.*mutations", path)]
    tested = set().union(*map(imported_by, readers))
    wrong = {path for path in product_files() if is_code(path) and module_name(path) not in tested}
    check_rule(wrong - {*TESTED_ELSEWHERE}, "test these, or let the simulation find a mutation")
    check_rule({*TESTED_ELSEWHERE} - wrong, "remove these from TESTED_ELSEWHERE")


def builds_a_decoder(call: ast.AST) -> bool:
    """Return whether a call makes msgspec build what it knows of a type, unless that is there already."""
    if not isinstance(call, ast.Call):
        return False
    function = ast.unparse(call.func)
    if not function.startswith("msgspec.") and function != "Decoder":
        return False
    name = function.rpartition(".")[2]
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


def unpickles(node: ast.AST) -> bool:
    """Return whether a node of the source names what unpickles, as an import, a name or a text."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        names = [module, *(alias.name for alias in node.names)]
    elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load":
        return True
    else:
        names = [getattr(node, key, None) for key in ("id", "attr", "value")]
    return any(isinstance(each, str) and UNPICKLES.fullmatch(each) for each in names)


def test_nothing_that_others_have_sent_or_written_is_unpickled() -> None:
    found = {path for path in product_files() if any(map(unpickles, ast.walk(tree_of(path))))}
    check_rule(found - {*MAY_UNPICKLE}, "decode by type: moe_ft/engine/exchange.py, moe_ft/format")
    check_rule({*MAY_UNPICKLE} - found, "remove these from MAY_UNPICKLE")


def test_no_docstring_opens_with_a_question_word() -> None:
    wrong = [
        name
        for path in python_files()
        for name, node in definitions(path)
        if QUESTION.match(ast.get_docstring(node) or "")
    ]
    check_rule(wrong, "open with a verb (functions) or a noun (modules, classes)")
