"""Peers of the product over simulated connections."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.engine.links.addresses import own_host
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.links.server import PeerServer
from tests.simulation.kernel import Process, Waiting
from tests.unit.simulation.simulated import Simulated

TOKEN = "0123456789abcdef"
CONTENT = bytes(range(256)) * 1000


class Pair:
    """A server on node-a, and a process on node-b that uses it."""

    def __init__(self, simulated: Simulated, directory: Path) -> None:
        self._simulated, self._directory = simulated, directory
        (directory / "file").write_bytes(CONTENT)
        simulated.network.add_node("node-a")
        self._address: tuple[str, int] | None = None
        self._is_known = Waiting()
        self.server = self._serve()

    def _serve(self) -> Process:
        def serve() -> None:
            server = PeerServer(self._directory, own_host("node-a"))
            server.start()
            server.admit(TOKEN)
            self._address = server.address
            self._simulated.kernel.wake(self._is_known)

        return self._simulated.process(serve, "node-a")

    def use(self, act: Callable[[PeerConnection], Any], token: str = TOKEN) -> Process:
        """Return a process that does something with a connection."""

        def main() -> None:
            if self._address is None:
                self._simulated.kernel.wait(self._is_known)
            assert self._address is not None
            connection = PeerConnection(self._address, token)
            try:
                act(connection)
            except OSError as error:
                self._simulated.say(f"{type(error).__name__}: {error}")
            connection.close()

        return self._simulated.process(main, "node-b")


def test_file_is_served_to_who_knows_the_token(simulated: Simulated, tmp_path: Path) -> None:
    pair = Pair(simulated, tmp_path)
    pair.use(lambda connection: simulated.say(connection.get("file") == CONTENT))
    simulated.run()
    assert simulated.said == [True]


def test_wrong_token_is_turned_away(simulated: Simulated, tmp_path: Path) -> None:
    Pair(simulated, tmp_path).use(lambda connection: connection.get("file"), token="another")
    simulated.run()
    assert simulated.said == ["ConnectionError: the token is wrong: another job or an older start"]


def test_server_that_is_killed_fails_the_next_request(simulated: Simulated, tmp_path: Path) -> None:
    pair = Pair(simulated, tmp_path)

    def get_twice(connection: PeerConnection) -> None:
        connection.get("file")
        simulated.kernel.kill(pair.server)
        simulated.kernel.sleep(1.0)
        connection.get("file")

    pair.use(get_twice)
    simulated.run()
    (said,) = simulated.said
    assert said.startswith(("ConnectionError", "ConnectionResetError", "BrokenPipeError"))


def test_server_that_stands_still_costs_ten_virtual_seconds(
    simulated: Simulated, tmp_path: Path
) -> None:
    pair = Pair(simulated, tmp_path)

    def get_twice(connection: PeerConnection) -> None:
        connection.get("file")
        simulated.kernel.suspend(pair.server, 100.0)
        connection.get("file")

    pair.use(get_twice)
    simulated.run()
    assert simulated.said == ["TimeoutError: timed out"]
    assert 10.0 <= simulated.trace[0][0] < 11.0


@pytest.mark.parametrize("seed", range(5))
def test_same_seed_makes_the_same_trace(seed: int, tmp_path: Path) -> None:
    def trace() -> tuple[Any, ...]:
        with Simulated(seed) as simulated:
            pair = Pair(simulated, tmp_path)
            for _ in range(3):
                pair.use(lambda connection: simulated.say(len(connection.get("file"))))
            simulated.later(0.001, lambda: simulated.network.reset("node-b"))
            simulated.run()
            kernel = simulated.kernel
            return simulated.trace, kernel.num_events, kernel.now, kernel.random.random()

    assert trace() == trace()
