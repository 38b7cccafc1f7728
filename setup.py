"""Finds the packages: `megatron` is a namespace that megatron-core shares, so it has no __init__.py."""

from itertools import groupby
from pathlib import Path

from setuptools import find_namespace_packages, setup

# `moe_ft examples --copy` finds them here in an installation.
SHARE = Path("share/moe_ft")


def shared_files() -> list[tuple[str, list[str]]]:
    """Return what users copy and change: folders of an installation, and the files for each."""
    paths = [path for folder in ("examples", "tools") for path in Path(folder).rglob("*.*")]
    files = sorted(path for path in paths if path.is_file() and path.suffix != ".pyc")
    grouped = groupby([Path("pretrain_gpt_moe.py"), *files], key=lambda path: path.parent)
    return [(str(SHARE / parent), [str(path) for path in of]) for parent, of in grouped]


setup(
    packages=find_namespace_packages(
        include=[
            *("moe_ft", "moe_ft.*", "kernels"),
            *("megatron.fault_tolerance", "megatron.fault_tolerance.*"),
        ]
    ),
    py_modules=["pretrain_gpt_moe"],
    data_files=shared_files(),
)
