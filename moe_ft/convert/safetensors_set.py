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
from moe_ft.convert.source import Source
from moe_ft.errors import CorruptStateError
from moe_ft.format.encoding import checksum
from moe_ft.recovery.inspect.experts import summarize_experts

INDEX_NAME = "model.safetensors.index.json"


class SafetensorsSet:
    """Writes the set."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def name_of(self, item: Item) -> str:
        """Return the name of an item in the files."""
        name = f"{item.tensor.unit}/{item.tensor.name}"
        return name if item.kind == "weight" else f"{name}/{item.kind}"

    def write_shard(self, folder: Path, number: int, count: int, items: Sequence[Item]) -> Any:
        """Write and verify one file; return what `finish` needs of it."""
        path = folder / f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        tensors = {self.name_of(item): item.read(self._source) for item in items}
        sums = {name: checksum_of(tensor) for name, tensor in tensors.items()}
        save_file(tensors, path, {"format": "pt", "iteration": str(self._source.iteration)})
        del tensors
        with safe_open(path, framework="pt") as opened:
            wrong = [name for name in sums if checksum_of(opened.get_tensor(name)) != sums[name]]
            wrong += sorted(set(opened.keys()) ^ set(sums))
        if wrong:
            raise CorruptStateError(
                f"{path}: {wrong[0]} is not what was written. Is the disk sound?"
            )
        return {"file": path.name, "names": list(sums), "bytes": sum(i.num_bytes for i in items)}

    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        """Write the index."""
        index = {
            "metadata": {
                "total_size": sum(shard["bytes"] for shard in shards),
                "moe_ft": facts_of(self._source, items),
            },
            "weight_map": {name: shard["file"] for shard in shards for name in shard["names"]},
        }
        path = folder / INDEX_NAME
        path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def facts_of(source: Source, items: Sequence[Item]) -> Mapping[str, Any]:
    """Return where a state comes from, the age of each unit, and what was lost, as JSON values."""
    ages: dict[str, int] = {}
    for item in items:
        unit, age = str(item.tensor.unit), item.tensor.iterations[item.kind]
        ages[unit] = min(age, ages.get(unit, age))
    facts: dict[str, Any] = {
        "iteration": source.iteration,
        "job_id": source.identity.job_id,
        "lineage": source.identity.lineage,
        "strategy": source.identity.strategy,
        "unit_iterations": ages,
    }
    summary = summarize_experts(state.index for state in source.ranks)
    if summary is not None:
        facts |= {
            "lost_tokens": {layer: list(counts) for layer, counts in summary.lost.items()},
            "tokens_not_saved": {layer: list(counts) for layer, counts in summary.missing.items()},
            "plt": summary.plt(summary.lost),
            "plt_not_saved": summary.plt(summary.missing),
        }
    return facts


def checksum_of(tensor: torch.Tensor) -> str:
    """Return the checksum of a tensor's bytes."""
    return checksum(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
