"""Quantized weights on the hub, read as the numbers that they stand for: FP8 in blocks, and MXFP4.

A weight and its scales are two tensors in the files. Here they are one, in BF16, with the name that the
weight has in a model that is not quantized. Rows are made a block at a time: in memory are the quantized
tensor, its scales, and what is made of them. Nothing is quantized again: what is written is in the type that
is asked for.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, override

import torch

from moe_ft.convert.huggingface.mapping import Config
from moe_ft.convert.safetensors_set import StoredTensor
from moe_ft.errors import ConfigError, CorruptStateError

_FP8, _MADE = "F8_E4M3", "BF16"
_SCALE_TYPES = ("F32", "BF16")
_FORMATS = ("e4m3", "float8_e4m3fn")
# Of four bits: the last one is the sign. Two are in a byte, the first in its lower half.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat((_FP4, -_FP4))
_EXPONENT_OF_ONE, _NO_NUMBER = 127, 255
_MX_BLOCK = 32  # numbers that share a scale
_ROWS = 1024  # made at a time
_REMEDY = "Copy the files again, or convert a checkpoint in bf16."

Places = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class QuantizedPlace(StoredTensor):
    """A weight in few bits and its scales; `shape` and `dtype` are those of the numbers.

    Attributes:
        stored: what is in the file.
        scales: of it.
    """

    stored: StoredTensor
    scales: StoredTensor

    @override
    def read(self, name: str) -> torch.Tensor:
        return self.numbers(name, torch.bfloat16)

    def numbers(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers, which are computed in fp32, in a type."""
        raise NotImplementedError

    def _check_scales(self, name: str, are_numbers: bool) -> None:
        if not are_numbers:
            raise CorruptStateError(
                f"{self.scales.path}: scales of {name} are no finite numbers, and so its weights are none. "
                + _REMEDY
            )


@dataclass(frozen=True, slots=True)
class Fp8Place(QuantizedPlace):
    """Numbers of 8 bits with a scale for each block of rows and columns.

    Attributes:
        block: rows and columns of a block; those at the end of a tensor may be smaller.
    """

    block: tuple[int, int]

    @override
    def numbers(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, scales = self.stored.read(name), self.scales.read(name).float()
        self._check_scales(name, bool(scales.isfinite().all()))
        rows, columns = self.block
        made = torch.empty(self.shape, dtype=dtype)
        length = self.shape[-1]
        for weights, by_row, out in zip(
            stored.split(rows, dim=-2), scales.split(1, dim=-2), made.split(rows, -2), strict=True
        ):
            out.copy_(weights.float() * by_row.repeat_interleave(columns, dim=-1)[..., :length])
        return made

    @override
    def at(self, index: int) -> StoredTensor:
        stored, scales = self.stored.at(index), self.scales.at(index)
        return Fp8Place(
            self.dtype, stored.shape, self.path, stored.start, stored, scales, self.block
        )


@dataclass(frozen=True, slots=True)
class Mxfp4Place(QuantizedPlace):
    """Numbers of 4 bits with a power of two for each 32 of them, transposed: [..., columns, rows]."""

    @override
    def numbers(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        stored, scales = self.stored.read(name), self.scales.read(name)
        self._check_scales(name, not bool((scales == _NO_NUMBER).any()))
        made = torch.empty((*self.shape[:-2], self.shape[-1], self.shape[-2]), dtype=dtype)
        for packed, exponents, out in zip(
            stored.split(_ROWS, dim=-3),
            scales.split(_ROWS, dim=-2),
            made.split(_ROWS, dim=-2),
            strict=True,
        ):
            pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
            powers = exponents.int()[..., None] - _EXPONENT_OF_ONE
            out.copy_(torch.ldexp(_FP4[pairs.int()], powers).flatten(-2))
        return made.mT

    @override
    def at(self, index: int) -> StoredTensor:
        stored, scales = self.stored.at(index), self.scales.at(index)
        return Mxfp4Place(self.dtype, self.shape[1:], self.path, stored.start, stored, scales)


def made_places(path: str, config: Config, places: Places) -> tuple[Places, str]:
    """Return the places of a model's tensors as if it were not quantized, and a line on that for people.

    Args:
        path: of the configuration, for messages.
        config: whose `quantization_config` says how tensors are quantized; no line if it does not.

    Raises:
        ConfigError: for another way, and for weights or scales that have not each other or do not fit.
    """
    made = reader_of(path, config)
    found = dict(made(path, places)) if made else dict(places)
    for name, place in found.items():
        if place.dtype.startswith("F8"):
            raise ConfigError(
                f"{place.path}: {name} has the type {place.dtype} and no scales, so that nobody knows its "
                f"numbers: {path} must say in quantization_config how it is quantized. {_REMEDY}"
            )
    if made is None:
        return found, ""
    method = config["quantization_config"]["quant_method"]
    num = sum(isinstance(each, QuantizedPlace) for each in found.values())
    return found, (
        f"{num} tensors were in {method} and are {_MADE} now (--dtype fp32: all bits): neither "
        "Megatron's model nor what becomes of it is quantized"
    )


def reader_of(
    path: str, config: Config
) -> Callable[[str, Places], Iterator[tuple[str, StoredTensor]]] | None:
    """Return what yields the places for a `quantization_config`; None without one.

    Raises:
        ConfigError: if it is of a kind that is not known.
    """
    given = config.get("quantization_config")
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else None
    if method == "mxfp4":
        return _mxfp4
    if method != "fp8":
        raise _refusal(path, "quant_method", method, "fp8 or mxfp4")
    block = given.get("weight_block_size")
    is_block = isinstance(block, list) and len(block) == 2
    if not is_block or not all(type(each) is int and each > 0 for each in block):
        raise _refusal(path, "weight_block_size", block, "the rows and columns of a block")
    if given.get("fmt", _FORMATS[0]) not in _FORMATS:
        raise _refusal(path, "fmt", given["fmt"], " or ".join(_FORMATS))
    if given.get("activation_scheme", "dynamic") != "dynamic":
        raise _refusal(path, "activation_scheme", given["activation_scheme"], "dynamic")
    return lambda where, places: _fp8(where, places, (block[0], block[1]))


def _refusal(path: str, key: str, value: Any, rule: str) -> ConfigError:
    return ConfigError(
        f"{path} has quantization_config with {key}={value!r:.100}, and conversions read only {rule}. "
        "Convert a checkpoint in bf16, which most publishers have too, or have transformers write one."
    )


def _fp8(path: str, places: Places, block: tuple[int, int]) -> Iterator[tuple[str, StoredTensor]]:
    ending = "_scale_inv"
    for name, place in places.items():
        if place.dtype == _FP8 and len(place.shape) > 1:
            shape = (*place.shape[:-2], *map(ceil, _ratios(place.shape[-2:], block)))
            scales = _scales_of(path, places, f"{name}{ending}", name, shape, _SCALE_TYPES)
            yield name, Fp8Place(_MADE, place.shape, place.path, place.start, place, scales, block)
        elif not name.endswith(ending):
            yield name, place
        elif places.get(name.removesuffix(ending), place).dtype != _FP8:
            raise ConfigError(
                f"{place.path} has {name} without a tensor of the type {_FP8} that has these scales, by "
                f"{path}. {_REMEDY}"
            )


def _ratios(shape: tuple[int, ...], block: tuple[int, int]) -> Iterator[float]:
    return (length / size for length, size in zip(shape, block, strict=True))


def _mxfp4(path: str, places: Places) -> Iterator[tuple[str, StoredTensor]]:
    weight, ending = "_blocks", "_scales"
    for name, place in places.items():
        own = name.removesuffix(weight)
        if own != name:
            if place.dtype != "U8" or len(place.shape) < 3 or place.shape[-1] * 2 != _MX_BLOCK:
                raise ConfigError(
                    f"{place.path}: {name} must be of the type U8 with blocks of {_MX_BLOCK // 2} bytes, and "
                    f"is {place.dtype} with the shape {place.shape}. {_REMEDY}"
                )
            *outer, rows, blocks = place.shape[:-1]
            scales = _scales_of(path, places, f"{own}{ending}", name, place.shape[:-1], ("U8",))
            shape = (*outer, blocks * _MX_BLOCK, rows)
            yield own, Mxfp4Place(_MADE, shape, place.path, place.start, place, scales)
        elif not name.endswith(ending):
            yield name, place
        elif f"{name.removesuffix(ending)}{weight}" not in places:
            raise ConfigError(
                f"{place.path} has {name} without the blocks of it, by {path}. {_REMEDY}"
            )


def _scales_of(
    path: str,
    places: Places,
    name: str,
    weight: str,
    shape: tuple[int, ...],
    types: tuple[str, ...],
) -> StoredTensor:
    found = places.get(name)
    if found is None:
        raise ConfigError(
            f"{places[weight].path} must have {name}, the scales of {weight} by {path}, and no file has it. "
            f"{_REMEDY}"
        )
    if found.shape != shape or found.dtype not in types:
        raise ConfigError(
            f"{found.path}: {name} must have the shape {shape} and the type {' or '.join(types)}, as scales "
            f"of {weight} by {path}, and has {found.shape} and {found.dtype}. {_REMEDY}"
        )
    return found
