"""New backends under the process groups that Megatron has made, which stay the same objects.

backends.py has how one group gets them, the transports how they are made.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _get_default_group,
    _set_pg_timeout,
    _world,
)

from megatron.fault_tolerance.repair.backends import Under, put, release
from megatron.fault_tolerance.repair.recipes import Recipe, Recipes
from megatron.fault_tolerance.repair.transport import Maker, Place, Transport
from moe_ft.errors import ConfigError

_COUNT_OF_ROUND = 1_000_000


class Groups:
    """The groups that exist when the model is built, on one rank. Owned by the training thread."""

    def __init__(self, transports: Sequence[Transport], recipes: Recipes) -> None:
        """Prepare.

        Args:
            transports: that make backends.
            recipes: of all groups.
        """
        self._transports, self._recipes = transports, recipes
        self._groups: list[tuple[int, Any, Recipe]] = []
        self.num_made = 0  # in the whole job, the same on all ranks

    def note(self) -> None:
        """Note the groups that exist, by their numbers.

        Raises:
            ConfigError: if one of them cannot be made again.
        """
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
                f"--moe-ft-repair=auto cannot renew {what}: its backend is {other}, and only those of "
                f"{' and '.join(known)} can be. Choose one of them, or leave the flag out."
            )
        if group.bound_device_id is not None:
            raise ConfigError(
                f"--moe-ft-repair=auto cannot renew {what}: it is bound to {group.bound_device_id}, so its "
                "communicator is split from another one. Make it without device_id, or leave the flag out."
            )

    def set_timeout(self, timeout: timedelta) -> None:
        """Have operations give up after some time."""
        for _, group, _ in self._groups:
            _set_pg_timeout(timeout, group)

    def drop_others(self) -> None:
        """Forget groups that were made later. Not collective: their connections have ended."""
        noted = {group for _, group, _ in self._groups}
        for group in [each for each in _world.pg_map if each not in noted]:
            dist.destroy_process_group(group)
        _world.pg_coalesce_state.clear()

    def swap(self, store: Any, number: int, timeout: timedelta) -> None:
        """End the backends of all groups, and put new ones under them. Called by all ranks.

        Args:
            store: of the job.
            number: of the round.
            timeout: of the new backends.
        """
        for _, group, _ in self._groups:
            release(group)
        prefix = PrefixStore(f"groups_{number}", store)
        makers = {each.name: each.maker() for each in self._transports}
        # In the same order on all ranks, or they wait for each other.
        for name, group, recipe in self._groups:
            own = PrefixStore(str(name), prefix)
            made = _make(group, recipe, own, makers, timeout)
            put(group, made, recipe.configuration, _world.pg_names[group], group.group_desc)
            _world.pg_map[group] = (recipe.backend, own)
        default = _get_default_group()
        backend = self._recipes.of_default().backend
        _world.pg_map[default] = (backend, PrefixStore("later", prefix))
        _world.group_count = number * _COUNT_OF_ROUND


def _make(
    group: Any, recipe: Recipe, store: Any, makers: Mapping[str, Maker], timeout: timedelta
) -> list[Under]:
    """Return the backends of a group: one of each kind, as torch makes them."""
    devices: dict[str, list[Any]] = {}
    for device, backend in recipe.by_device.items():
        devices.setdefault(backend, []).append(torch.device(device))
    ranks = tuple(_world.pg_group_ranks[group])
    made: list[Under] = []
    for backend, own in devices.items():
        place = Place(
            store=PrefixStore(backend, store),
            rank=group.rank(),
            ranks=ranks,
            name=_world.pg_names[group],
        )
        made.append(Under(backend, makers[backend](place, recipe.options, timeout), own))
    return made
