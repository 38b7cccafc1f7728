"""Setup of a replacement, alone: Megatron's own program runs to its first iteration in a world that is fake.

Model, optimizer, data and all process groups are made as at a start, and nothing is communicated. At the same
time the survivors leave their iteration.

While ranks build the optimizer, Megatron all-gathers settings of parameter groups: all ranks get the same
groups, also one whose stage has none for a group. `Gathered` records them as JSON, bit for bit, and answers
from the record in a replacement.
"""

import json
import struct
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron.fault_tolerance.repair.swap import Recipes
from megatron.fault_tolerance.seams.collectives import fake_world, recorded, recording
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Function, Layer, Layers
from moe_ft.cluster.member import LoopPosition, Member, Standing
from moe_ft.cluster.signed_store import SignedStore
from moe_ft.errors import ConfigError, RepairError

_FLOAT = struct.Struct(">d")


class Joining:
    """A replacement until its first iteration. Owned by the training thread."""

    def __init__(self, member: Member, recipes: Recipes) -> None:
        self._member = member
        self._recipes = recipes
        self._groups = Layers()
        self._gather: Function | None = None
        self._gathers_weights = False  # as the others do, with --overlap-param-gather

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make the world fake until `end`."""
        with self._groups, fake_world(get_args()), Layers() as layers:
            # Megatron also makes groups that name a backend.
            make_fake = self._recipes.make_fake
            makers = {"init_process_group": self._make_fake_world, "new_group": make_fake}
            self._groups.put(Layer.REPLACEMENT, makers)
            functions: dict[str, Function] = {
                "set_jit_fusion_options": _compile_nothing,
                "setup_model_and_optimizer": _without_loading,
                "disable_forward_pre_hook": self._keep_hooks,
                "enable_forward_pre_hook": _enable_hooks,
                "train_step": self._with_gather,
                "check_param_hashes_across_dp_replicas": self._check_hashes,
            }
            layers.put(Layer.REPLACEMENT, functions)
            yield

    def follow(self, survivors: LoopPosition) -> None:
        """Do what the survivors do from here on."""
        self._gathers_weights = survivors.gathers_weights

    def end(self) -> None:
        """Make real groups from here on."""
        self._groups.__exit__()

    @property
    def _is_alone(self) -> bool:
        return self._member.standing is Standing.JOINING

    def _make_fake_world(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Make the group of all ranks, for which Megatron asks for a fake backend."""
        default = get_args().distributed_backend
        return self._recipes.make_fake(original, *args, default=default, **kwargs)

    def _keep_hooks(self, original: Function, model: Any, *args: Any, **kwargs: Any) -> None:
        """Have modules gather weights from the first iteration of this loop on, if others do."""
        if self._is_alone and self._gathers_weights:
            # The loop takes the function away next.
            self._gather = get_model_config(model[0]).param_sync_func
        else:
            original(model, *args, **kwargs)

    def _with_gather(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        config = args[5]
        if config.param_sync_func is None:
            config.param_sync_func = self._gather
        return original(*args, **kwargs)

    def _check_hashes(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Leave out the comparison at the beginning of the loop: nothing has been recovered yet."""
        return True if self._is_alone else original(*args, **kwargs)


def _compile_nothing(_: Function, **__: Any) -> None:
    """Leave out what Megatron compiles beforehand, for seconds in which all others wait.

    Functions that the model has are compiled at their first call, in the iteration that is finished after the
    repair: from the compiler's cache on disk, which the process that has died has filled. Random numbers that
    Megatron draws for it do not matter: the recovery brings the state of all generators.
    """


def _enable_hooks(original: Function, model: Any) -> None:
    if not any(chunk.remove_forward_pre_hook_handles for chunk in model):
        original(model)


def _without_loading(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Build model and optimizer; their state comes from a recovery, not from --load."""
    with Patches() as patches:
        for name in ("load", "pretrained_checkpoint"):
            patches.set(get_args(), name, None)
        return original(*args, **kwargs)


class Gathered:
    """Record of what Megatron all-gathers in a start, in the job's store. Owned by the training thread."""

    def __init__(self, store: SignedStore, *, is_joining: bool) -> None:
        self._store = store
        self._has_record = is_joining
        self._keys = (f"gathered_{number}" for number in count())

    def installed(self) -> AbstractContextManager[None]:
        """Record what is all-gathered in this context, or answer it from the record."""
        if self._has_record:
            return recorded(Layer.REPAIR, map(self._look, self._keys))
        return recording(Layer.REPAIR, self._keep)

    def _look(self, key: str) -> list[Any]:
        if (kept := self._store.get(key)) is None:
            raise RepairError(
                f"{key}, which the ranks have told each other at their start, is not in the job's store"
            )
        return from_json(kept)

    def _keep(self, values: list[Any]) -> None:
        key = next(self._keys)
        kept = to_json(values)  # on all ranks: all refuse what cannot be kept
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
