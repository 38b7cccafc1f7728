"""Scripts and modules that ranks run, with their arguments, as Python's own command line has them."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

USAGE = "moe_ft keep [--preload MODULE]... [--] SCRIPT ARGS... | -m MODULE ARGS..."
# These take seconds to import. A script's own modules may need Megatron as moe_ft has wrapped it.
PRELOADED = (
    "megatron.fault_tolerance.launch.pretraining",  # with torch, Megatron and moe_ft
    "megatron.core.tokenizers.text.text_tokenizer",
    "transformer_engine.pytorch",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A script or a module to run."""

    words: tuple[str, ...]  # as they follow `python` on a command line
    preload: tuple[str, ...]  # modules to import before ranks are forked

    @property
    def is_module(self) -> bool:
        """True for `-m MODULE`."""
        return self.words[0] == "-m"

    @property
    def name(self) -> str:
        """The path of the script, or the name of the module."""
        return self.words[self.is_module]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Its arguments."""
        return self.words[1 + self.is_module :]

    @property
    def first_path(self) -> str:
        """The folder that Python puts first on the path of imports."""
        return os.getcwd() if self.is_module else _folder_of(self.name)

    @property
    def first_path_of_imports(self) -> str:
        """The folder in which a Megatron of the user's own may lie: that of the script which trains."""
        is_run = self.is_module and self.name == "moe_ft" and self.arguments[:1] == ("run",)
        script = self.arguments[1] if is_run and len(self.arguments) > 1 else "-"
        return self.first_path if script.startswith("-") else _folder_of(script)


def _folder_of(script: str) -> str:
    return os.path.dirname(os.path.realpath(script))


def read_target(words: Sequence[str]) -> Target:
    """Read the command line after `keep`; end the process with exit code 2 if it names nothing to run."""
    rest, preload = list(words), list[str]()
    while rest[:1] == ["--preload"] and len(rest) > 1:
        preload += rest[1:2]
        del rest[:2]
    if rest[:1] == ["--"]:
        del rest[:1]
    if not rest or (rest[0].startswith("-") and (rest[0] != "-m" or len(rest) < 2)):
        given = f"{rest[0]} is no script" if rest else "there is no script"
        _refuse(f"{given}. Write {USAGE}")
    if rest[0] != "-m" and not Path(rest[0]).is_file():
        _refuse(f"{rest[0]} is no file. Give the path of the pretraining script: {USAGE}")
    target = Target(words=tuple(rest), preload=(*PRELOADED, *preload))
    for name in preload:
        _check_is_there(name, target.first_path_of_imports)
    return target


def _check_is_there(name: str, folder: str) -> None:
    """Refuse a module that cannot be found; whether it can be imported is seen in the zygote."""
    sys.path.insert(0, folder)
    try:
        is_there = all(map(str.isidentifier, name.split("."))) and _is_found(name)
    finally:
        sys.path.remove(folder)
    if not is_there:
        _refuse(
            f"--preload={name} must name a module that Python finds from {folder} or PYTHONPATH. Correct the "
            "name, or leave the flag out: ranks import what they need themselves"
        )


def _is_found(name: str) -> bool:
    """Return whether a module is there, without importing its packages."""
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package)
    while spec is not None and rest:
        part, _, rest = rest.partition(".")
        package, folders = f"{package}.{part}", spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(package, folders)
    return spec is not None


def _refuse(problem: str) -> NoReturn:
    print(f"error: moe_ft keep: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)
