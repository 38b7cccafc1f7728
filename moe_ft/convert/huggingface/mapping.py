"""The interface of a family of models on the Hugging Face hub, and the parts that most families share.

A family says which tensors of Megatron its tensors are, by name, and translates settings. `Settings` are
those of Megatron as a run keeps them (`Identity.fingerprint`): the flag's ``dest`` with dashes, such as
`--num-layers` or `--add-bias-linear`, not always what a command line says. `Config` is the content of
`config.json`.
"""

import json
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from moe_ft.convert.huggingface.config_values import ComparedConfig, ValueRule
from moe_ft.errors import ConfigError

# Flags that a command line does not spell as their `dest` is.
_SPELLED = {
    "--add-bias-linear": "--disable-bias-linear",
    "--layernorm-epsilon": "--norm-epsilon",
    "--layernorm-zero-centered-gamma": "--apply-layernorm-1p",
    "--dsa-indexer-rotate-activation": "--no-dsa-indexer-rotate-activation",
    "--dsa-indexer-scoring-relu": "--no-dsa-indexer-scoring-relu",
}

# Flags that a command line has for False, where None is Megatron's default.
_NEGATED = {
    f"--{flag}": f"--no-{flag}"
    for flag in ("bias-gelu-fusion", "yarn-correction-range-round-to-int")
}

Settings = Mapping[str, Any]
Config = Mapping[str, Any]
Split = Callable[[torch.Tensor], Sequence[torch.Tensor]]
Join = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mapped:
    """A tensor of Megatron, and the tensors of Hugging Face that it is.

    Attributes:
        tensor: its name, as convert/tensors.py lists them, with global numbers of layers and experts.
        shape: of Megatron's tensor, of a single expert, and without padding of the vocabulary. The shapes of
            the others follow from `split`, which is also called with tensors on the meta device.
        names: of the tensors on the hub.
        split: makes them, in the order of names, from Megatron's tensor.
        join: the exact inverse of `split`.
        copies: other names on the hub of the only tensor in `names`. They are written as copies, and on
            reading they may be absent, but must be equal.
        duplicates: other names on the hub of the same tensor, which files may have and need not. They are not
            written, and must be equal, bit for bit.
        other_tensors: other names in Megatron, which differ between its implementations of a layer. A
            checkpoint of Megatron has at least one of the names; one that is written has all.
        is_vocabulary: whether Megatron pads the first dimension (`--make-vocab-size-divisible-by`).
        stack: index and length of the first dimension of the tensors in `names`, where these hold one tensor
            for each expert: `split` makes what is at the index. None for tensors of their own.
        is_either_way: whether files have the tensors transposed or not, which their shapes say.
        instead: what the tensor is in files that have it under other names; it is only read.
    """

    tensor: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    split: Split = field(default=lambda tensor: (tensor,), repr=False)
    join: Join = field(default=lambda tensors: tensors[0], repr=False)
    copies: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    other_tensors: tuple[str, ...] = ()
    is_vocabulary: bool = False
    stack: tuple[int, int] | None = None
    is_either_way: bool = False
    instead: "Mapped | None" = field(default=None, repr=False)


class Family:
    """An architecture of `transformers`, such as MixtralForCausalLM, and its `model_type`.

    Attributes:
        rules: for values of keys that are other ones here than in config_values.py.
        text_key: of the text model in `config.json`, whose settings are a configuration of their own; empty
            if there is nothing else in the model.
        left_out: beginnings of the names of tensors that are no part of the text model.
        is_by_name: whether only --family chooses it, as another family has the same models.
        is_written: whether a model of Megatron can become one; the text part of a larger model cannot.
    """

    architecture: str
    model_type: str
    rules: Mapping[str, ValueRule] = MappingProxyType({})
    text_key: str = ""
    left_out: tuple[str, ...] = ()
    is_by_name: bool = False
    is_written: bool = True

    def names_left_out(self, config: Config) -> tuple[str, ...]:
        """Return beginnings of the names of tensors that are not converted."""
        return self.left_out

    def check(self, settings: Settings) -> None:
        """Raise ConfigError that names the first feature which the family cannot express."""
        self.config(settings)

    def config(self, settings: Settings) -> dict[str, Any]:
        """Return `config.json` without `torch_dtype` and the version; called after `check`."""
        raise NotImplementedError

    def settings(self, config: Config) -> dict[str, Any]:
        """Return Megatron's settings, those that are off included."""
        raise NotImplementedError

    def tensors(self, settings: Settings) -> Iterator[Mapped]:
        """Yield every tensor of the model, layer by layer."""
        raise NotImplementedError


def with_values(config: Config, values: dict[str, Any]) -> Config:
    """Return a configuration with other values, which reads no other key of it than it is asked for."""
    others: Any = config
    return ChainMap(values, others)


def same(
    tensor: str, name: str, shape: Sequence[int], *, others: Sequence[str] = (), **options: Any
) -> Mapped:
    """Return a tensor that is the same in both."""
    return Mapped(
        tensor=tensor, names=(name,), shape=tuple(shape), other_tensors=tuple(others), **options
    )


def stacked(tensor: str, names: Sequence[str], shape: Sequence[int]) -> Mapped:
    """Return a tensor of Megatron that is several of as many rows: with SwiGLU gate above up."""
    return Mapped(
        tensor=tensor,
        names=tuple(names),
        shape=tuple(shape),
        split=lambda whole: whole.chunk(len(names)),
        join=lambda parts: torch.cat(tuple(parts)),
    )


def query_key_value(
    tensor: str,
    names: Sequence[str],
    *,
    heads: int,
    groups: int,
    head_dim: int,
    columns: int = 0,
    has_gate: bool = False,
) -> Mapped:
    """Return `linear_qkv`, whose rows are those of each query group: its queries, its key, its value.

    Args:
        columns: of the weight; 0 for a bias.
        has_gate: whether the gates of a group come after its queries; on the hub each after its query.
    """
    rest = (columns,) if columns else ()
    per_group, of_queries = heads // groups, heads // groups * (1 + has_gate)

    def turned(queries: torch.Tensor, first: int, second: int) -> torch.Tensor:
        """Return queries and gates, which take turns or not, in the other order."""
        both = queries.reshape(groups, first, second, head_dim, *rest).transpose(1, 2)
        return both.reshape(groups, of_queries, head_dim, *rest)

    def split(whole: torch.Tensor) -> Sequence[torch.Tensor]:
        by_group = whole.reshape(groups, of_queries + 2, head_dim, *rest)
        queries, *others = by_group.split((of_queries, 1, 1), dim=1)
        parts = (turned(queries, 2, per_group) if has_gate else queries, *others)
        return tuple(part.reshape(-1, *rest) for part in parts)

    def join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        queries, *others = (part.reshape(groups, -1, head_dim, *rest) for part in parts)
        by_group = (turned(queries, per_group, 2) if has_gate else queries, *others)
        return torch.cat(by_group, dim=1).reshape(-1, *rest)

    rows = groups * (of_queries + 2) * head_dim
    return Mapped(tensor=tensor, names=tuple(names), shape=(rows, *rest), split=split, join=join)


def vocabulary_size(settings: Settings) -> int:
    """Return the number of tokens: --vocab-size of the run, else all rows with padding."""
    size = settings.get("--vocab-size") or settings.get("--padded-vocab-size")
    if not size:
        raise ConfigError(
            "--vocab-size=None: the settings of the run must have the size of its vocabulary, or "
            "--padded-vocab-size. Convert to torch_dist or safetensors."
        )
    return int(size)


def expect(settings: Settings, family: str, values: Mapping[str, Any]) -> None:
    """Refuse settings that a family cannot express.

    Args:
        values: by flag, the value that the family has, or a tuple of several. None, False and 0 are the same.
    """
    for flag, value in values.items():
        allowed, found = _all_of(value), settings.get(flag)
        if not _is_among(found, allowed):
            wanted = " or ".join("off" if not each else str(each) for each in allowed)
            raise ConfigError(
                f"{flag}={found} must be {wanted} for a model of {family}, which has no such feature. "
                "Convert to torch_dist or safetensors, or name another --family."
            )


def expect_config(config: Config, family: str, values: Mapping[str, Any]) -> None:
    """Refuse values in `config.json` that Megatron cannot express.

    Args:
        values: by key, as in `expect`. A key that is absent has the first of its values.
    """
    for key, value in values.items():
        allowed = _all_of(value)
        found = config.get(key, allowed[0])
        if _is_among(found, allowed):
            continue
        if isinstance(config, ComparedConfig):
            config.differences.append(f"{key}={found!r:.60}")
        else:
            raise ConfigError(
                f"config.json has {key}={found}, and of a model of {family} Megatron can express only "
                f"{' or '.join(map(str, allowed))}. There is no conversion of this model."
            )


def _all_of(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _is_among(found: Any, allowed: tuple[Any, ...]) -> bool:
    return any(found == each or (not found and not each) for each in allowed)


def flags_of(settings: Settings) -> list[str]:
    """Return the flags that make a model of the settings; a setting that is None needs none."""
    words = []
    for flag, value in settings.items():
        words_of = _NEGATED if value is False and flag in _NEGATED else _SPELLED
        word = words_of.get(flag, flag)
        if isinstance(value, bool):
            is_negative = word.startswith(("--no-", "--disable-"))
            words += [word] if value is not is_negative else []
        elif value is not None:
            words += [word, *_values(value)]
    return words


def _values(value: Any) -> list[str]:
    """Return the words of a value: a list or tuple of numbers is one word, a list of words is several."""
    if isinstance(value, tuple):
        return [",".join(map(str, value))]
    if not isinstance(value, list | tuple):
        return [str(value)]
    if all(isinstance(each, str) for each in value):
        return list(value)
    return [json.dumps(value, separators=(",", ":"))]
