"""Scripts and modules that ranks run, with their arguments, as Python's own command line has them."""

import importlib.util
import os
from dataclasses import dataclass
from importlib.machinery import PathFinder

# These take seconds to import. A script's own modules may need Megatron as moe_ft has wrapped it.
PRELOADED = (
    "megatron.fault_tolerance.launch.pretraining",  # with torch, Megatron and moe_ft
    "megatron.fault_tolerance.program.arguments",  # with Megatron's data sets
    "megatron.fault_tolerance.program.model",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "encodings.idna",  # of names of hosts, to which ranks connect
    "megatron.core.models.mimo.optimizer",  # Megatron's training imports it when it builds an optimizer
    "transformer_engine.pytorch",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A script or a module to run."""

    words: tuple[str, ...]  # as they follow `python` on a command line
    preload: tuple[str, ...] = PRELOADED  # modules to import before ranks are forked

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


def is_found(name: str) -> bool:
    """Return whether a module is there, without importing its packages."""
    if not all(map(str.isidentifier, name.split("."))):
        return False
    package, _, rest = name.partition(".")
    spec = importlib.util.find_spec(package)
    while spec is not None and rest:
        part, _, rest = rest.partition(".")
        package, folders = f"{package}.{part}", spec.submodule_search_locations
        spec = None if folders is None else PathFinder.find_spec(package, folders)
    return spec is not None
