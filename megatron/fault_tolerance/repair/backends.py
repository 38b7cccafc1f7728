"""Backends under process groups that exist: the present ones end, and new ones take their places.

torch's Python functions only add a backend to a group, which keeps all earlier ones until it ends, with their
threads and descriptors. At its end a group calls `ProcessGroup::release_resources`, which lets go of
its backends and its store. The function is in torch's public headers and libraries, and only lacks a name in
Python: ctypes calls it here. It has no arguments. A group has no backend then, as before its first one.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.distributed_c10d import Backend, _world

from moe_ft.errors import ConfigError

_RELEASE = "_ZN4c10d12ProcessGroup17release_resourcesEv"


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


@dataclass(frozen=True, slots=True)
class Under:
    """A backend that comes under a group.

    Attributes:
        kind: its name in torch.
        backend: it.
        devices: whose tensors it exchanges.
    """

    kind: str
    backend: Any
    devices: Sequence[torch.device]


def put(
    group: Any, backends: Sequence[Under], configuration: str, name: str, description: str
) -> None:
    """Put backends under a group that has none.

    Args:
        backends: one of each kind.
        configuration: of backends by device, as torch writes it.
        name, description: of the group.
    """
    kinds = {each.kind: Backend.backend_type_map[each.kind] for each in backends}
    for each in backends:
        for device in each.devices:
            group._register_backend(device, kinds[each.kind], each.backend)
    group._set_default_backend(kinds.get("nccl", kinds[backends[0].kind]))
    group._set_group_name(name)
    group._set_group_desc(description)
    _world.pg_backend_config[group] = configuration


def _library() -> ctypes.CDLL:
    """Return torch's own libraries, which are loaded."""
    return ctypes.CDLL(torch._C.__file__)
