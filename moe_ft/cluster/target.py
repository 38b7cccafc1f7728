"""Scripts and modules that ranks run, with their arguments, as Python's own command line has them.

Flags of moe_ft in front of a script of `moe_ft run` mean a job of Megatron-Bridge, whose scripts refuse or
ignore flags that they do not know.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder

from moe_ft.command_lines import FLAG_PREFIX, flags_of_moe_ft
from moe_ft.errors import ConfigError

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
BRIDGE = "megatron.bridge.training.pretrain"
RUNNER_OF_BRIDGE = "megatron.fault_tolerance.bridge.script"
# Bridge takes functions of Megatron by name when it is imported: those are replaced before.
BEFORE_BRIDGE = "megatron.fault_tolerance.launch.environment:prepare_environment"
OF_BRIDGE = (
    BRIDGE,
    "megatron.bridge.training.gpt_step",
    "megatron.fault_tolerance.bridge.launch",
    RUNNER_OF_BRIDGE,
)
RUN = ("-m", "moe_ft", "run")


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A script or a module to run."""

    words: tuple[str, ...]  # as they follow `python` on a command line
    # Modules to import before ranks are forked, and functions to call: MODULE:FUNCTION.
    preload: tuple[str, ...] = PRELOADED

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
        script = self._words_of_run[1][:1]
        is_file = script and not script[0].startswith("-")
        return _folder_of(script[0]) if is_file else self.first_path

    @property
    def is_of_bridge(self) -> bool:
        """True for a job of Megatron-Bridge."""
        return bool(self._words_of_run[0])

    @property
    def arguments_of_script(self) -> Sequence[str]:
        """Arguments of the script of `moe_ft run`."""
        script = self._words_of_run[1]
        return script[1 + (tuple(script[:1]) == ("-m",)) :]

    @property
    def _words_of_run(self) -> tuple[Sequence[str], Sequence[str]]:
        """Flags in front of the script of `moe_ft run`, and the script with its arguments."""
        is_run = self.words[: len(RUN)] == RUN
        return split_flags(self.words[len(RUN) :]) if is_run else ((), ())

    def finds(self, name: str) -> bool:
        """Return whether ranks find a module, without importing its packages."""
        folder = self.first_path_of_imports
        sys.path.insert(0, folder)
        try:
            return is_found(name)
        finally:
            sys.path.remove(folder)


def split_flags(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the flags of moe_ft in front of a script, which `--` ends, and the script with its arguments.

    Raises:
        ConfigError: if there are such flags, and no `--`.
    """
    if not words or not words[0].startswith(FLAG_PREFIX):
        return (), words
    if "--" not in words:
        raise ConfigError(
            f"{words[0].partition('=')[0]} is in front of the script, and no `--` ends the flags of moe_ft. "
            "For a job of Megatron-Bridge write: moe_ft run FLAGS... -- SCRIPT ARGS...; for a Megatron-LM "
            "script put the flags after the script."
        )
    end = words.index("--")
    return words[:end], words[end + 1 :]


def check_bridge(arguments: Sequence[str], *, is_there: bool) -> None:
    """Raise ConfigError if flags in front of a script cannot mean a job of Megatron-Bridge.

    Args:
        arguments: of the script.
        is_there: whether Megatron-Bridge is installed.
    """
    late = flags_of_moe_ft(arguments)
    if late:
        raise ConfigError(
            f"{', '.join(late)} after the script of a Megatron-Bridge job would be refused or ignored by the "
            "script: Bridge knows no flags of moe_ft. Put them in front of the script, before `--`."
        )
    if not is_there:
        raise ConfigError(
            f"flags of moe_ft in front of a script mean a job of Megatron-Bridge, and {sys.executable} finds "
            f"no {BRIDGE}. Install Megatron-Bridge (docs/bridge.md), or use its container; for a Megatron-LM "
            "script put the flags after the script."
        )


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
