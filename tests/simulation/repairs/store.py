"""The job's store as simulated ranks see it: its server, and the time that it needs for an answer.

All that is signed and read in it is the product's.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, override

from moe_ft.cluster import job_store, rounds
from moe_ft.errors import RepairError
from tests.simulation.active import Patches
from tests.simulation.repairs.machine import Listener, machine_here
from tests.simulation.store import Store

_POLL_S = 0.02
_ANSWER_S = 30.0
_LOOK_S = 0.1  # between two looks at a round: more would only take time


def _listen_at(address: tuple[str, int], *, is_alone: bool = False) -> Listener:
    machine = machine_here()
    listener = Listener(machine, machine.world.process, address)
    if machine.ports.setdefault(address, listener) is not listener:
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


class StoreServer:
    """The server of a start: those who know its token are let in."""

    def __init__(self, token: str, run: str) -> None:
        self.token = token

    def start(self, listener: Listener) -> None:
        listener.server, listener.store = machine_here().world.process, self
        machine_here().changed()


class JobStore(Store):
    """A connection to the job's store; its values are those of a prefix."""

    def __init__(self, address: tuple[str, int], run: str, token: str, prefix: str = "") -> None:
        self._machine, self._kernel = machine_here(), machine_here().world.kernel
        self._node = self._machine.world.process.node
        self._listener = self._machine.ports[address]
        if not self._machine.wait_for(self._answers, _ANSWER_S):
            raise TimeoutError("timed out")
        self.server: StoreServer = self._listener.store
        if token != self.server.token:
            raise RepairError("the store is not the one of this start")
        self.values = self._listener.starts[prefix]

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
        machine.wait_for(
            lambda: (
                self._answers()
                or not server
                or not (server.is_alive or server.node in machine.powerless)
            ),
            None,
        )
        if not self._answers():
            raise RuntimeError("Connection reset by peer")
        if machine.has_stranger:
            self.values.forge(key)

    def close(self) -> None:
        """Do nothing."""

    def look(self, keys: Sequence[str], num_needed: int, wait_s: float) -> list[bytes | None]:
        """Return texts once so many are there, or after so many seconds."""
        until_s = self._kernel.now + wait_s
        while True:
            for key in keys:
                self._reach(key)
            texts = [self.values.texts.get(key) for key in keys]
            if len(texts) - texts.count(None) >= num_needed or self._kernel.now >= until_s:
                return [None if text is None else text.encode() for text in texts]
            self._kernel.sleep(_LOOK_S)

    def get(self, key: str) -> bytes:
        while key not in self.values.texts:
            self._reach(key)
            self._kernel.sleep(_POLL_S)
        return self.values.texts[key].encode()


def install(patches: Patches) -> None:
    """Have the keeper and its ranks use simulated stores."""
    patches.set(rounds, "_MIN_POLL_S", _LOOK_S)
    patches.set(job_store, "listen_at", _listen_at)
    patches.set(job_store, "socket", _Sockets())
    patches.set(job_store, "StoreServer", StoreServer)
    patches.set(job_store, "JobStore", JobStore)
