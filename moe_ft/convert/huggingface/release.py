"""A model of Hugging Face in a folder or at a URL: its safetensors, read as tensors of Megatron."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, override

import torch

from moe_ft.convert.foreign_files import AnyPath, place_in, read_json, signature_of
from moe_ft.convert.huggingface.config_file import (
    CONFIG_NAME,
    GENERATION_NAME,
    check_values,
    facts_of_generation,
    read_config,
)
from moe_ft.convert.huggingface.mapping import Family, Mapped, with_values
from moe_ft.convert.huggingface.quantized import QuantizedPlace, made_places
from moe_ft.convert.model import MegatronState, SourceModel, shared_state
from moe_ft.convert.safetensors_set import INDEX_NAME, StoredTensor, content_of, list_tensors
from moe_ft.convert.tensors import GlobalTensor, tensor_named
from moe_ft.errors import ConfigError, CorruptStateError

_REMEDY_OF_PREDICTION = " If it predicts one token only, set num_nextn_predict_layers to 0 there."
_REMEDY_OF_TIES = " If both are trained, set tie_word_embeddings to false in its config.json."
_SINGLE_FILE = "model.safetensors"
_FOLLOWS_FROM_CONFIG = ".rotary_emb.inv_freq"  # in files of early versions of transformers


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Release(SourceModel):
    """The model.

    Attributes:
        mapped: by name in Megatron; a tensor with several names has all of them.
        places: by name on the hub.
    """

    family: Family
    mapped: Mapping[str, Mapped] = field(repr=False)
    places: Mapping[str, StoredTensor] = field(repr=False)
    kind: str = "hf"
    iteration: int = 0

    @override
    def tensors(self) -> Sequence[GlobalTensor]:
        return tuple(sorted(self._listed(), key=lambda each: (each.unit, each.name)))

    def _listed(self) -> Iterator[GlobalTensor]:
        experts = int(self.settings.get("--num-experts") or 0)
        for name, mapped in self.mapped.items():
            dtypes = {self.places[each].dtype for each in mapped.names}
            if len(dtypes) > 1:
                raise ConfigError(
                    f"{self.place}: {', '.join(mapped.names)} must have one type, as one tensor of Megatron, "
                    f"and have {sorted(dtypes)}. Save the model in one type."
                )
            tensor = tensor_named(name, mapped.shape, dtypes.pop(), num_experts=experts)
            is_made = any(isinstance(self.places[each], QuantizedPlace) for each in mapped.names)
            kinds = ("weight", "master") if is_made else ("weight",)  # all bits of what is made
            yield replace(tensor, iterations=dict.fromkeys(kinds, self.iteration))

    @override
    def read(self, tensor: GlobalTensor, kind: str) -> torch.Tensor:
        mapped = self.mapped[tensor.name]
        self._check_copies(mapped)
        return mapped.join([self._part(mapped, name, kind) for name in mapped.names])

    def _part(self, mapped: Mapped, name: str, kind: str) -> torch.Tensor:
        place = self.places[name]
        if mapped.stack:
            place = place.at(mapped.stack[0])
        if kind == "weight":
            return place.read(name)
        if isinstance(place, QuantizedPlace):
            return place.numbers(name, torch.float32)
        return place.read(name).float()

    def _check_copies(self, mapped: Mapped) -> None:
        for name in (*mapped.copies, *mapped.duplicates):
            if name in self.places and not self._are_equal(name, mapped.names[0]):
                remedy = _REMEDY_OF_TIES if name in mapped.duplicates else ""
                raise ConfigError(
                    f"{self.place}: {name} and {mapped.names[0]} must be equal, since Megatron has one "
                    f"tensor for both, and are not. There is no conversion of this model.{remedy}"
                )

    def _are_equal(self, name: str, other: str) -> bool:
        """Return whether two tensors have the same type and the same bits."""
        first, second = self._read(name), self._read(other)
        return first.dtype == second.dtype and content_of(first) == content_of(second)

    def _read(self, name: str) -> torch.Tensor:
        return self.places[name].read(name)

    @override
    def megatron_state(self, *, with_optimizer: bool, for_ep: int | None) -> MegatronState:
        common = shared_state(self.settings, with_optimizer=False)
        experts = int(self.settings.get("--num-experts") or 0)
        return MegatronState(common=common, modules=sorted(_module_states(self.mapped, experts)))


def is_release(folder: AnyPath) -> bool:
    """Return whether a folder holds a model of Hugging Face."""
    return (folder / CONFIG_NAME).is_file()


def open_release(folder: AnyPath) -> Release:
    """Return the model in a folder, with every tensor and its shape checked."""
    config, family = read_config(folder)
    index = _read_optional(folder, INDEX_NAME)
    generation = _read_optional(folder, GENERATION_NAME)
    found = _find_places(folder, index)
    left_out = family.names_left_out(
        check_values(str(folder / CONFIG_NAME), config, found.values(), family)
    )
    own = {name: each for name, each in found.items() if not name.startswith(left_out)}
    places, made = made_places(str(folder / CONFIG_NAME), config, own)
    checked = check_values(str(folder / CONFIG_NAME), config, places.values(), family)
    try:
        settings = family.settings(with_values(checked, {"quantization_config": None}))
        listed = list(_at_most(_as_named(family.tensors(settings), places), len(places)))
    except KeyError as error:
        raise ConfigError(
            f"{folder / CONFIG_NAME} must have {error.args[0]} for a model of {family.model_type}, and "
            "lacks it."
        ) from error
    except (ArithmeticError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{folder / CONFIG_NAME} has a value that a model of {family.model_type} cannot have: {error}. "
            "Compare it with the published file."
        ) from error
    _check(folder, listed, places)
    facts = index.get("metadata")
    known = facts.get("moe_ft") if isinstance(facts, dict) else None
    return Release(
        place=str(folder),
        family=family,
        settings=settings,
        facts=(known if isinstance(known, dict) else {}) | facts_of_generation(config, generation),
        signature=signature_of({each.path for each in found.values()} | {folder / CONFIG_NAME}),
        mapped={name: each for each in listed for name in (each.tensor, *each.other_tensors)},
        places=places,
        notes=(*_notes(family, left_out, len(found) - len(own)), *filter(None, [made])),
    )


def _as_named(tensors: Iterator[Mapped], places: Mapping[str, StoredTensor]) -> Iterator[Mapped]:
    """Yield tensors as the files have them, where a family knows two forms."""
    for mapped in tensors:
        yield (mapped.names[0] not in places and mapped.instead) or mapped


def _at_most(tensors: Iterator[Mapped], num_names: int) -> Iterator[Mapped]:
    """Yield tensors up to the first with more names than there are in the files, which `_check` then says."""
    names: set[str] = set()
    for mapped in tensors:
        yield mapped
        names.update(mapped.names)
        if len(names) > num_names:
            return


def _notes(family: Family, left_out: tuple[str, ...], num_left_out: int) -> Iterator[str]:
    if num_left_out:
        part = "TEXT PART ONLY" if family.text_key else "NOT CONVERTED"
        yield (
            f"{part}: {num_left_out} tensors of {family.architecture} are not converted, called "
            f"{' or '.join(f'{each}*' for each in left_out)}: no {family.model_type} that comes back has them"
        )


def _read_optional(folder: AnyPath, name: str) -> dict[str, Any]:
    """Return what is in a file, nothing if it is not there."""
    return read_json(place_in(folder, name, str(folder))) if (folder / name).exists() else {}


def _find_places(folder: AnyPath, index: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the places of all tensors: of the files that the index names, or of all files without one."""
    named, where = index.get("weight_map"), str(folder / INDEX_NAME)
    if named is not None:
        if not isinstance(named, dict):
            raise CorruptStateError(
                f"{where} has a weight_map that is a {type(named).__name__}, and must be an object of names"
            )
        names = list({repr(name): name for name in named.values()}.values())
    elif (folder / _SINGLE_FILE).is_file():  # found by its name, whatever a store lists
        names = [_SINGLE_FILE]
    else:
        names = [path.name for path in folder.glob("*.safetensors")]
    paths = sorted((place_in(folder, name, where) for name in names), key=str)
    if not paths:
        raise ConfigError(
            f"{folder} must hold safetensors, and has no file of them. Save the model with transformers' "
            "save_pretrained."
        )
    found = {name: place for path in paths for name, place in list_tensors(path).items()}
    if lost := sorted(set(named or ()) - set(found)):
        raise CorruptStateError(f"{folder / INDEX_NAME} names {lost[0]}, and its file lacks it")
    return {name: each for name, each in found.items() if not name.endswith(_FOLLOWS_FROM_CONFIG)}


def _check(folder: AnyPath, listed: Sequence[Mapped], places: Mapping[str, StoredTensor]) -> None:
    """Raise ConfigError for the first tensor that is unknown, missing, or of another shape."""
    needed = {name for each in listed for name in each.names}
    known = needed | {name for each in listed for name in (*each.copies, *each.duplicates)}
    for problem, names in (
        ("lacks", sorted(needed - set(places))),
        ("has an unknown tensor:", sorted(set(places) - known)),
    ):
        if names:
            is_prediction = problem == "lacks" and "eh_proj" in names[0]
            others = f" (and {len(names) - 1} others)" if len(names) > 1 else ""
            remedy = _REMEDY_OF_PREDICTION if is_prediction else ""
            raise ConfigError(
                f"{folder} {problem} {names[0]}{others}, by its {CONFIG_NAME}. Convert a checkpoint whose "
                f"tensors are all of the model.{remedy}"
            )
    num_elements = sum(each.numel for each in places.values())
    for mapped in listed:
        if prod(mapped.shape) > num_elements:  # perhaps more than torch can count
            raise ConfigError(
                f"{folder}: {mapped.names[0]} must have {prod(mapped.shape)} elements by {CONFIG_NAME}, and "
                f"all tensors together have {num_elements}."
            )
        parts = mapped.split(torch.empty(mapped.shape, device="meta"))
        for name, part in zip(mapped.names, parts, strict=True):
            stack = (mapped.stack or ())[1:]
            shape, turned = (*stack, *part.shape), (*stack, *part.shape[::-1])
            if places[name].shape not in (shape, turned if mapped.is_either_way else shape):
                raise ConfigError(
                    f"{folder}: {name} must have the shape {shape} by {CONFIG_NAME}, and has "
                    f"{places[name].shape}."
                )


def _module_states(names: Mapping[str, Mapped], num_experts: int) -> Iterator[str]:
    """Yield the keys of all module states that Megatron's implementations of these layers look for."""
    # Megatron saves some weights in several parts, whose names follow that of the weight.
    modules = {
        name.rpartition(".")[0].removesuffix(".weight")
        for name in names
        if name.startswith(("decoder.", "mtp."))
    }
    projection = ".self_attention.linear_proj"
    attention = {
        f"{module.rpartition('.')[0]}.core_attention"
        for module in modules
        if module.endswith(projection)
    }
    for module in modules | attention:
        expert = re.fullmatch(r"(.*\.experts\.experts)\.(\d+)\.(.*)", module)
        if expert is None:
            yield f"{module}._extra_state/shard_0_1"
        else:
            stack, number, rest = expert.groups()
            yield f"{stack}.{rest}._extra_state/shard_{number}_{num_experts}"
