"""The layers of docs/architecture.md, read from the imports in the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BASE = (
    "arithmetic",
    "errors",
    "config",
    "units",
    "topology",
    "events",
    "faults",
    "format",
)

# Layer of each package or module; a file may import its own layer and those with a lower number.
# Two layers with the same number must not import each other.
LAYERS = {
    "pretrain_gpt_moe": 70,
    "megatron.fault_tolerance": 60,
    "moe_ft.cli": 55,
    "moe_ft.commands": 54,
    "moe_ft.__main__": 56,
    "moe_ft.recovery": 50,
    "moe_ft.elastic": 50,
    "moe_ft.simulator": 40,
    "moe_ft.engine": 40,
    "moe_ft.strategies": 35,
    "moe_ft.planning": 30,
    "moe_ft.state": 30,
    "kernels": 20,
    **{f"moe_ft.{name}": 10 for name in BASE},
}
PURE = (
    "moe_ft.planning",
    "moe_ft.strategies",
    "moe_ft.simulator",
    *(f"moe_ft.{name}" for name in BASE),
)
NO_MEGATRON_TRAINING = ("moe_ft", "kernels")


def source_files() -> list[Path]:
    folders = [ROOT / "moe_ft", ROOT / "megatron", ROOT / "kernels"]
    found = [path for folder in folders for path in folder.rglob("*.py")]
    return [*found, ROOT / "pretrain_gpt_moe.py"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> tuple[str, int] | None:
    """Return the longest layer name that a module belongs to, and its number."""
    names = [name for name in LAYERS if module == name or module.startswith(name + ".")]
    return max(
        ((name, LAYERS[name]) for name in names), key=lambda found: len(found[0]), default=None
    )


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_imports_go_down_the_layers(path: Path) -> None:
    own = layer_of(module_name(path))
    if module_name(path) == "moe_ft":
        assert not imports(path)
        return
    assert own is not None, f"{path} belongs to no layer of docs/architecture.md"
    for imported in imports(path):
        other = layer_of(imported)
        if other is None or other[0] == own[0]:
            continue
        both_base = own[1] == other[1] == LAYERS["moe_ft.errors"]
        assert other[1] < own[1] or both_base, f"{module_name(path)} must not import {imported}"


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_moe_ft_does_not_import_the_training_loop(path: Path) -> None:
    if module_name(path).startswith(NO_MEGATRON_TRAINING):
        assert not [name for name in imports(path) if name.startswith("megatron.training")]


@pytest.mark.parametrize("path", source_files(), ids=module_name)
def test_only_layers_that_may_communicate_import_torch_distributed(path: Path) -> None:
    may = ("megatron.", "moe_ft.engine", "moe_ft.recovery", "moe_ft.elastic", "pretrain_gpt_moe")
    if not module_name(path).startswith(may):
        assert not [name for name in imports(path) if name.startswith("torch.distributed")]


def test_pure_layers_run_without_torch() -> None:
    names = [
        module_name(path)
        for path in source_files()
        if any(
            module_name(path) == pure or module_name(path).startswith(pure + ".") for pure in PURE
        )
    ]
    blocked = "sys.modules.update(dict.fromkeys(('torch', 'megatron.core', 'megatron.training')))"
    code = f"import importlib, sys; {blocked}; [importlib.import_module(n) for n in {names}]"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_megatron_namespace_is_shared() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert [path.name for path in (ROOT / "megatron").iterdir() if path.name[0] not in "._"] == [
        "fault_tolerance"
    ]
