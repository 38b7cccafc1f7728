"""New backends under the process groups that Megatron has made, which stay the same objects.

The transports make backends, in the way in which each group was made: over the same kinds, with the same
options. A replacement makes its groups in a fake world, and has to know what they would be.

torch's Python functions only add a backend to a group, which keeps all earlier ones until it ends, with their
threads and descriptors. At its end a group calls `ProcessGroup::release_resources`, which lets go of its
backends and its store. The function is in torch's public headers and libraries, and only lacks a name in
Python: ctypes calls it here. It has no arguments. A group has no backend then, as before its first one.
"""

import ctypes
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args
from torch.distributed.distributed_c10d import (
    Backend,
    BackendConfig,
    PrefixStore,
    _get_default_group,
    _set_pg_timeout,
    _world,
)

from megatron.fault_tolerance.repair.links import BackendPlace, GroupTransport, Links, Maker
from moe_ft.errors import ConfigError

FAKE = "fake"
_RELEASE = "_ZN4c10d12ProcessGroup17release_resourcesEv"
_COUNT_OF_ROUND = 1_000_000
_RELEASING_THREADS = 16
CONNECT_S = 30.0  # for all ranks to make the connections of a group

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The way in which a group was made."""

    backend: str  # as torch was asked for it, such as "nccl" or "cpu:gloo,cuda:nccl"
    options: Any = None  # None for its defaults

    @property
    def by_device(self) -> Mapping[str, str]:
        """Backends by the type of the device whose tensors they exchange."""
        return _by_device(self.backend)

    @property
    def configuration(self) -> str:
        """Backends by device, as torch writes them."""
        return str(BackendConfig(Backend(self.backend)))

    @property
    def fake(self) -> str:
        """Fake backends for the same devices: torch chooses by them where Python objects are exchanged."""
        return ",".join(f"{device}:{FAKE}" for device in self.by_device)


@functools.cache  # a start makes a hundred groups of a few kinds
def _by_device(backend: str) -> Mapping[str, str]:
    config = BackendConfig(Backend(backend))
    return {str(device): str(name) for device, name in config.device_backend_map.items()}


class Recipes:
    """Recipes of the groups of one rank, by the name of the group. Owned by the training thread."""

    def __init__(self) -> None:
        self._known: dict[str, Recipe] = {}
        self._asked: Recipe | None = None  # while a fake group is made instead
        self._signature = functools.cache(inspect.signature)

    def of(self, group: Any) -> Recipe:
        """Return the recipe of a group; of one that was made otherwise, what torch knows of it."""
        found = self._known.get(_world.pg_names[group])
        return Recipe(backend=str(_world.pg_map[group][0])) if found is None else found

    def of_default(self) -> Recipe:
        """Return the recipe of the group of all ranks."""
        return self.of(_get_default_group())

    def make(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Make groups by a function of torch, and note their recipe."""
        recipe = self._asked or self._recipe(self._arguments(original, args, kwargs))
        before = set(_world.pg_names.values())
        result = original(*args, **kwargs)
        names = set(_world.pg_names.values())
        self._known |= dict.fromkeys(names - before, recipe)
        self._known = {name: each for name, each in self._known.items() if name in names}
        return result

    def make_fake(
        self, original: Function, *args: Any, default: str | None = None, **kwargs: Any
    ) -> Any:
        """Make groups over fake backends, and note the recipe of those that were asked for.

        The function is one of torch, perhaps around `make`. The default is noted instead of the backend that
        is asked for.
        """
        arguments = self._arguments(original, args, kwargs)
        recipe = self._recipe(arguments if default is None else {**arguments, "backend": default})
        # Options of a real backend do not fit, and nothing is bound to a device.
        changes = {"backend": recipe.fake, "pg_options": None, "device_id": None}
        self._asked = recipe
        try:
            result = self.make(original, **{**arguments, **changes})
        finally:
            self._asked = None
        for group, (backend, store) in list(_world.pg_map.items()):
            if FAKE in str(backend):  # the name that Megatron looks for
                _world.pg_map[group] = (FAKE, store)
        return result

    def _recipe(self, arguments: dict[str, Any]) -> Recipe:
        backend = arguments.get("backend")
        if not backend:  # torch takes that of the default group
            backend = self.of_default().backend if _world.default_pg is not None else "undefined"
        return Recipe(backend=str(backend), options=arguments.get("pg_options"))

    def _arguments(self, original: Function, args: Any, kwargs: Any) -> dict[str, Any]:
        return dict(self._signature(original).bind(*args, **kwargs).arguments)


class Groups:
    """The groups that exist when the model is built, on one rank. Owned by the training thread."""

    def __init__(self, transports: Sequence[GroupTransport], recipes: Recipes) -> None:
        self._transports = transports
        self._recipes = recipes
        self._groups: list[tuple[int, Any, Recipe]] = []
        self._rank = 0
        self.num_made = 0  # in the whole job, the same on all ranks

    def note(self) -> None:
        """Note the groups that exist, by their numbers.

        Raises:
            ConfigError: if one of them cannot be made again.
        """
        self._rank = dist.get_rank()
        names = _world.pg_names.items()
        found = ((int(name), group, self._recipes.of(group)) for group, name in names)
        self._groups = sorted(found, key=lambda each: each[0])
        self.num_made = _world.group_count
        for name, group, recipe in self._groups:
            self._check(name, group, recipe)

    def _check(self, name: int, group: Any, recipe: Recipe) -> None:
        known = [each.name for each in self._transports]
        other = next((each for each in recipe.by_device.values() if each not in known), "")
        what = f"the process group {name} ({group.group_desc})"
        if other:
            raise ConfigError(
                f"--moe-ft-repair=auto cannot renew {what}: its backend is {other}, and only "
                f"{' and '.join(known)} can be renewed. Choose one of them, or leave the flag out."
            )
        if group.bound_device_id is not None:
            raise ConfigError(
                f"--moe-ft-repair=auto cannot renew {what}: it is bound to {group.bound_device_id}, so its "
                "communicator is split from another one. Make it without device_id, or leave the flag out."
            )

    def set_timeout(self, timeout: timedelta) -> None:
        """Have operations give up after this time."""
        for _, group, _ in self._groups:
            _set_pg_timeout(timeout, group)

    def drop_later(self) -> None:
        """Forget groups that were made later. Not collective: their connections have ended."""
        noted = {group for _, group, _ in self._groups}
        for group in [each for each in _world.pg_map if each not in noted]:
            dist.destroy_process_group(group)
        _world.pg_coalesce_state.clear()

    def renew(self, store: Any, number: int, timeout: timedelta) -> None:
        """End the backends of all groups, and put new ones under them in a round. Called by all ranks."""
        others, of_gloo = list[Any](), list[Any]()
        for _, group, recipe in self._groups:
            is_gloo = {*recipe.by_device.values()} == {dist.Backend.GLOO}
            (of_gloo if is_gloo else others).append(group)
        # At first each has a network device of its own, whose thread takes 10 ms to end.
        with ThreadPoolExecutor(_RELEASING_THREADS) as pool:
            [*pool.map(release, of_gloo)]
        for group in others:  # of NCCL: in this thread, whose device is the rank's
            release(group)
        prefix = PrefixStore(f"groups_{number}", store)
        makers = {each.name: each.maker() for each in self._transports}
        # In the same order on all ranks, or they wait for each other.
        for name, group, recipe in self._groups:
            own = PrefixStore(str(name), prefix)
            put(group, recipe, own, makers, timeout, self._rank)
            _world.pg_map[group] = (recipe.backend, own)
        default, backend = _get_default_group(), self._recipes.of_default().backend
        _world.pg_map[default] = (backend, PrefixStore("later", prefix))
        _world.group_count = number * _COUNT_OF_ROUND


@contextmanager
def connecting(store: Any) -> Iterator[None]:
    """Wait for addresses of ranks for CONNECT_S at most: one may die, and nobody can end such a wait."""
    before = store.timeout
    store.set_timeout(timedelta(seconds=CONNECT_S))
    try:
        yield
    finally:
        store.set_timeout(before)


def swap(groups: Groups, links: Links, store: Any, number: int) -> None:
    """Put new backends under all groups, in a round in which all ranks have met. Called by all ranks."""
    links.begin()
    with links.recording(), connecting(store):
        groups.renew(store, number, timedelta(seconds=CONNECT_S))
    groups.set_timeout(timedelta(minutes=get_args().distributed_timeout_minutes))


def put(
    group: Any,
    recipe: Recipe,
    store: Any,
    makers: Mapping[str, Maker],
    timeout: timedelta,
    rank: int,
) -> None:
    """Put backends under a group that has none: one of each kind in torch, by whose name the makers are.

    Args:
        rank: this one in the job: since torch 2.14 a group without a backend does not know it.
    """
    name, description = _world.pg_names[group], group.group_desc
    ranks = tuple(_world.pg_group_ranks[group])
    number = _world.pg_group_ranks[group][rank]
    devices: dict[str, list[torch.device]] = {}
    for device, kind in recipe.by_device.items():
        devices.setdefault(kind, []).append(torch.device(device))
    types = {kind: Backend.backend_type_map[kind] for kind in devices}
    for kind, own in devices.items():
        # A rank that is alone in a group has nobody to tell its address.
        addresses = PrefixStore(kind, store) if len(ranks) > 1 else dist.HashStore()
        place = BackendPlace(store=addresses, rank=number, ranks=ranks, name=name)
        backend = makers[kind](place, recipe.options, timeout)
        for each in own:
            group._register_backend(each, types[kind], backend)
    group._set_default_backend(types.get("nccl", next(iter(types.values()))))
    group._set_group_name(name)
    group._set_group_desc(description)
    _world.pg_backend_config[group] = recipe.configuration


def check_torch() -> None:
    """Raise ConfigError unless the backends of this torch can be replaced."""
    if not hasattr(_library(), _RELEASE):
        raise ConfigError(
            f"--moe-ft-repair=auto puts new backends under process groups, and torch {torch.__version__} "
            "has no function that lets the old ones go (c10d::ProcessGroup::release_resources). Leave it "
            "out, or take the version of torch that moe_ft is tested with (constraints.txt)."
        )


def release(group: Any) -> None:
    """End the backends of a group, with their threads and connections.

    Waits for operations that have begun, so the connections that they wait for must have ended. The group has
    neither a name nor a store afterwards.
    """
    function = getattr(_library(), _RELEASE)
    function.argtypes, function.restype = [ctypes.c_void_p], None
    function(group._id())


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(torch._C.__file__)
