"""The layers of docs/architecture.md, read from the imports in the source."""

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache

import pytest

from tests.unit.source import (
    ROOT,
    Function,
    check_rule,
    definitions,
    module_name,
    product_files,
    tree_of,
)

BASE = (
    "addresses",
    "arithmetic",
    "bars",
    "errors",
    "calls",
    "command_lines",
    "config",
    "units",
    "topology",
    "event_lines",
    "events",
    "failure_domains",
    "faults",
    "free_memory",
    "installation",
    "format",
    "launches",
    "processes",
    "saying",
    "spelling",
    "tables",
    "verdicts",
)

# Layer of each package or module; a file may import its own layer and those with a lower number.
# Two layers with the same number must not import each other.
LAYERS = {
    "pretrain_gpt_moe": 70,
    "megatron.fault_tolerance": 60,
    "moe_ft.cli": 55,
    "moe_ft.commands": 54,
    "moe_ft.__main__": 56,
    "moe_ft.cluster": 51,
    "moe_ft.convert": 52,
    "moe_ft.doctor": 52,
    "moe_ft.loop": 52,
    "moe_ft.recovery": 50,
    "moe_ft.elastic": 50,
    "moe_ft.simulate": 40,
    "moe_ft.engine": 40,
    "moe_ft.files": 25,
    "moe_ft.store": 25,
    "moe_ft.strategies": 35,
    "moe_ft.planning": 30,
    "moe_ft.state": 30,
    "moe_ft.kernels": 20,
    **{f"moe_ft.{name}": 10 for name in BASE},
}
PURE = (
    "moe_ft.planning",
    "moe_ft.strategies",
    "moe_ft.simulate",
    *(f"moe_ft.cluster.{name}" for name in ("law", "membership")),
    *(f"moe_ft.{name}" for name in BASE),
)
NO_MEGATRON_TRAINING = ("moe_ft",)
MAY_COMMUNICATE = (
    "megatron.fault_tolerance",
    "moe_ft.engine",
    "moe_ft.loop",
    "moe_ft.recovery",
    "moe_ft.elastic",
    "moe_ft.convert",  # torch.distributed.checkpoint, in one process
    "moe_ft.cluster",  # the store where ranks meet, and nothing else
    "moe_ft.commands.command_line",  # torchrun's own parser
    "moe_ft.doctor",  # the store where ranks meet, and nothing else
    "pretrain_gpt_moe",
)
# Names of modules above, which are no imports: what starts the training loop lies below it, and flags such as
# Megatron's --spec take the name of a module.
LAUNCHER = "megatron.fault_tolerance.launch.pretraining"
FOUND_BY_NAME = {
    ("moe_ft.commands.run", LAUNCHER),
    ("moe_ft.cluster.target", LAUNCHER),
    ("moe_ft.cluster.target", "megatron.fault_tolerance.program.arguments"),
    *(
        ("moe_ft.cluster.target", f"megatron.fault_tolerance.{name}")
        for name in ("bridge.launch", "bridge.script", "launch.environment")
    ),
    ("moe_ft.cluster.target", "megatron.fault_tolerance.program.model"),
    ("moe_ft.commands.command_line", "megatron.fault_tolerance.program.plan"),
    (
        "moe_ft.convert.huggingface.shared_experts",
        "megatron.fault_tolerance.program.deepseek_layers",
    ),
    (
        "moe_ft.convert.huggingface.query_groups",
        "megatron.fault_tolerance.program.projection_norm",
    ),
}
# Files with imports inside functions: of what may be absent, or of torch, which is slow.
IMPORTS_LATE = (
    "moe_ft/__main__.py",
    "moe_ft/kernels/pack_table.py",
    "moe_ft/commands/command_line.py",
    "moe_ft/commands/convert.py",
    "moe_ft/commands/directory.py",
    "moe_ft/doctor/meeting.py",
    "moe_ft/commands/launch.py",
    "moe_ft/commands/run.py",
    "moe_ft/files/object_store.py",
    "moe_ft/files/storage.py",
    "moe_ft/loop/metrics.py",
)
STRATEGIES = "moe_ft.strategies"
INTERFACE, REGISTRY = f"{STRATEGIES}.interface", f"{STRATEGIES}.registry"
SHARED = f"{STRATEGIES}.rotating"  # by strategies alone


def is_in(module: str, *packages: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in packages)


def layer_of(module: str) -> str | None:
    """Return the most specific layer that a module belongs to."""
    return max((name for name in LAYERS if is_in(module, name)), key=len, default=None)


def parent(name: str, num_parts: int) -> str:
    """Return the first parts of a dotted name, such as the folder of a strategy or a module in it."""
    return ".".join(name.split(".")[:num_parts])


@cache
def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in product_files())


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return what each module of the product imports, by name too: modules, and names in them."""
    return {
        module: frozenset(name for name in _imports(path) if (module, name) not in FOUND_BY_NAME)
        for path in product_files()
        if (module := module_name(path))
    }


def _imports(path: str) -> Iterator[str]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and "." in str(node.value) and node.value in modules():
            yield str(node.value)  # as importlib.import_module takes it


def modules_of(module: str) -> set[str]:
    """Return the modules of the product that a module imports, without the packages around them."""
    names = {parent(name, -1) if name not in imports() else name for name in imports()[module]}
    return {name for name in names if name in imports() and name != module}


def importers(modules: Iterator[str], *imported: str) -> list[str]:
    return [
        f"{module} imports {name}"
        for module in modules
        for name in imports()[module]
        if is_in(name, *imported)
    ]


def may_import(own: str, other: str) -> bool:
    both_base = LAYERS[own] == LAYERS[other] == LAYERS["moe_ft.errors"]
    return own == other or LAYERS[other] < LAYERS[own] or both_base


def test_every_file_belongs_to_a_layer() -> None:
    lost = {module for module in imports() if layer_of(module) is None}
    assert lost == {"moe_ft"}, "give each of these a layer in LAYERS and docs/architecture.md"
    assert not imports()["moe_ft"], "moe_ft/__init__.py imports nothing: everything imports it"


def test_imports_go_down_the_layers() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, names in imports().items()
        for imported in names
        if (own := layer_of(module)) and (other := layer_of(imported))
        if not may_import(own, other)
    ]
    check_rule(wrong, "imports go down the layers of docs/architecture.md only")


def test_modules_import_each_other_in_no_circle() -> None:
    sorter = graphlib.TopologicalSorter({module: modules_of(module) for module in imports()})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"these modules import each other in a circle: {' <- '.join(error.args[1])}")


def test_imports_are_at_the_top_of_their_file() -> None:
    wrong = [
        f"{path}:{node.lineno}"
        for path in product_files()
        if path not in IMPORTS_LATE
        for _, function in definitions(path)
        if isinstance(function, Function)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    check_rule(wrong, "import at the top of the file, or name it in IMPORTS_LATE")


def test_interface_of_strategies_imports_no_implementation() -> None:
    wrong = importers(iter([INTERFACE]), STRATEGIES)
    check_rule(wrong, "the interface of strategies knows none of them")


def test_only_the_registry_imports_strategies() -> None:
    wrong = [
        f"{module} imports {parent(imported, 4)}"
        for module, names in imports().items()
        for imported in names
        if is_in(imported, STRATEGIES) and not is_in(imported, INTERFACE, REGISTRY)
        if not (is_in(imported, SHARED) and is_in(module, STRATEGIES))
        if module != REGISTRY and not is_in(module, parent(imported, 3))
    ]
    check_rule(wrong, f"ask {REGISTRY} instead of one strategy")


def test_moe_ft_does_not_import_the_training_loop() -> None:
    modules = (module for module in imports() if is_in(module, *NO_MEGATRON_TRAINING))
    wrong = importers(modules, "megatron.training", "megatron.fault_tolerance")
    check_rule(wrong, "only megatron/fault_tolerance/ touches megatron.training")


def test_the_loop_of_listeners_imports_no_megatron() -> None:
    modules = (module for module in imports() if is_in(module, "moe_ft.loop"))
    wrong = importers(modules, "megatron")
    check_rule(wrong, "a training loop hands in what needs Megatron: moe_ft/loop/training_loop.py")


def test_only_layers_that_may_communicate_import_torch_distributed() -> None:
    modules = (module for module in imports() if not is_in(module, *MAY_COMMUNICATE))
    wrong = importers(modules, "torch.distributed")
    check_rule(wrong, f"only {', '.join(MAY_COMMUNICATE)} use torch.distributed")


def test_pure_layers_run_without_torch_and_megatron() -> None:
    names = [module for module in imports() if is_in(module, *PURE)]
    blocked = "sys.modules.update(dict.fromkeys(('torch', 'megatron', 'triton')))"
    code = f"import importlib, sys; {blocked}; [importlib.import_module(n) for n in {names}]"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, f"{', '.join(PURE)} are pure Python:\n{done.stderr}"


def test_the_megatron_namespace_is_shared() -> None:
    ours = [path.name for path in (ROOT / "megatron").iterdir() if path.name[0] not in "._"]
    assert ours == ["fault_tolerance"], "megatron-core owns every other name in this namespace"
    assert not (ROOT / "megatron" / "__init__.py").exists(), "it would hide megatron-core"
