"""The job's store as simulated ranks see it: its server, and the time that it needs for an answer.

All that is signed and read in it is the product's.
"""

from copy import copy
from types import SimpleNamespace
from typing import Any, override

from moe_ft.keeper import job_store, rounds
from tests.simulation.active import Patches
from tests.simulation.repairs.machine import Listener, machine_here
from tests.simulation.store import Store

_POLL_S = 0.02
_LOOK_S = 0.1  # between two looks at a round: more would only take time


def _address_of(environment: Any) -> tuple[str, int]:
    return environment["MASTER_ADDR"], int(environment["MASTER_PORT"])


def _listen(environment: Any) -> Listener:
    machine = machine_here()
    listener = Listener(machine, machine.world.process)
    if machine.ports.setdefault(_address_of(environment), listener) is not listener:
        raise OSError(98, "Address already in use")
    return listener


class _Sockets:
    """The module `socket` of the ranks that look for the store."""

    def create_connection(self, address: tuple[str, int], timeout: float) -> Any:
        """Return something to close, if somebody listens."""
        machine = machine_here()
        machine.world.kernel.event("store: connect")
        found = machine.ports.get(address)
        if found is None or (found.server is not None and not found.server.is_alive):
            raise ConnectionRefusedError(111, "Connection refused")
        if machine.is_cut_off(machine.world.process.node, found.process.node):
            raise TimeoutError("timed out")
        return SimpleNamespace(close=lambda: None)


class TCPStore(Store):
    """A connection to the job's store, or its server; its values are those of a prefix."""

    def __init__(self, host: str, port: int, *, is_master: bool, **options: Any) -> None:
        self._machine, self._kernel = machine_here(), machine_here().world.kernel
        self._node = self._machine.world.process.node
        if is_master:
            self._listener: Listener = options["master_listen_fd"]
            self._listener.server = self._machine.world.process
            self._machine.changed()
            return
        self._listener = self._machine.ports[host, port]
        timeout_s = options["timeout"].total_seconds()
        if not self._machine.wait_for(self._answers, timeout_s):
            raise RuntimeError("The client socket has timed out")

    def _answers(self) -> bool:
        server = self._listener.server
        if server is None or not server.is_alive or server.is_suspended:
            return False
        return not self._machine.is_cut_off(self._node, server.node)

    @override
    def _reach(self, key: str) -> None:
        """Take the time of an answer; wait for a server that is stopped or out of reach, as long as it is."""
        machine, kernel, server = self._machine, self._kernel, self._listener.server
        kernel.event(f"store: {key.rpartition('/')[2]}")
        kernel.sleep(machine.slowness * kernel.random.random())
        machine.wait_for(lambda: self._answers() or not server or not server.is_alive, None)
        if not self._answers():
            raise RuntimeError("Connection reset by peer")
        if machine.has_stranger:
            self.values.forge(key)

    def get(self, key: str) -> bytes:
        while key not in self.values.texts:
            self._reach(key)
            self._kernel.sleep(_POLL_S)
        return self.values.texts[key].encode()


def _with_prefix(prefix: str, store: TCPStore) -> TCPStore:
    view = copy(store)
    view.values = store._listener.starts[prefix]
    return view


def install(patches: Patches) -> None:
    """Have the keeper and its ranks use simulated stores."""
    patches.set(rounds, "_MIN_POLL_S", _LOOK_S)
    patches.set(job_store, "listen", _listen)
    patches.set(job_store, "socket", _Sockets())
    patches.set(job_store, "TCPStore", TCPStore)
    patches.set(job_store, "PrefixStore", _with_prefix)
