"""Record of how each process group was made: over which backends, with which options.

New backends are made in the same way. A replacement makes its groups in a fake world, and has to know what
they would be.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.distributed_c10d import (
    Backend,
    BackendConfig,
    _get_default_group,
    _world,
)

FAKE = "fake"

Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """The way in which a group was made."""

    backend: str  # as torch was asked for it, such as "nccl" or "cpu:gloo,cuda:nccl"
    options: Any = None  # None for its defaults

    @property
    def by_device(self) -> dict[str, str]:
        """Backends by the type of the device whose tensors they exchange."""
        config = BackendConfig(Backend(self.backend))
        return {str(device): str(name) for device, name in config.device_backend_map.items()}

    @property
    def configuration(self) -> str:
        """Backends by device, as torch writes them."""
        return str(BackendConfig(Backend(self.backend)))

    @property
    def fake(self) -> str:
        """Fake backends for the same devices: torch chooses by them where Python objects are exchanged."""
        return ",".join(f"{device}:{FAKE}" for device in self.by_device)


class Recipes:
    """Recipes of the groups of one rank, by the name of the group. Owned by the training thread."""

    def __init__(self) -> None:
        self._known: dict[str, Recipe] = {}
        self._asked: Recipe | None = None  # while a fake group is made instead

    def of(self, group: Any) -> Recipe:
        """Return the recipe of a group; of one that was made otherwise, what torch knows of it."""
        found = self._known.get(_world.pg_names[group])
        return Recipe(backend=str(_world.pg_map[group][0])) if found is None else found

    def of_default(self) -> Recipe:
        """Return the recipe of the group of all ranks."""
        return self.of(_get_default_group())

    def make(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Make groups by a function of torch, and note their recipe."""
        recipe = self._asked or self._recipe(_arguments(original, args, kwargs))
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

        Args:
            original: function of torch, perhaps around `make`.
            default: backend to note, if not the one that is asked for.
        """
        arguments = _arguments(original, args, kwargs)
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


def _arguments(original: Function, args: Any, kwargs: Any) -> dict[str, Any]:
    return dict(inspect.signature(original).bind(*args, **kwargs).arguments)
