"""The source of the repository as the tests of its rules read it: files, syntax trees, definitions.

The rules are in test_architecture.py, test_house_rules.py and test_references.py.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PRODUCT = ("moe_ft", "megatron", "pretrain_gpt_moe.py")
OTHERS = ("tests", "benchmarks", "tools", "examples", "docs")
_SUFFIXES = (".py", ".md", ".toml", ".sh", ".sbatch", ".txt")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@cache
def text_files() -> tuple[str, ...]:
    """Return the paths of everything that people read, relative to the root of the repository."""
    folders = [ROOT / name for name in (*PRODUCT, *OTHERS) if (ROOT / name).is_dir()]
    found = [path for folder in folders for path in folder.rglob("*")]
    found += [*ROOT.glob("*"), *ROOT.glob(".ci/*")]
    wanted = (
        path for path in found if path.suffix in _SUFFIXES or path.name in ("Makefile", "run")
    )
    return tuple(sorted(path.relative_to(ROOT).as_posix() for path in wanted if path.is_file()))


def python_files() -> list[str]:
    return [path for path in text_files() if path.endswith(".py")]


def product_files() -> list[str]:
    return [path for path in python_files() if path.startswith(PRODUCT)]


@cache
def text_of(path: str) -> str:
    return (ROOT / path).read_text()


@cache
def tree_of(path: str) -> ast.Module:
    return ast.parse(text_of(path))


def module_name(path: str) -> str:
    parts = Path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def definitions(path: str) -> Iterator[tuple[str, Documented]]:
    """Yield the module, its classes and its functions, nested ones too, each with a name for messages."""

    def below(node: ast.AST, name: str) -> Iterator[tuple[str, Documented]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | Function):
                own = f"{name}.{child.name}" if "::" in name else f"{path}::{child.name}"
                yield own, child
                yield from below(child, own)
            else:
                yield from below(child, name)

    yield path, tree_of(path)
    yield from below(tree_of(path), path)


def check_rule(offenders: Iterable[str], remedy: str) -> None:
    """Fail if something breaks a rule, and list all that does."""
    listed = "".join(f"\n    {each}" for each in sorted(set(offenders)))
    assert not listed, f"{remedy}:{listed}"
