"""Packages that moe_ft needs where it runs: the versions that are there, and a way to those that are not.

It looks for packages without importing them, and needs none itself: it answers where nothing else of
moe_ft can be imported. Versions of Megatron that do not fit are megatron/fault_tolerance/seams/versions.py.
"""

import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import moe_ft

# The module of each package that pyproject.toml requires.
MODULES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    **{
        name: name
        for name in (
            *("filelock", "fsspec", "jinja2", "msgspec", "numpy", "psutil", "rich"),
            *("safetensors", "tensorboard", "xxhash"),
        )
    },
}
_MEGATRON = "megatron-core"
_SHOWN = ("torch", _MEGATRON, "transformer-engine")


def missing_packages() -> list[str]:
    """Return the required packages that an import would not find."""
    return [package for package, module in MODULES.items() if _folder_of(module) is None]


def remedy_for(missing: list[str]) -> str:
    """Return a line that names missing packages, and says how to get them."""
    packages = [name for name in missing if name != _MEGATRON]
    parts = [f"moe_ft needs {', '.join(missing)}, which {sys.executable} does not find."]
    if packages:
        parts.append(f"Install: {sys.executable} -m pip install {' '.join(packages)}.")
    if _MEGATRON in missing:
        parts.append(
            hidden_megatron()
            or "Put a checkout of Megatron-LM on PYTHONPATH, or install megatron-core."
        )
    return " ".join(parts)


def hidden_megatron() -> str:
    """Return a line on a module `megatron` that hides all others of this name; empty if there is none."""
    spec = PathFinder.find_spec("megatron")
    if spec is None or spec.origin is None:
        return ""
    return (
        f"{spec.origin} hides Megatron-LM: Python takes the first `megatron` that has an __init__.py, and "
        "those of Megatron-LM and moe_ft have none (if it is a Megatron-LM, it is too old). Rename it, or "
        "start from another folder."
    )


def describe() -> str:
    """Return the version of moe_ft, and those of what it runs on, with their places."""
    lines = [f"moe_ft {moe_ft.__version__} ({_folder_of('moe_ft')})"]
    lines.append(f"Python {sys.version.split()[0]} ({sys.executable})")
    found = versions(_SHOWN)
    lines += [f"{package} {version} ({folder})" for package, (version, folder) in found.items()]
    return "\n".join(lines)


def versions(packages: Iterable[str]) -> dict[str, tuple[str, Path]]:
    """Return the versions of packages that an import would find, and their places."""
    folders = {each: _folder_of(MODULES.get(each, each.replace("-", "_"))) for each in packages}
    return {
        package: (_version_of(package, folder), folder)
        for package, folder in folders.items()
        if folder is not None
    }


def _version_of(package: str, folder: Path) -> str:
    """Return the version of a package; for Megatron that of the folder, which may be a checkout."""
    info = folder / "package_info.py"
    if package == _MEGATRON and info.is_file():
        parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", info.read_text(), re.MULTILINE))
        return ".".join(parts.get(name, "?") for name in ("MAJOR", "MINOR", "PATCH"))
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _folder_of(module: str) -> Path | None:
    """Return the folder from which a module would be imported; None if it is not found."""
    try:
        spec = importlib.util.find_spec(module)  # imports what a dotted name begins with
    except ModuleNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


if __name__ == "__main__":  # what pip has to install next to PyTorch and a Megatron-LM
    print(*(name for name in missing_packages() if name not in ("torch", _MEGATRON)), sep="\n")
