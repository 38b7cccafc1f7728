"""A rank that keeps replicas of another one over real connections, peers that do not."""

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import msgspec
import pytest

from moe_ft.engine.background import EventQueue
from moe_ft.engine.links.messages import (
    PeerReply,
    answer_challenge,
    challenge_client,
    receive,
    receive_challenge,
    receive_header,
    send,
)
from moe_ft.engine.links.peers import OutgoingReplica, PeerConnection
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.links.transport import Deadline, TcpConnection
from moe_ft.engine.memory.job_directory import replica_directory
from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.faults import Phase
from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.topology import RankInfo
from tests.unit.moe_ft.builders import fill_region, make_state

TOKEN = "0123456789abcdef"
HOST = "127.0.0.1"
SOURCE, HOLDER = 3, 7
DEADLINE_S = 120.0


def no_fault(phase: Phase, iteration: int) -> None:
    """Inflict nothing."""


def authenticated(address: tuple[str, int], token: str = TOKEN) -> socket.socket:
    """Return a connection to a server whose two sides know the token."""
    connection = socket.create_connection(address, DEADLINE_S)
    deadline = Deadline(DEADLINE_S)
    wire = TcpConnection(connection)
    answer_challenge(wire, token, receive_challenge(wire, deadline), deadline)
    return connection


class LeapingClock:
    """The clock by which connections count their deadlines: real time, and leaps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._leapt_s = 0.0
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + self._leapt_s)
        monkeypatch.setattr("moe_ft.engine.links.transport.time", clock)

    def leap(self, seconds: float) -> None:
        """Let time pass at once."""
        self._leapt_s += seconds


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
        self.reports = EventQueue()
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

    def keep_in_slots(self, slot_bytes: int) -> None:
        """Accept replicas with units in slots: of two versions of one unit."""
        pool = UnitPool(self.regions[0].directory, slot_bytes, 2)
        pool.open()
        self.keep({SOURCE: ReplicaMemory(regions=tuple(self.regions), pool=pool)})

    def in_slot(self, iteration: int, name: str) -> bytes:
        """Return a unit in a slot, as the replica of an iteration has it."""
        for path in self.regions[0].directory.glob("region_*.json"):
            index = decode(path.read_bytes(), Index, str(path))
            if index.iteration == iteration:
                unit = index.units[name]
                content = (path.parent / unit.file).read_bytes()
                return content[unit.offset : unit.offset + unit.num_bytes]
        raise KeyError(iteration)

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
        folder = self.regions[0].directory
        return {at: (folder / each.file).read_bytes() for at, each in self.indexes().items()}

    def indexes(self) -> dict[int, Index]:
        """Return the index of every replica, by iteration."""
        paths = self.regions[0].directory.glob("region_*.json")
        found = (decode(path.read_bytes(), Index, str(path)) for path in paths)
        return {index.iteration: index for index in found}

    def close(self) -> None:
        """Close all connections and stop listening."""
        for connection in self.connections:
            connection.close()
        self.server.close()


class FakePeer:
    """A peer that lets one connection in, after it closed some, and does with it what a test wants."""

    def __init__(self, act: Callable[[socket.socket], None], num_closed: int = 0) -> None:
        self._act, self._num_closed = act, num_closed
        self._listener = socket.create_server((HOST, 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.should_end = threading.Event()
        self.address: tuple[str, int] = (HOST, self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.should_end.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(DEADLINE_S)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):  # the other side may give up, which it says itself
            for _ in range(self._num_closed):
                self._listener.accept()[0].close()
            with self._listener.accept()[0] as connection:
                challenge_client(TcpConnection(connection), TOKEN, Deadline(DEADLINE_S))
                self._act(connection)


class SlowReceiver(FakePeer):
    """Takes a replica, the first part of it in small pieces at intervals, and says that all is well."""

    def __init__(self, data_bytes: int, pause: Callable[[], object] | None = None) -> None:
        """Prepare.

        Args:
            data_bytes: of the replica.
            pause: is called between two pieces, by default to wait.
        """
        super().__init__(self._take)
        self._data_bytes = data_bytes
        self._pause = pause or (lambda: self.should_end.wait(0.15))  # this is how slow the link is

    def _take(self, connection: socket.socket) -> None:
        deadline = Deadline(10 * DEADLINE_S)
        header = msgspec.json.decode(receive_header(TcpConnection(connection), deadline))
        receive(TcpConnection(connection), header["index_bytes"], deadline)
        for _ in range(12):
            receive(TcpConnection(connection), 1 << 20, deadline)
            self._pause()
        receive(TcpConnection(connection), self._data_bytes - (12 << 20), deadline)
        send(TcpConnection(connection), PeerReply(), deadline)


def own_state(tmp_path: Path, iteration: int, number: int = 0) -> tuple[Region, Index]:
    """Return a region of the sender that holds a state, and its index."""
    return fill_region(tmp_path / "own", number, rank=SOURCE, iteration=iteration)


def replica_of(
    region: Region, index: Index, keep_iteration: int | None, pool: UnitPool | None = None
) -> OutgoingReplica:
    """Return what peers are to get of a region with a single snapshot."""
    return OutgoingReplica(
        region=region,
        pool=pool,
        index=index,
        start_byte=0,
        end_byte=index.file_bytes,
        keep_iteration=keep_iteration,
    )
