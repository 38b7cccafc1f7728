"""Names in docs, comments and tests: of files, modules and attributes that exist, and of nothing outside."""

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

from tests.unit.source import (
    PRODUCT,
    ROOT,
    check_rule,
    definitions,
    python_files,
    text_files,
    text_of,
    tree_of,
)

OWN = Path(__file__).relative_to(ROOT).as_posix()
# Working papers that readers of the repository do not have, and places on the machines of its authors.
OUTSIDE = re.compile(
    r"\b(?:DESIGN|STYLE|PAPER_NOTES|ANCHORS)\b|the issue of\b|(?<![\w/])shared/"
    r"|(?<![\w.])/(?:work|root|tmp/wt)\b"
)
FOLDERS = "moe_ft|megatron|kernels|tests|tools|docs|examples|benchmarks"
FILE = re.compile(r"(?<![\w/.*-])[\w./*-]*[\w*]\.(?:py|md|sh|toml|sbatch)\b")
FOLDER = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})/[\w/*-]*(?![\w.*])")
MODULE = re.compile(rf"(?<![\w/.-])(?:{FOLDERS})(?:\.[a-z]\w*)+(?![\w/(])")
MEGATRON = ("megatron.bridge", "megatron.core", "megatron.training")
PLACEHOLDER = re.compile(r"[A-Z_]+")
# Said to be absent, a lock, scripts of Megatron-LM and of Megatron-Bridge, and a result of tools/gpu_day.
NOT_OURS = {
    *("megatron/__init__.py", "megatron/core/datasets", "moe_ft.lock"),
    *("pretrain_gpt.py", "Megatron-LM/pretrain_gpt.py", "summary.md"),
    *("run_recipe.py", "scripts/training/run_recipe.py"),
}


def prose_of(path: str) -> str:
    """Return what a file says to people: docs whole, of Python docstrings, comments and texts with a path."""
    if not path.endswith(".py"):
        return text_of(path)
    docstrings = [ast.get_docstring(node) or "" for _, node in definitions(path)]
    tokens = tokenize.generate_tokens(io.StringIO(text_of(path)).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    walked = ast.walk(tree_of(path)) if path.startswith(PRODUCT) else ()
    texts = [
        node.value
        for node in walked
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.search(r"\b(?:docs|examples|tests|tools)/", node.value)
    ]
    return "\n".join([*docstrings, *comments, *texts])


def paths_in(text: str) -> set[str]:
    """Return the files and folders that a text names, without `../` and placeholders such as $ROOT."""
    found = {match.rstrip("/") for match in (*FILE.findall(text), *FOLDER.findall(text))}
    parts = [[part for part in each.split("/") if part not in ("", ".", "..")] for each in found]
    named = (
        [part for part in each if not PLACEHOLDER.fullmatch(part.partition(".")[0])]
        for each in parts
    )
    return {"/".join(each) for each in named if each and each[-1] != "py"}


@cache
def existing() -> frozenset[str]:
    """Return the paths of all files and folders of the repository, each with a leading slash."""
    globs = ("docs/pictures/*", "examples/*/*")  # also those that hold no prose
    others = [str(path.relative_to(ROOT)) for each in globs for path in ROOT.glob(each)]
    files = [Path("/", path) for path in (*text_files(), *others)]
    return frozenset(each.as_posix() for path in files for each in (path, *path.parents))


def exists(path: str) -> bool:
    """Return whether a file or folder is there; its leading folders may be left out."""
    if "*" in path:
        return any(fnmatch(each, f"*/{path}") for each in existing())
    return any(each.endswith(f"/{path}") for each in existing())


def module_exists(name: str) -> bool:
    """Return whether a dotted name is a module, a package, or something that a module defines."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = "/".join(parts[:length])
        if (ROOT / f"{path}.py").exists():
            return len(parts) == length or parts[length] in names_in(tree_of(f"{path}.py").body)
        if (ROOT / path).is_dir():
            return len(parts) == length or parts[length] in exports_of(f"{path}/__init__.py")
    return False


def exports_of(path: str) -> set[str]:
    """Return the names that a package imports at their first use: the keys of its table."""
    tables = (node for node in tree_of(path).body if isinstance(node, ast.Assign))
    return {
        key.value
        for table in tables
        if isinstance(table.value, ast.Dict) and ast.unparse(table.targets[0]) == "_EXPORTS"
        for key in table.value.keys
        if isinstance(key, ast.Constant)
    }


def names_in(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that a module or a class defines or imports."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        else:
            found |= {
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found


def imported_names(path: str) -> dict[str, tuple[str, str]]:
    """Return by local name what a file imports from the repository, anywhere: module and name in it.

    The name is empty where the module itself is imported.
    """
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {each.asname or each.name: (each.name, "") for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {each.asname or each.name: (node.module, each.name) for each in node.names}
    return {local: (module, name) for local, (module, name) in found.items() if is_ours(module)}


def is_ours(module: str) -> bool:
    top = module.partition(".")[0]
    is_there = top in FOLDERS.split("|") or (ROOT / f"{top}.py").exists()
    return is_there and not module.startswith(MEGATRON)


def replaced_attributes(path: str) -> Iterator[tuple[str, str]]:
    """Yield the attributes of other modules and classes that a file replaces: (local name, attribute)."""
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Attribute(value=ast.Name(id=owner), attr=name, ctx=ast.Store()):
                yield owner, name
            case ast.Call(
                func=ast.Name(id=function) | ast.Attribute(attr=function),
                args=[ast.Name(id=owner), ast.Constant(value=str(name)), *_],
            ) if function not in ("getattr", "hasattr"):
                yield owner, name


def attributes_of(module: str, name: str) -> set[str] | None:
    """Return the names that a module, or a class in a module, defines; None for anything else."""
    as_module = body_of(f"{module}.{name}" if name else module)
    if as_module is not None:
        return names_in(as_module)
    classes = (node for node in body_of(module) or () if isinstance(node, ast.ClassDef))
    for each in classes:
        if each.name == name:
            bases = (base.id for base in each.bases if isinstance(base, ast.Name))
            inherited = (attributes_of(module, base) or set() for base in bases)
            return names_in(each.body).union(*inherited)
    return None


def body_of(module: str) -> list[ast.stmt] | None:
    path = f"{module.replace('.', '/')}.py"
    return tree_of(path).body if (ROOT / path).exists() else None


def test_nothing_outside_the_repository_is_named() -> None:
    wrong = [
        f"{path}: {match}"
        for path in text_files()
        if path != OWN
        for match in OUTSIDE.findall(text_of(path))
    ]
    check_rule(wrong, "readers of the repository have none of these")


def test_files_and_folders_that_prose_names_exist() -> None:
    wrong = [
        f"{path}: {named}"
        for path in text_files()
        for named in paths_in(prose_of(path)) - NOT_OURS
        if not exists(named)
    ]
    check_rule(wrong, "these files are gone or have another name")


def test_modules_that_prose_names_exist() -> None:
    wrong = [
        f"{path}: {named}"
        for path in text_files()
        for named in MODULE.findall(prose_of(path))
        if not named.startswith(MEGATRON)
        and named not in NOT_OURS
        and not module_exists(named)
        and not exists(named)
    ]
    check_rule(wrong, "these modules are gone or have another name")


def test_attributes_that_tests_replace_exist() -> None:
    wrong = [
        f"{path}: {owner}.{name}"
        for path in python_files()
        if not path.startswith(PRODUCT)
        for owner, name in replaced_attributes(path)
        if owner in imported_names(path)
        if (known := attributes_of(*imported_names(path)[owner])) is not None
        and name not in known
        and name not in vars(builtins)
    ]
    check_rule(wrong, "replacing what is not there changes nothing")


def test_tests_that_prose_names_exist() -> None:
    named = re.compile(r"([\w/]*test_\w+\.py)::(test_\w+)")
    wrong = [
        f"{path}: {file}::{name}"
        for path in text_files()
        for file, name in named.findall(text_of(path))
        if not any(
            name in names_in(tree_of(each).body) for each in python_files() if each.endswith(file)
        )
    ]
    check_rule(wrong, "these tests are gone or have another name")


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("see recovery/session.py, `../docs/flags.md` and tests/distributed/", None),
        ("$ROOT/tools/prepare_text.py --output FILE.md", {"tools/prepare_text.py"}),
        ("files in moe_ft/*.py", {"moe_ft/*.py"}),
        ("moe_ft.engine.memory.regions, and/or nothing", set()),
    ],
)
def test_paths_are_found_in_prose(text: str, paths: set[str] | None) -> None:
    wanted = {"recovery/session.py", "docs/flags.md", "tests/distributed"}
    assert paths_in(text) == (wanted if paths is None else paths)
