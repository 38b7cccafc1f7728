"""Versions of Megatron: which are tested, and what older ones lack.

Nothing else asks for the version. The check at a start asks the seams themselves (stack.py): the functions
that are wrapped or called, and the parameters by whose place or name that is done. An unknown version whose
seams fit is used, with a line.
"""

import argparse
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.fault_tolerance.seams.stack import SEAMS, Seam
from moe_ft.config.untested import MEGATRON
from moe_ft.errors import ConfigError
from moe_ft.installation import hidden_megatron

OLDEST = (0, 18)
RECOMMENDED = "0.19.2"  # all tests run with it
# `make test-versions` reads this line and runs them; its CHECKOUTS: main, 0.20.0.
WHEELS = ("0.18.2", "0.19.0")
TESTED = (*WHEELS, RECOMMENDED, "0.20.0")

# Arguments and settings that an older version lacks: what that means.
_LATER: dict[str, Any] = {
    "gtp_weight_remat_size": 1,  # since 0.19: ranks that share weights and read different data
    "expert_gtp_weight_remat_size": 1,  # since 0.19
}


def setting(of: argparse.Namespace | Any, name: str) -> Any:
    """Return one of Megatron's arguments, or of its settings of a model, in any version.

    Args:
        name: one that some version lacks.
    """
    return getattr(of, name, _LATER[name])


def later(module: str, name: str | None = None) -> Any:
    """Return a module of a newer Megatron, or what is in it; None if this one lacks it."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks something else
        return None
    return found if name is None else getattr(found, name, None)


def name_of_parameter(function: Any, *names: str) -> str:
    """Return the first of the names that a parameter has had in different versions, which this one has.

    Raises:
        ConfigError: if it has none of them.
    """
    for name in names:
        if name in inspect.signature(function).parameters:
            return name
    raise ConfigError(
        f"megatron-core {installed_version()} does not fit moe_ft: {function.__name__} has no parameter "
        f"{' or '.join(names)}. Install a tested version ({', '.join(TESTED)})."
    )


def installed_version() -> str:
    """Return the version of the Megatron that an import would take, without importing it.

    Raises:
        ConfigError: if there is none.
    """
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ConfigError(
            hidden_megatron()
            or f"megatron.core is not installed. Install megatron-core, for example {RECOMMENDED}, or put a "
            "checkout of Megatron-LM on PYTHONPATH."
        )
    text = (Path(spec.origin).parent / "package_info.py").read_text()
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH) = (\d+)", text, re.MULTILINE))
    return ".".join(parts[name] for name in ("MAJOR", "MINOR", "PATCH"))


def check_oldest() -> None:
    """Raise ConfigError if the Megatron that an import would take is too old, or is not there."""
    version = installed_version()
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"megatron-core {version} is used, and moe_ft needs {oldest} or newer. Install a tested version "
            f"(pip install megatron-core=={RECOMMENDED}), or put a newer checkout of Megatron-LM first on "
            "PYTHONPATH."
        )


def check_seams(*, allow_misfit: bool = False) -> list[str]:
    """Return a line on a version that is not tested; none for one that is.

    Args:
        allow_misfit: return the misfits in lines instead of raising.

    Raises:
        ConfigError: if a seam does not fit, with the names of all that do not.
    """
    version, tested = installed_version(), ", ".join(TESTED)
    remedy = f"Install a tested version ({tested})"
    lines = misfits(f"megatron-core {version}", SEAMS.values(), remedy, allow_misfit=allow_misfit)
    if lines or version in TESTED:
        return lines
    return [
        f"megatron-core {version} is not one of {tested}, with which moe_ft is tested: the "
        "functions that moe_ft uses are there"
    ]


def misfits(package: str, seams: Iterable[Seam], remedy: str, *, allow_misfit: bool) -> list[str]:
    """Return a line on seams that a package does not fit, or raise ConfigError with the remedy; or none."""
    if not (found := "; ".join(filter(None, (each.misfit() for each in seams)))):
        return []
    problem = f"{package} does not fit moe_ft: {found}"
    if not allow_misfit:
        raise ConfigError(f"{problem}. {remedy}, or {MEGATRON.risk}.")
    return [problem]
