"""Values that all ranks tell each other while they build the optimizer: a replacement builds its own alone.

Megatron gives all ranks the same groups of parameters, also one whose stage has none for a group. What ranks
say are settings of these groups: numbers, texts and tuples of them. They are kept as JSON, bit for bit.
"""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import ConfigError, RepairError

_FLOAT = struct.Struct(">d")


class Gathered:
    """The values of one start, in the job's store. Owned by the training thread."""

    def __init__(self, store: SignedStore, *, is_replacement: bool) -> None:
        """Prepare.

        Args:
            store: of the job; its token is known when ranks build the optimizer.
            is_replacement: whether this process reads what the others have gathered at their start.
        """
        self._store, self._is_replacement = store, is_replacement
        self._count = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Keep what the ranks tell each other in this context, or get it from there."""
        with Patches() as patches:
            patches.wrap(dist, "all_gather_object", self._gather)
            yield

    def _gather(
        self, original: Callable[..., None], values: list[Any], value: Any, group: Any = None
    ) -> None:
        if group is not None:
            original(values, value, group)
            return
        key = f"gathered_{self._count}"
        self._count += 1
        if self._is_replacement:
            if (kept := self._store.get(key)) is None:
                raise RepairError(
                    f"{key}, which the ranks have told each other at their start, is not in the job's store"
                )
            values[:] = from_json(kept)
            return
        original(values, value)
        kept = to_json(values)  # on all ranks, so that all refuse what cannot be kept
        if dist.get_rank() == 0:
            self._store.set(key, kept)


def to_json(values: Sequence[Any]) -> dict[str, Any]:
    """Return the values of all ranks as JSON: each different one once, and which one each rank has.

    Raises:
        ConfigError: if JSON cannot carry one of them bit for bit.
    """
    places: dict[str, int] = {}
    of_rank = [places.setdefault(json.dumps(_plain(each)), len(places)) for each in values]
    return {"values": [json.loads(text) for text in places], "of_rank": of_rank}


def from_json(kept: dict[str, Any]) -> list[Any]:
    """Return the values that `to_json` was given."""
    return [_restored(kept["values"][place]) for place in kept["of_rank"]]


def _plain(value: Any) -> Any:
    """Return a value as JSON, with its type where JSON has none for it."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": _FLOAT.pack(value).hex()}
    if kind in (list, tuple):
        return {kind.__name__: [_plain(each) for each in value]}
    if kind is dict:
        return {"dict": [[_plain(key), _plain(each)] for key, each in value.items()]}
    raise ConfigError(
        f"--moe-ft-repair=auto keeps what ranks tell each other while they build the optimizer, and {value!r}"
        f" is a {kind.__name__}: only numbers, texts, lists, tuples and dicts of them can be kept. Leave the "
        "flag out."
    )


def _restored(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return _FLOAT.unpack(bytes.fromhex(inner))[0]
    if kind == "dict":
        return {_restored(key): _restored(each) for key, each in inner}
    restored = [_restored(each) for each in inner]
    return tuple(restored) if kind == "tuple" else restored
