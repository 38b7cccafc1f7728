"""A set of safetensors files with the units' names: model-00001-of-00003.safetensors, ... and an index.

A tensor is called UNIT/NAME, and UNIT/NAME/KIND if it is not the weight. The index, as Hugging Face has it
(model.safetensors.index.json), also says which iteration each unit is from and what was lost.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_ft.convert.model import Item, Model, read_ahead
from moe_ft.convert.safetensors_file import Description, write_tensors
from moe_ft.convert.tensors import GlobalTensor
from moe_ft.convert.verifying import WrittenFile
from moe_ft.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsSet:
    """Writes the set."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def select(self, tensors: Sequence[GlobalTensor]) -> Sequence[GlobalTensor]:
        """Return all tensors, unless they are of a model of Hugging Face, which is such a set already."""
        if self._model.kind == "hf":
            raise ConfigError(
                f"--to=safetensors: {self._model.place} is a set of safetensors. Convert to torch_dist."
            )
        return tensors

    def name_of(self, item: Item) -> str:
        """Return the name of an item in the files."""
        name = f"{item.tensor.unit}/{item.tensor.name}"
        return name if item.kind == "weight" else f"{name}/{item.kind}"

    def write_shard(
        self, folder: Path, number: int, count: int, items: Sequence[Item]
    ) -> WrittenFile:
        """Write one file."""
        described = {
            self.name_of(item): Description(item.dtype, item.tensor.shape) for item in items
        }
        tensors = ((self.name_of(item), tensor) for item, tensor in read_ahead(items, self._model))
        return write_file(folder, number, count, described, tensors, self._model)

    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        """Write the index."""
        write_index(folder, shards, facts_of(self._model, items))


def write_file(
    folder: Path,
    number: int,
    count: int,
    described: Mapping[str, Description],
    tensors: Iterable[tuple[str, torch.Tensor]],
    model: Model,
) -> WrittenFile:
    """Write one file of a set, as `write_tensors` does, with the facts that `write_index` needs."""
    path = folder / f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    metadata = {"format": "pt", "iteration": str(model.iteration)}
    parts = write_tensors(path, described, tensors, metadata)
    num_bytes = sum(each.num_bytes for each in described.values())
    facts = {"file": path.name, "names": list(described), "bytes": num_bytes}
    return WrittenFile(path=path, parts=parts, facts=facts)


def write_index(folder: Path, shards: Sequence[Any], facts: Mapping[str, Any]) -> None:
    """Write the index of a set, with facts on its state."""
    index = {
        "metadata": {"total_size": sum(shard["bytes"] for shard in shards), "moe_ft": facts},
        "weight_map": {name: shard["file"] for shard in shards for name in shard["names"]},
    }
    path = folder / INDEX_NAME
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def facts_of(model: Model, items: Sequence[Item]) -> Mapping[str, Any]:
    """Return where a state is from, the ages of units, and what was lost; if noted before, that."""
    if not model.facts:
        return {}
    ages: dict[str, int] = {}
    for item in items:
        unit, age = str(item.tensor.unit), item.tensor.iterations[item.kind]
        ages[unit] = min(age, ages.get(unit, age))
    return {"unit_iterations": ages, **model.facts}
