"""Transport of gloo. `ProcessGroupGloo.abort` frees nobody: the end of its connections does.

A thread that waits for a healthy rank would wait on.
"""

import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo

from megatron.fault_tolerance.repair.sockets import close, open_sockets, shut
from megatron.fault_tolerance.repair.transport import Maker, Place


class Gloo:
    """Backends of gloo: each operation ends before its call returns, or raises."""

    name = "gloo"
    fails_silently = False

    def __init__(self) -> None:
        """Prepare."""
        self._ended: list[socket.socket] = []  # copies, so that others may still send

    def maker(self) -> Maker:
        """Return what makes backends that share their devices, with their threads and descriptors."""
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        devices = [
            ProcessGroupGloo.create_device(interface=each) for each in interfaces.split(",") if each
        ] or [ProcessGroupGloo.create_default_device()]

        def make(place: Place, given: Any, timeout: timedelta) -> Any:
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._devices, options.group_name = timeout, devices, place.name
            backend = ProcessGroupGloo(place.store, place.rank, len(place.ranks), options)
            backend._set_sequence_number_for_group()
            return backend

        return make

    def mark(self) -> dict[int, str]:
        """Return the sockets of this process."""
        return open_sockets()

    def made_since(self, mark: dict[int, str]) -> dict[int, str]:
        """Return the sockets that were opened since."""
        return {fd: name for fd, name in open_sockets().items() if mark.get(fd) != name}

    def end(self, made: Mapping[int, str]) -> int:
        """End connections, which frees the threads that wait for them."""
        copies = shut(made)
        self._ended += copies
        return len(copies)

    def begin(self) -> None:
        """Close the connections: nobody sends over them any more."""
        close(self._ended)
        self._ended = []

    def failure(self, made: Mapping[int, str]) -> str:
        """Return nothing: what fails has raised."""
        return ""

    def settle(self) -> None:
        """Wait for nothing."""

    def leave(self) -> None:
        """Leave nothing behind."""
