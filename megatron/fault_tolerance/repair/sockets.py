"""Sockets of this process by descriptor, and the end of connections that a blocked thread waits for."""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

_DESCRIPTORS = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Return all sockets by descriptor, with the name that the kernel gives each."""
    found = {}
    for name in os.listdir(_DESCRIPTORS):
        with suppress(OSError):
            target = os.readlink(f"{_DESCRIPTORS}/{name}")
            if target.startswith("socket:"):
                found[int(name)] = target
    return found


def shut(sockets: Mapping[int, str]) -> int:
    """End the TCP connections among some sockets, in both directions; return their number.

    Threads that wait for them are freed, here and at the other ends. A descriptor that has become another
    socket since is left alone.
    """
    num_shut = 0
    for descriptor, name in sockets.items():
        with suppress(OSError):  # closed, or never connected
            copy = os.dup(descriptor)
            with socket.socket(fileno=copy) as connection:
                connection.getpeername()  # a socket that listens has none, and gloo aborts if it ends
                is_same = os.readlink(f"{_DESCRIPTORS}/{copy}") == name
                if is_same and connection.family in (socket.AF_INET, socket.AF_INET6):
                    connection.shutdown(socket.SHUT_RDWR)
                    num_shut += 1
    return num_shut
