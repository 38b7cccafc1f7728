"""A whole model that can be converted, wherever it comes from, and its items.

An item is a tensor in a kind and a type that is asked for; items are written in shards.

conversion.py finds out what a source is; run_model.py, megatron_checkpoint.py and huggingface/release.py are
the kinds of sources.
"""

from abc import ABC, abstractmethod
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_ft.config.flag_table import PATHS
from moe_ft.config.stock_defects import SHIFTED_MASTERS, SHIFTED_REMEDY
from moe_ft.convert.tensors import KINDS, GlobalTensor
from moe_ft.convert.verifying import WrittenFile
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.format.packings import DTYPE_BYTES
from moe_ft.state.global_places import CONTENT_METADATA
from moe_ft.state.slices import DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronState:
    """The parts of a Megatron checkpoint that are no tensors.

    Attributes:
        common: the dictionary that all ranks load.
        rng: place and number of (pipeline, tensor) ranks, and the random numbers of each.
        modules: keys of the states of modules, which are left empty and made again.
        master: key of masters among the state of the optimizer.
    """

    common: Mapping[str, Any]
    rng: Sequence[tuple[tuple[int, int], tuple[int, int], Any]] = ()
    modules: Sequence[str] = ()
    master: str = "param"


def shared_state(
    settings: Mapping[str, Any], *, with_optimizer: bool, **arguments: Any
) -> dict[str, Any]:
    """Return the dictionary that all ranks load, with settings and further values as Megatron's arguments."""
    named = {
        flag.removeprefix("--").replace("-", "_"): value
        for flag, value in settings.items()
        if flag.startswith("--")
    }
    # Megatron would take half a path in the place of the one that is given: --use-checkpoint-args.
    named = {name: value for name, value in named.items() if name not in PATHS}
    samples = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
    named |= {**dict.fromkeys(("iteration", *samples), 0), **arguments}
    named |= {"no_save_optim": not with_optimizer, "no_save_rng": not with_optimizer}
    return {
        "args": Namespace(**{**named, "ckpt_format": "torch_dist"}),
        "checkpoint_version": 3.0,  # the order of rows in linear_qkv, and that arguments are there
        "iteration": named["iteration"],
        "num_floating_point_operations_so_far": 0,
        "content_metadata": dict(CONTENT_METADATA),
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SourceModel:
    """A model in one state, which nothing changes while it is converted. Used by one thread.

    Attributes:
        place: the folder or URL, for messages.
        kind: one of `moe_ft`, `torch_dist` and `hf`.
        iteration: that it is from; 0 if nobody knows.
        signature: checksum of what decides its content.
        settings: Megatron's settings of it, as a fingerprint has them.
        facts: origin of the state and what was lost, as JSON values.
        notes: lines for people on what is not converted.
    """

    place: str
    kind: str
    iteration: int
    signature: str
    settings: Mapping[str, Any] = field(repr=False)
    facts: Mapping[str, Any] = field(repr=False)
    notes: Sequence[str] = ()

    def tensors(self) -> Sequence[GlobalTensor]:
        """Return its tensors, ordered by unit and name."""
        raise NotImplementedError

    def read(self, tensor: GlobalTensor, kind: str) -> torch.Tensor:
        """Return a tensor on the CPU; its weights in their own type, or another kind."""
        raise NotImplementedError

    def megatron_state(self, *, with_optimizer: bool, for_ep: int | None) -> MegatronState:
        """Return what a Megatron checkpoint of it holds besides tensors."""
        raise NotImplementedError


# Choices of --dtype, with safetensors' names.
WEIGHT_DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_COMPARED = 1 << 22  # elements at a time, which copies are made of


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One tensor in one kind, and the type to write it in, by safetensors' name."""

    tensor: GlobalTensor
    kind: str
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size in the destination, without what its format adds."""
        return self.tensor.numel * DTYPE_BYTES[self.dtype]

    def read(self, model: SourceModel) -> torch.Tensor:
        """Return the tensor in the type to write."""
        kind = self.kind
        has_more = "master" in self.tensor.iterations and self.tensor.dtype != "F32"
        if self.dtype == "F32" and kind == "weight" and has_more:
            kind = "master"  # all bits, where they are asked for
        found = model.read(self.tensor, kind)
        if kind == "master" and self.tensor.has_own_weight:
            _check_master(model.place, self.tensor.name, found, model.read(self.tensor, "weight"))
        return found.to(DTYPES[self.dtype]).contiguous()


def _check_master(place: str, name: str, master: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise CorruptStateError unless a master, rounded as optimizers do, is the weight bit for bit."""
    bits = _BITS[weight.element_size()]
    num = 0
    for part, expected in zip(
        master.flatten().split(_COMPARED), weight.flatten().split(_COMPARED), strict=True
    ):
        rounded = part.to(weight.dtype)
        differ = rounded.view(bits) != expected.view(bits)
        # Devices round what is not a number to others of its many forms.
        num += int((differ & ~(rounded.isnan() & expected.isnan())).sum())
    if num:
        raise CorruptStateError(
            f"{place}: the fp32 master of {name} is not its weight, in {num} of {weight.numel()} elements "
            f"after rounding to {weight.dtype}. {SHIFTED_MASTERS}; its moments are then wrong too. Convert "
            "the weights alone, which are right (leave out --dtype fp32, give --what weights); for masters, "
            f"{SHIFTED_REMEDY}."
        )


Shards = Sequence[Sequence[Item]]


def list_items(
    tensors: Iterable[GlobalTensor], *, with_optimizer: bool, dtype: str | None
) -> list[Item]:
    """Return the items of a conversion.

    Args:
        with_optimizer: whether masters and moments are converted too.
        dtype: one of WEIGHT_DTYPES for weights of numbers with a point, None for their own types.
    """
    found = []
    for tensor in tensors:
        written = tensor.dtype if dtype is None or tensor.buffer else WEIGHT_DTYPES[dtype]
        found.append(Item(tensor=tensor, kind="weight", dtype=written))
        if with_optimizer:
            found += _optimizer_items(tensor)
    return found


def _optimizer_items(tensor: GlobalTensor) -> list[Item]:
    kinds = [kind for kind in KINDS if kind != "weight" and kind in tensor.iterations]
    saved = tensor.parts.keys() - {"weight"}
    if absent := sorted(saved - set(kinds)):
        raise ConfigError(
            f"--what=all needs {absent[0]} of {tensor.name}, which did not exist yet when it was saved. "
            "Convert a checkpoint after the first step of the optimizer, or give --what weights."
        )
    return [Item(tensor=tensor, kind=kind, dtype=tensor.dtype_of(kind)) for kind in kinds]


def into_shards(
    items: Iterable[Item], shard_bytes: int, file_of: Callable[[Item], str] = lambda _: ""
) -> list[list[Item]]:
    """Return items in shards of at most some bytes; an item that is larger is a shard of its own.

    Args:
        file_of: returns what items have in common that must be in one file, however large it gets; empty for
            an item that may be anywhere.
    """
    together: dict[object, list[Item]] = {}
    for number, item in enumerate(items):
        together.setdefault(file_of(item) or number, []).append(item)
    shards: list[list[Item]] = []
    room = 0
    for several in together.values():
        num_bytes = sum(item.num_bytes for item in several)
        if not shards or num_bytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1] += several
        room -= num_bytes
    return shards


def read_ahead(items: Iterable[Item], model: SourceModel) -> Iterator[tuple[Item, torch.Tensor]]:
    """Yield items with their tensors, in their order.

    A thread is one item ahead: besides what the caller has, one more is in memory.
    """
    with ThreadPoolExecutor(1, "moe_ft-read") as reader:
        pending: deque[tuple[Item, Future[torch.Tensor]]] = deque()

        def first() -> tuple[Item, torch.Tensor]:
            item, tensor = pending.popleft()
            return item, tensor.result()

        for item in items:
            pending.append((item, reader.submit(item.read, model)))
            if len(pending) > 1:
                yield first()
        while pending:
            yield first()


class Format(ABC):
    """Writer of a destination in one format; by default of all tensors, and any of them in any file."""

    def __init__(self, model: SourceModel) -> None:
        self._model = model

    def select(self, tensors: Sequence[GlobalTensor]) -> Sequence[GlobalTensor]:
        """Return the tensors to write; raise ConfigError if the format cannot hold them."""
        return tensors

    @abstractmethod
    def names_of(self, item: Item) -> Sequence[str]:
        """Return the names of an item in the destination: several tensors, or a part of one."""

    def file_of(self, item: Item) -> str:
        """Return what items have in common that must be in one file, as `into_shards` needs it."""
        return ""

    @abstractmethod
    def write_shard(
        self, folder: Path, number: int, count: int, items: Sequence[Item]
    ) -> WrittenFile:
        """Write the file of one shard."""

    @abstractmethod
    def finish(self, folder: Path, shards: Sequence[Any], items: Sequence[Item]) -> None:
        """Write what makes the shards, with what verifying each has found, one checkpoint."""
