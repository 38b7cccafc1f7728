"""Finds the packages: `megatron` is a namespace that megatron-core shares, so it has no __init__.py."""

import sys
from itertools import groupby
from pathlib import Path

from setuptools import find_namespace_packages, setup

sys.path.insert(0, str(Path(__file__).parent))  # pip does not
from moe_ft.commands.examples import SHARE, shipped_files  # noqa: E402

setup(
    packages=find_namespace_packages(
        include=[
            *("moe_ft", "moe_ft.*"),
            *("megatron.fault_tolerance", "megatron.fault_tolerance.*"),
        ]
    ),
    py_modules=["pretrain_gpt_moe"],
    data_files=[
        (str(SHARE / parent), [str(path) for path in of])
        for parent, of in groupby(sorted(shipped_files()), key=lambda path: path.parent)
    ],
)
