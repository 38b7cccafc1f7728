"""A set of safetensors files with the units' names: model-00001-of-00003.safetensors, ... and an index.

A tensor is called UNIT/NAME, and UNIT/NAME/KIND if it is not the weight. The index, as Hugging Face has it
(model.safetensors.index.json), also says which iteration each unit is from and what was lost.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_ft.convert.items import Item
from moe_ft.convert.model import Model
from moe_ft.convert.tensors import GlobalTensor
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.format.encoding import checksum

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

    def write_shard(self, folder: Path, number: int, count: int, items: Sequence[Item]) -> Any:
        """Write and verify one file; return what `finish` needs of it."""
        tensors = {self.name_of(item): item.read(self._model) for item in items}
        return write_file(folder, number, count, tensors, self._model)

    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        """Write the index."""
        write_index(folder, shards, facts_of(self._model, items))


def write_file(
    folder: Path, number: int, count: int, tensors: dict[str, torch.Tensor], model: Model
) -> dict[str, Any]:
    """Write and verify one file of a set; return what `write_index` needs of it. Empties `tensors`."""
    path = folder / f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    sums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    save_file(tensors, path, {"format": "pt", "iteration": str(model.iteration)})
    tensors.clear()
    with safe_open(path, framework="pt") as opened:
        wrong = [name for name in sums if checksum_of(opened.get_tensor(name)) != sums[name]]
        wrong += sorted(set(opened.keys()) ^ set(sums))
    if wrong:
        raise CorruptStateError(f"{path}: {wrong[0]} is not what was written. Is the disk sound?")
    return {"file": path.name, "names": list(sums), "bytes": num_bytes}


def write_index(folder: Path, shards: Sequence[Any], facts: Mapping[str, Any]) -> None:
    """Write the index of a set, with facts on its state."""
    index = {
        "metadata": {"total_size": sum(shard["bytes"] for shard in shards), "moe_ft": facts},
        "weight_map": {name: shard["file"] for shard in shards for name in shard["names"]},
    }
    path = folder / INDEX_NAME
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def facts_of(model: Model, items: Sequence[Item]) -> Mapping[str, Any]:
    """Return where a state comes from, the age of each unit, and what was lost, as JSON values.

    A state that was converted before has the ages that were noted then.
    """
    if not model.facts:
        return {}
    ages: dict[str, int] = {}
    for item in items:
        unit, age = str(item.tensor.unit), item.tensor.iterations[item.kind]
        ages[unit] = min(age, ages.get(unit, age))
    return {"unit_iterations": ages, **model.facts}


def checksum_of(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes."""
    return checksum(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
