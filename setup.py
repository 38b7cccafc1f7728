"""Finds the packages: `megatron` is a namespace that megatron-core shares, so it has no __init__.py."""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(
        include=[
            *("moe_ft", "moe_ft.*", "kernels"),
            *("megatron.fault_tolerance", "megatron.fault_tolerance.*"),
        ]
    ),
    py_modules=["pretrain_gpt_moe"],
)
