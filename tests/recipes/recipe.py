"""Public recipes: flags of Megatron-LM with which MoE models are trained, each from a file of this folder.

The flags are facts of the named source, with the values that its own scripts would pass. Paths and names of
texts are of no place. table.py says what a start makes of them.
"""

import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One recipe.

    Attributes:
        key: name of its file.
        source: of the flags: repository, commit, file, and the settings of that file.
        renamed: flags of the source that Megatron 0.19 knows by another name, with that name.
        of_newer: flags of the source that Megatron 0.19 does not have and later versions do. The rules of
            a start are asked about them all the same.
        left_out: flags of the source with which Megatron 0.19 does not start, with the reason.
    """

    key: str
    name: str
    gpus: int
    gpus_per_node: int
    source: str
    flags: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    of_newer: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The command line of training, without launcher and script."""
        return shlex.split(self.flags)


def read_recipes() -> list[Recipe]:
    """Return all recipes, those of one model together."""
    return [_read(path) for path in sorted(FOLDER.glob("*.toml"))]


def _read(path: Path) -> Recipe:
    found: dict[str, Any] = tomllib.loads(path.read_text())
    of_newer = tuple(found.pop("of_newer", ()))
    return Recipe(key=path.stem, of_newer=of_newer, **found)
