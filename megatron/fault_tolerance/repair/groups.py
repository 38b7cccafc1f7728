"""New gloo backends under the process groups that Megatron has made, which stay the same objects.

backends.py has how one group gets one. Over NCCL, `ProcessGroupNCCL` and `abort` would take the places of
`ProcessGroupGloo` and of the ends of connections; that has never run.
"""

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _get_default_group,
    _set_pg_timeout,
    _world,
)

from megatron.fault_tolerance.repair.backends import put, release

_COUNT_OF_ROUND = 1_000_000


class Groups:
    """The groups that exist when the model is built, on one rank. Owned by the training thread."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, Any]] = []
        self.num_made = 0  # in the whole job, the same on all ranks

    def note(self) -> None:
        """Note the groups that exist, by their numbers."""
        names = _world.pg_names.items()
        self._groups = sorted(
            ((int(name), group) for group, name in names), key=lambda each: each[0]
        )
        self.num_made = _world.group_count

    def set_timeout(self, timeout: timedelta) -> None:
        """Have operations give up after some time."""
        for _, group in self._groups:
            _set_pg_timeout(timeout, group)

    def drop_others(self) -> None:
        """Forget groups that were made later. Not collective: their connections have ended."""
        noted = {group for _, group in self._groups}
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
        for _, group in self._groups:
            release(group)
        prefix, devices = PrefixStore(f"groups_{number}", store), _devices()
        # In the same order on all ranks, or they wait for each other.
        for name, group in self._groups:
            own = PrefixStore(str(name), prefix)
            options = _options(timeout, devices, _world.pg_names[group])
            backend = ProcessGroupGloo(own, group.rank(), group.size(), options)
            backend._set_sequence_number_for_group()
            put(group, backend, _world.pg_names[group], group.group_desc)
            _world.pg_map[group] = ("gloo", own)
        _world.pg_map[_get_default_group()] = ("gloo", PrefixStore("later", prefix))
        _world.group_count = number * _COUNT_OF_ROUND


def _devices() -> list[Any]:
    """Return devices that all backends of a round share, with their threads and descriptors."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return [
        ProcessGroupGloo.create_device(interface=each) for each in interfaces.split(",") if each
    ] or [ProcessGroupGloo.create_default_device()]


def _options(timeout: timedelta, devices: list[Any], name: str) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout, options._devices, options.group_name = timeout, devices, name
    return options
