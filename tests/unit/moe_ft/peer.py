"""A rank that keeps replicas of another one in its node's memory, over real connections."""

import socket
import threading
from collections.abc import Mapping
from pathlib import Path

from moe_ft.engine.background import Reports
from moe_ft.engine.memory import ReplicaMemory
from moe_ft.engine.peer_authentication import answer_challenge, receive_challenge
from moe_ft.engine.peer_messages import Deadline
from moe_ft.engine.peer_server import PeerServer
from moe_ft.engine.peers import PeerConnection
from moe_ft.engine.regions import Region, replica_directory
from moe_ft.faults import Phase
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.topology import RankInfo
from tests.unit.moe_ft.builders import make_state

TOKEN = "0123456789abcdef"
HOST = "127.0.0.1"
SOURCE, HOLDER = 3, 7
DEADLINE_S = 30.0


def no_fault(phase: Phase, iteration: int) -> None:
    """Inflict nothing."""


def authenticated(address: tuple[str, int], token: str = TOKEN) -> socket.socket:
    """Return a connection to a server whose two sides know the token."""
    connection = socket.create_connection(address, DEADLINE_S)
    deadline = Deadline(DEADLINE_S)
    answer_challenge(connection, token, receive_challenge(connection, deadline), deadline)
    return connection


def served_connections() -> list[threading.Thread]:
    """Return the threads in which peers serve connections."""
    return [each for each in threading.enumerate() if each.name == "moe_ft-peer-connection"]


class Peer:
    """A rank that keeps replicas of another one, and files that it serves.

    Attributes:
        reports: what it says of its own failures.
    """

    def __init__(self, tmp_path: Path, region_bytes: int = 0) -> None:
        self.node_dir = tmp_path / "node"
        self.server = PeerServer(self.node_dir, HOST)
        directory = replica_directory(self.node_dir, SOURCE, HOLDER)
        self.size = region_bytes or len(make_state(SOURCE)[1])
        self.regions = [Region(directory, number, self.size) for number in range(2)]
        for region in self.regions:
            region.open()
        self.server.start()
        self.server.admit(TOKEN)
        self.reports = Reports()
        self.keep({SOURCE: ReplicaMemory(regions=tuple(self.regions), pool=None)})
        self.connections: list[PeerConnection] = []

    @property
    def info(self) -> RankInfo:
        """The rank as the others see it."""
        return RankInfo(
            rank=HOLDER,
            node="node-b",
            stage=0,
            pid=1,
            address=self.server.address,
            region_bytes=self.size,
        )

    def keep(self, replicas: Mapping[int, ReplicaMemory]) -> None:
        """Accept replicas into this memory."""
        self.server.keep(replicas, self.reports)

    def connect_raw(self) -> socket.socket:
        """Return a connection that was let in, over which the caller says what it likes."""
        assert self.server.address is not None
        return authenticated(self.server.address)

    def connect(self, token: str = TOKEN) -> PeerConnection:
        """Return a connection that is closed with the peer."""
        assert self.server.address is not None
        self.connections.append(PeerConnection(self.server.address, token))
        return self.connections[-1]

    def committed(self) -> dict[int, bytes]:
        """Return the data of every replica that has an index, by iteration, as a recovery would read it."""
        found = {}
        for path in self.regions[0].directory.glob("region_*.json"):
            index = decode(path.read_bytes(), Index, str(path))
            found[index.iteration] = (path.parent / index.file).read_bytes()
        return found

    def close(self) -> None:
        """Close all connections and stop listening."""
        for connection in self.connections:
            connection.close()
        self.server.close()
