"""Names of Transformer Engine and Apex that moe_ft relies on, read from their published source.

    python -m tools.published_names [--apex FOLDER]

Nothing of them is imported: their source is parsed. The wheels come from the package registry. It has no Apex
of NVIDIA's (the package of that name is something else), so that a checkout of github.com/NVIDIA/apex is read
if one is named. What is found goes to `published_names.json`, which tests compare with what is relied on.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FACTS = Path(__file__).with_name("published_names.json")
TRANSFORMER_ENGINE, APEX = "transformer-engine", "apex"
VERSIONS = (
    "2.1.0",
    "2.9.0",
    "2.20.2",
)  # the oldest for Megatron's precision-aware optimizer, the newest
APEX_COMMIT = "6424da3b4faa6c8f062da4a48c424fff3f02d42d"
PARAMETERS = "parameters"  # of a function, instead of a pattern

Source = Callable[[str], str | None]  # text of a file, None if there is none
Found = tuple[str, list[str]]  # file, and what is found there
Facts = dict[str, Found | None]  # by name of a reliance; None if its places do not exist


@dataclass(frozen=True, kw_only=True, slots=True)
class Reliance:
    """A piece of foreign source that moe_ft relies on.

    Attributes:
        places: (file, class or function) where it may be; the first that exists counts.
        pattern: matches of it in the statements there, each once, or `PARAMETERS`.
        expected: what is found. If not `is_all`, there may be more.
        used_by: file of moe_ft, and in it.
        change: what to do there if it is not so any more.
        since: first version that must have it.
    """

    package: str
    places: tuple[tuple[str, str], ...]
    pattern: str
    expected: tuple[str, ...]
    is_all: bool = True
    used_by: str
    change: str
    since: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Name among the facts."""
        return f"{self.places[0][1]}: {self.pattern}"

    def problem(self, fact: Found | None) -> str:
        """Return what is wrong with what was found, and what to change; empty if nothing is."""
        file, found = fact or (self.places[0][0], None)
        missing = set(self.expected) - set(found or ())
        extra = set(found or ()) - set(self.expected) if self.is_all else set()
        in_order = self.pattern != PARAMETERS or not self.is_all or found == [*self.expected]
        if found is not None and not missing and not extra and in_order:
            return ""
        return (
            f"{file}, {self.places[0][1]}: expected {[*self.expected]}, found "
            f"{found}. {self.used_by} relies on it. {self.change}"
        )


def read(reliance: Reliance, source: Source) -> Found | None:
    """Return what is found at the first place that exists; None if none does."""
    for file, where in reliance.places:
        text = source(file)
        node = _find(ast.parse(text), where.split(".")) if text else None
        if node is None:
            continue
        if reliance.pattern == PARAMETERS:
            assert isinstance(node, ast.FunctionDef)
            names = node.args
            every = (*names.posonlyargs, *names.args, *names.kwonlyargs)
            return file, [each.arg for each in every]
        lines = "\n".join(_statements(node))
        matches = (match[0] for match in re.finditer(reliance.pattern, lines, re.MULTILINE))
        return file, list(dict.fromkeys(matches))
    return None


def _find(tree: ast.AST, names: list[str]) -> ast.AST | None:
    for name in names:
        children = ast.iter_child_nodes(tree)
        kinds = (ast.ClassDef, ast.FunctionDef)
        found = [each for each in children if isinstance(each, kinds) and each.name == name]
        if not found:
            return None
        tree = found[0]
    return tree


def _statements(tree: ast.AST) -> Iterator[str]:
    """Yield statements on one line each; of those with a body its first line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            text = ast.unparse(node)
            yield text.partition("\n")[0] if hasattr(node, "body") else " ".join(text.split())


def facts(package: str, version: str, source: Source) -> Facts:
    """Return what is found of everything that a version must have."""
    return {
        each.name: read(each, source)
        for each in RELIANCES
        if each.package == package and _number(version) >= each.since
    }


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3])) if "." in version else ()


def from_folder(folder: Path) -> Source:
    """Return the files of a checkout."""
    return lambda name: path.read_text() if (path := folder / name).is_file() else None


def download(folder: Path, version: str | None = None) -> tuple[str, Source]:
    """Return the version and the files of a wheel of Transformer Engine.

    Args:
        version: the newest by default.

    Raises:
        subprocess.CalledProcessError: if the registry does not answer.
    """
    name = TRANSFORMER_ENGINE + (f"=={version}" if version else "")
    words = ("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder))
    command = (sys.executable, "-m", "pip", *words, name)
    subprocess.run(command, check=True, capture_output=True, text=True)
    (wheel,) = folder.glob(f"transformer_engine-{version or '*'}-*.whl")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    return wheel.name.split("-")[
        1
    ], lambda file: archive.read(file).decode() if file in names else None


def known_facts() -> dict[str, Facts]:
    """Return the facts that were written, by package and version."""
    found: dict[str, Facts] = json.loads(FACTS.read_text())
    return found


def problems(of_version: Facts) -> list[str]:
    """Return what is not as moe_ft relies on it."""
    told = (each.problem(of_version[each.name]) for each in RELIANCES if each.name in of_version)
    return [each for each in told if each]


_TE = "transformer_engine/pytorch"
_ADAM = (f"{_TE}/optimizers/fused_adam.py", "FusedAdam")
_MODULE = (f"{_TE}/module/base.py", "TransformerEngineBaseModule")
_GROUPED = f"{_TE}/module/grouped_linear.py"
_STATES = (f"{_TE}/quantization.py", f"{_TE}/fp8.py")


def _te(
    places: tuple[tuple[str, str], ...], pattern: str, *expected: str, **rest: object
) -> Reliance:
    return Reliance(
        package=TRANSFORMER_ENGINE,
        places=places,
        pattern=pattern,
        expected=expected,
        **rest,  # type: ignore[arg-type]
    )


def _method(owner: tuple[str, str], name: str) -> tuple[tuple[str, str], ...]:
    return ((owner[0], f"{owner[1]}.{name}"),)


RELIANCES = (
    # The optimizer
    _te(
        _method(_ADAM, "initialize_state"),
        PARAMETERS,
        *("self", "param", "store_param_remainders"),
        used_by="make_state in moe_ft/state/slices.py",
        change="Call it with its arguments of today, by version, there and in tests/few_bits_adam.py.",
    ),
    _te(
        _method(_ADAM, "initialize_state"),
        r"'(?:exp_avg|exp_avg_sq|master_param|\w+)'(?=, zero_buffer)",
        *("'exp_avg'", "'exp_avg_sq'", "'master_param'"),
        used_by="describe in moe_ft/state/slices.py",
        change="Add or rename the key in _keys and MASTER_KEYS: it would be missing in snapshots.",
    ),
    _te(
        _method(_ADAM, "_initialize_state"),
        r"^if dtype != .*|self\._scales\[param\]\[state_name\] = torch\.ones\(\[1\]|dtype=torch\.int16",
        "if dtype != torch.float32:",
        "self._scales[param][state_name] = torch.ones([1]",
        "dtype=torch.int16",
        used_by="state_scales in moe_ft/state/tensors.py, _keys in moe_ft/state/slices.py",
        change="Read the scales from where they are now; remainders have the type that is found.",
    ),
    _te(
        _method(_ADAM, "__init__"),
        r"self\.store_param_remainders = .*|self\._scales = \{\}",
        "self._scales = {}",
        "self.store_param_remainders = store_param_remainders and master_weights and "
        "(master_weight_dtype == torch.float32)",
        used_by="make_state and _keys in moe_ft/state/slices.py",
        change="Ask the optimizer in the new way whether its masters are remainders.",
    ),
    _te(
        _method(_ADAM, "__init__"),
        PARAMETERS,
        *("exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "master_weight_dtype"),
        *("store_param_remainders", "use_decoupled_grad"),
        is_all=False,
        used_by="tests/few_bits_adam.py, which stands for it",
        change="Give the stand-in the same arguments, and look at what the new ones mean for its state.",
    ),
    _te(
        _method(_ADAM, "step"),
        r"if 'step' in group|if len\(state\) == 0|self\.initialize_state\(p, \w+\)|p\.decoupled_grad\b",
        *(
            "if 'step' in group",
            "if len(state) == 0",
            "self.initialize_state(p, store_param_remainders)",
        ),
        "p.decoupled_grad",
        used_by="moe_ft/state/record.py (steps of groups), make_state in moe_ft/state/slices.py",
        change="Look at when it makes its state: what a recovery has put there must not be made again.",
    ),
    _te(
        ((f"{_TE}/optimizers/fused_sgd.py", "FusedSGD"),),
        r"'momentum_buffer'",
        "'momentum_buffer'",
        used_by="_STATE_KEYS in moe_ft/state/slices.py",
        change="Rename the key there.",
    ),
    # FP8 tensors and FP8 state of modules
    _te(
        (
            (f"{_TE}/tensor/storage/float8_tensor_storage.py", "Float8TensorStorage"),
            (f"{_TE}/tensor/_internal/float8_tensor_base.py", "Float8TensorBase"),
        ),
        r"^(?:_data|_scale_inv): .*?torch\.Tensor|instance\._(?:data|scale_inv) = \w+",
        *("instance._data = data", "instance._scale_inv = fp8_scale_inv"),
        is_all=False,
        used_by="raw_tensor and inverse_scale in moe_ft/state/tensors.py",
        change="Read the attributes that hold the bytes and their scale now.",
    ),
    _te(
        _method(_MODULE, "init_fp8_meta_tensors"),
        PARAMETERS,
        *("self", "recipe"),
        used_by="_wait_for_tensors in moe_ft/state/fp8_state.py",
        change="Wrap the function that makes a module's FP8 tensors in its first forward pass.",
    ),
    _te(
        _method(_MODULE, "init_fp8_metadata"),
        r"self\.init_fp8_meta_tensors\(",
        "self.init_fp8_meta_tensors(",
        used_by="_wait_for_tensors in moe_ft/state/fp8_state.py",
        change="Wrap the function that makes a module's FP8 tensors in its first forward pass.",
    ),
    _te(
        _method(_MODULE, "set_meta_tensor"),
        r"'scaling_\w+'|self\.fp8_meta\[fp8_meta_tensor_key\] = \w+",
        *("'scaling_fwd'", "'scaling_bwd'", "self.fp8_meta[fp8_meta_tensor_key] = recipe_state"),
        used_by="_tensors in moe_ft/state/fp8_state.py",
        change="Change _METAS there: state under another key would be missing in records.",
    ),
    _te(
        tuple((file, "DelayedScalingRecipeState.__init__") for file in _STATES),
        r"self\.\w+ = torch\.(?:ones|zeros|empty)",
        *("self.scale = torch.ones", "self.amax_history = torch.zeros"),
        used_by="_TENSORS in moe_ft/state/fp8_state.py",
        change="Add the new tensor there: it would be missing in records.",
    ),
    _te(
        tuple((file, "DelayedScalingRecipeState.make_quantizers") for file in _STATES),
        r"Float8Quantizer\(self\.scale\[i\], self\.amax_history\[0\]\[i\]",
        "Float8Quantizer(self.scale[i], self.amax_history[0][i]",
        used_by="_copy in moe_ft/state/fp8_state.py, which writes into what quantizers view",
        change="Tell the quantizers of restored scales.",
    ),
    _te(
        _method(_MODULE, "get_extra_state"),
        r"state\['\w+'\](?= = )",
        *("state['scale_fwd']", "state['amax_history_fwd']", "state['scale_bwd']"),
        *("state['amax_history_bwd']", "state['recipe']", "state['extra_fp8_variables']"),
        used_by="moe_ft/state/fp8_state.py, which keeps the tensors among these",
        change="Keep the further state too.",
    ),
    _te(
        _method(_MODULE, "adjust_amax_history_length"),
        r"amax_history\[:length\]",
        "amax_history[:length]",
        used_by="_copy in moe_ft/state/fp8_state.py",
        change="Keep the rows of a history that it keeps when the length changes.",
    ),
    # Grouped experts
    _te(
        ((_GROUPED, "_GroupedLinear"),),
        r"\w*requires_grad = weights\[\w+\]\.requires_grad",
        "weight_requires_grad = weights[0].requires_grad",
        "weights_requires_grad = weights[0].requires_grad",
        used_by="_GROUPED in moe_ft/state/freezing.py",
        change="Freeze experts of a group one by one if it asks each weight.",
    ),
    _te(
        ((_GROUPED, "GroupedLinear"),),
        r"f'(?:weight|bias)\{i\}'",
        *("f'weight{i}'", "f'bias{i}'"),
        used_by="_GROUPED in moe_ft/state/freezing.py, and the names of experts' units",
        change="Change the pattern of names there.",
    ),
    _te(
        ((_GROUPED, "_GroupedLinear.backward"),),
        r"ctx\.wgrad_store\.delay_wgrad_compute\(\)",
        "ctx.wgrad_store.delay_wgrad_compute()",
        used_by="can_freeze in megatron/fault_tolerance/seams/replay.py",
        change="Name the flag there with which weight gradients are not computed in backward.",
        since=(2, 3),
    ),
    _te(
        ((_GROUPED, "GroupedLinear.backward_dw"),),
        PARAMETERS,
        "self",
        used_by="can_freeze in megatron/fault_tolerance/seams/replay.py",
        change="Name the flag there with which weight gradients are not computed in backward.",
        since=(2, 3),
    ),
    # Apex
    Reliance(
        package=APEX,
        places=(("apex/optimizers/fused_adam.py", "FusedAdam.step"),),
        pattern=r"if 'step' in group|if len\(state\) == 0|state\['\w+'\](?= = )",
        expected=(
            *("if 'step' in group", "if len(state) == 0"),
            *("state['exp_avg']", "state['exp_avg_sq']"),
        ),
        used_by="_STATE_KEYS in moe_ft/state/slices.py, moe_ft/state/record.py (steps of groups)",
        change="Change the keys there.",
    ),
    Reliance(
        package=APEX,
        places=(("apex/optimizers/fused_sgd.py", "FusedSGD"),),
        pattern=r"'momentum_buffer'",
        expected=("'momentum_buffer'",),
        used_by="_STATE_KEYS in moe_ft/state/slices.py",
        change="Rename the key there.",
    ),
)


def main() -> None:
    """Read the source, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--apex", type=Path, metavar="FOLDER", help=f"a checkout of {APEX_COMMIT}")
    options = parser.parse_args()
    name = f"{APEX} {APEX_COMMIT}"
    if options.apex:
        found = {name: facts(APEX, APEX_COMMIT, from_folder(options.apex))}
    else:
        found = {name: known_facts()[name]}
    for wanted in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            version, source = download(Path(folder), wanted)
            name = f"{TRANSFORMER_ENGINE} {version}"
            found[name] = facts(TRANSFORMER_ENGINE, version, source)
    rows = (
        f"{json.dumps(name)}: {{\n"
        + ",\n".join(f"{json.dumps(each)}: {json.dumps(fact)}" for each, fact in facts_.items())
        + "\n}"
        for name, facts_ in found.items()
    )
    FACTS.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    for name, of_version in found.items():
        for problem in problems(of_version):
            print(f"{name}: {problem}")


if __name__ == "__main__":
    main()
