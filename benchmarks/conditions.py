"""Conditions under which jobs on a CPU are measured, for the first paragraph of a benchmark's output."""

import os
import platform
from datetime import date
from importlib.metadata import version


def conditions(measured: str) -> str:
    """Return the conditions of a benchmark that starts now.

    Args:
        measured: sentences about what is measured.
    """
    return f"{ranks_on_cpu()}. {date.today()}. {measured} {versions()}."


def ranks_on_cpu() -> str:
    """Return what the ranks of a job share, and how busy it is now."""
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, one thread a rank, gloo, no GPU; load at the start {load:.1f}"


def versions() -> str:
    """Return the versions of what all jobs run on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core"))
    return f"Python {platform.python_version()}, {packages}"
