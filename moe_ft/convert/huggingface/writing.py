"""Writing a model of Hugging Face: safetensors with the names of the hub, their index, and `config.json`."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, override

import torch

from moe_ft.convert.huggingface.config_file import (
    CONFIG_NAME,
    FAMILIES,
    tokens_of,
    write_generation,
)
from moe_ft.convert.huggingface.mapping import Family, Mapped
from moe_ft.convert.model import Format, Item, SourceModel, read_ahead
from moe_ft.convert.safetensors_set import (
    Description,
    NamedTensor,
    Stack,
    facts_of,
    write_file,
    write_index,
)
from moe_ft.convert.tensors import GlobalTensor
from moe_ft.convert.verifying import WrittenFile
from moe_ft.errors import ConfigError
from moe_ft.format.packings import DTYPES


class HuggingFace(Format):
    """Writes the model."""

    def __init__(self, model: SourceModel, family: str | None) -> None:
        """Choose the family, and map all tensors."""
        if model.kind == "hf":
            raise ConfigError(
                f"--to=hf: {model.place} is a model of Hugging Face. Copy it, or convert to torch_dist."
            )
        super().__init__(model)
        self.family = choose_family(model, family)
        self._mapped = {
            name: each
            for each in self.family.tensors(model.settings)
            for name in (each.tensor, *each.other_tensors)
        }

    @override
    def select(self, tensors: Sequence[GlobalTensor]) -> Sequence[GlobalTensor]:
        by_name = {each.name: each for each in tensors}
        found, lost = [], []
        for mapped in {each.tensor: each for each in self._mapped.values()}.values():
            names = (mapped.tensor, *mapped.other_tensors)
            if there := [by_name[name] for name in names if name in by_name]:
                found.append(there[0])
            else:
                lost.append(mapped.tensor)
        unknown = sorted(by_name.keys() - self._mapped.keys())
        for problem, wrong in (
            ("lacks", lost),
            ("has a tensor that the family does not know:", unknown),
        ):
            if wrong:
                raise ConfigError(
                    f"{self._model.place} {problem} {wrong[0]}"
                    + (f" (and {len(wrong) - 1} others)" if len(wrong) > 1 else "")
                    + f", as a model of {self.family.model_type}. Name another --family, or convert to "
                    "torch_dist or safetensors."
                )
        for each in found:
            mapped = self._mapped[each.name]
            if not _fits(each.shape, mapped):
                raise ConfigError(
                    f"{self._model.place}: {each.name} has the shape {each.shape}, and a model of "
                    f"{self.family.model_type} with its settings {mapped.shape}."
                )
        return found

    @override
    def names_of(self, item: Item) -> Sequence[str]:
        mapped = self._mapped[item.tensor.name]
        return (*mapped.names, *mapped.copies)

    @override
    def file_of(self, item: Item) -> str:
        # The experts of a layer that are stacked on the hub.
        mapped = self._mapped[item.tensor.name]
        return mapped.names[0].rpartition(".")[0] if mapped.stack else ""

    @override
    def write_shard(
        self, folder: Path, number: int, count: int, items: Sequence[Item]
    ) -> WrittenFile:
        described: dict[str, Description] = {}
        for item in items:
            for name, part, _ in self._split(item, torch.empty(item.tensor.shape, device="meta")):
                stack, shape = self._mapped[item.tensor.name].stack, tuple(part.shape)
                described[name] = (
                    Stack(item.dtype, (stack[1], *shape))
                    if stack
                    else Description(item.dtype, shape)
                )
        pieces = (
            each
            for item, whole in read_ahead(items, self._model)
            for each in self._split(item, whole)
        )
        return write_file(folder, number, count, described, pieces, self._model)

    def _split(self, item: Item, whole: torch.Tensor) -> Iterator[NamedTensor]:
        """Yield the tensors on the hub that a tensor of Megatron is, or its parts of those."""
        mapped = self._mapped[item.tensor.name]
        parts = mapped.split(whole[: mapped.shape[0]] if mapped.is_vocabulary else whole)
        index = mapped.stack[0] if mapped.stack else 0
        yield from (NamedTensor(*each, index) for each in zip(mapped.names, parts, strict=True))
        yield from (NamedTensor(name, parts[0]) for name in mapped.copies)

    @override
    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        write_index(folder, shards, facts_of(self._model, items))
        dtypes = [item.dtype for item in items if not item.tensor.buffer]
        config = {
            "architectures": [self.family.architecture],
            "model_type": self.family.model_type,
            **self.family.config(self._model.settings),
            **tokens_of(self._model.facts),
            "torch_dtype": DTYPES[max(set(dtypes), key=dtypes.count)].torch_name,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
        write_generation(folder, self._model.facts)


def _fits(shape: tuple[int, ...], mapped: Mapped) -> bool:
    if mapped.is_vocabulary:
        return shape[1:] == mapped.shape[1:] and shape[0] >= mapped.shape[0]
    return shape == mapped.shape


def _check(family: Family, model: SourceModel) -> None:
    """Refuse a model that a family cannot express, or whose settings are not all known."""
    try:
        family.check(model.settings)
    except KeyError as error:
        raise ConfigError(
            f"{model.place} must say what {error.args[0]} was, and does not. Convert to torch_dist or "
            "safetensors."
        ) from error


def choose_family(model: SourceModel, name: str | None) -> Family:
    """Return the family with a name, or else the only one that can express the model."""
    written = {key: family for key, family in FAMILIES.items() if family.is_written}
    if name is not None:
        if name not in written:
            raise ConfigError(f"--family={name} must be one of {', '.join(sorted(written))}.")
        _check(written[name], model)
        return written[name]
    problems: dict[str, str] = {}
    written = {key: family for key, family in written.items() if not family.is_by_name}
    for model_type, family in written.items():
        try:
            _check(family, model)
        except ConfigError as error:
            problems[model_type] = str(error)
    fitting = sorted(set(written) - set(problems))
    if len(fitting) == 1:
        return written[fitting[0]]
    if fitting:
        raise ConfigError(
            f"--family must be given: {model.place} may be one of {', '.join(fitting)}."
        )
    reasons = "".join(f"\n  {model_type}: {each}" for model_type, each in problems.items())
    raise ConfigError(f"{model.place} must be a model of a known family, and is of none:{reasons}")
