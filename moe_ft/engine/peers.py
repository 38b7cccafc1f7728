"""Host memory of other nodes: sending replicas to peers, reading theirs. The other side is peer_server.py.

Plain TCP connections between pairs of ranks: a pair that fails stops alone, where one rank's timeout would
end a whole process group.
"""

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from moe_ft.engine.background import PhaseHook, Reports
from moe_ft.engine.peer_messages import (
    REPLY,
    Get,
    Put,
    receive,
    receive_header,
    send,
    send_all,
)
from moe_ft.engine.peer_server import PROGRESS_TIMEOUT_S
from moe_ft.engine.pool import Pool
from moe_ft.engine.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.formats import Index, UnitEntry, encode
from moe_ft.topology import RankInfo

_SLOWEST_BYTES_PER_S = 100e6  # of a peer that verifies a replica
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """A committed snapshot that peers are to have.

    Attributes:
        region: holds it.
        pool: holds units that the region does not; None without one.
        index: describes both.
        start_byte, end_byte: what the snapshot adds to the region.
        keep_iteration: the last iteration of the newest complete window, which peers keep until they have
            all of this one.
        peers: ranks that are to have it; None for all that keep replicas.
    """

    region: Region
    pool: Pool | None
    index: Index
    start_byte: int
    end_byte: int
    keep_iteration: int | None
    peers: frozenset[int] | None = None


class PeerConnection:
    """A connection to one peer. Owned by one thread."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._address, self._token = address, token
        self._connection: socket.socket | None = None

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection = socket.create_connection(self._address, PROGRESS_TIMEOUT_S)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._connection

    def put(self, replica: "Replica", slots: Sequence[str], phase_hook: PhaseHook) -> None:
        """Send a replica and wait until it is committed there; raises OSError if that fails.

        Args:
            replica: what to send.
            slots: names of units of the pool, which are sent too.
            phase_hook: called in the middle.
        """
        try:
            self._put(replica, slots, phase_hook)
        except CorruptStateError:
            raise  # an answer: the connection is in order
        except BaseException:
            self.close()  # in the middle of a message
            raise

    def _put(self, replica: "Replica", slots: Sequence[str], phase_hook: PhaseHook) -> None:
        connection, index = self._connected(), replica.index
        content = encode(index)
        request = Put(
            self._token,
            index.rank,
            index.iteration,
            replica.keep_iteration,
            len(content),
            replica.start_byte,
            replica.end_byte - replica.start_byte,
            tuple(slots),
            sum(index.units[name].num_bytes for name in slots),
        )
        send(connection, request)
        send_all(connection, content)
        data = memoryview(replica.region.mapping)
        half = (replica.start_byte + replica.end_byte) // 2
        send_all(connection, data[replica.start_byte : half])
        phase_hook(Phase.REPLICATE, index.iteration)
        send_all(connection, data[half : replica.end_byte])
        for name in slots:
            assert replica.pool is not None
            unit = index.units[name]
            with memoryview(replica.pool.mapping) as pooled:
                send_all(connection, pooled[unit.offset : unit.offset + unit.num_bytes])
        num_bytes = request.data_bytes + request.slot_bytes
        connection.settimeout(PROGRESS_TIMEOUT_S + num_bytes / _SLOWEST_BYTES_PER_S)
        reply = REPLY.decode(receive_header(connection))
        connection.settimeout(PROGRESS_TIMEOUT_S)
        if reply.error:
            raise CorruptStateError(reply.error)

    def get(self, path: str, offset: int = 0, num_bytes: int = -1) -> bytearray:
        """Return a range of a file in the peer's node memory; raises OSError if that fails."""
        try:
            connection = self._connected()
            send(connection, Get(self._token, path, offset, num_bytes))
            reply = REPLY.decode(receive_header(connection))
            content = receive(connection, reply.num_bytes)
        except BaseException:
            self.close()  # in the middle of a message
            raise
        if reply.error:
            raise OSError(reply.error)
        return content

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class PeerReplicator:
    """Sends committed regions to this rank's peers. Owned by the snapshot thread after `start`."""

    def __init__(
        self, peers: Sequence[RankInfo], token: str, reports: Reports, phase_hook: PhaseHook
    ) -> None:
        self._reports, self._phase_hook = reports, phase_hook
        self._pairs = {
            peer.rank: _Pair(PeerConnection(peer.address, token)) for peer in peers if peer.address
        }
        self._is_lacking_address = len(self._pairs) < len(peers)

    def replicate(self, replica: Replica) -> bool:
        """Send a snapshot to its peers; return whether all of them have it.

        Of the window and the pool a peer gets what it does not have yet.
        A pair that fails is tried again with the next snapshot, then less and less often.
        """
        start, index = time.perf_counter(), replica.index
        sent = {
            rank: self._send(rank, pair, replica)
            for rank, pair in self._pairs.items()
            if replica.peers is None or rank in replica.peers
        }
        reached = [rank for rank, num_bytes in sent.items() if num_bytes is not None]
        if reached:
            self._reports.add(
                "replicate",
                index.iteration,
                bytes=max(sent[rank] or 0 for rank in reached),
                seconds=time.perf_counter() - start,
                num_units=sum(1 for _ in index.entries()),
                peers=reached,
            )
        return len(reached) == len(sent) and not self._is_lacking_address

    def _send(self, rank: int, pair: "_Pair", replica: Replica) -> int | None:
        """Send what a peer lacks; return how much of the region that was, None if it failed."""
        wait_s = pair.retry_s - time.monotonic()
        iteration = replica.index.iteration
        if wait_s > 0:
            reason = f"rank {rank} failed {pair.num_failures} times; tried again in {wait_s:.0f} s"
            self._reports.add("skipped", iteration, part="replicate", reason=reason)
            return None
        try:
            slots = pair.missing(replica.index)
            if not pair.has_window_before(replica.index):
                replica = replace(replica, start_byte=0)
            pair.connection.put(replica, slots, self._phase_hook)
        except Exception as error:  # of the network, the peer, or an injected one
            pair.fail()
            self._reports.degraded(
                "replicate",
                iteration,
                f"rank {rank} did not take the replica: {type(error).__name__}: {error}; until it takes "
                "one, a loss of this node costs what came after the last one",
            )
            return None
        pair.succeed(replica.index)
        return replica.end_byte - replica.start_byte

    def close(self) -> None:
        """Close all connections."""
        for pair in self._pairs.values():
            pair.connection.close()


class _Pair:
    """The connection to one peer, and when to try it again after failures."""

    def __init__(self, connection: PeerConnection) -> None:
        self.connection = connection
        self.num_failures = 0
        self.retry_s = 0.0
        self._known: dict[str, UnitEntry] = {}  # what the peer's pool holds
        self._newest: tuple[int, int] | None = (
            None  # iteration and number of the last snapshot there
        )

    def has_window_before(self, index: Index) -> bool:
        """Return whether the peer has all snapshots of the window before the newest one."""
        return self._newest == (index.iteration - 1, index.num_snapshots - 1)

    def missing(self, index: Index) -> list[str]:
        """Return the units of the pool whose versions the peer does not have where the index says."""
        return [
            name
            for name, unit in index.units.items()
            if unit.file and self._known.get(name) != unit
        ]

    def succeed(self, index: Index) -> None:
        """Note that the peer has a snapshot."""
        self.num_failures = 0
        self._known = {name: unit for name, unit in index.units.items() if unit.file}
        self._newest = (index.iteration, index.num_snapshots)

    def fail(self) -> None:
        """Note a failure: the next snapshot tries again, the ones after that wait longer and longer."""
        self._known, self._newest = {}, None
        self.num_failures += 1
        if self.num_failures > 1:
            delay_s = min(_FIRST_RETRY_S * 2 ** (self.num_failures - 2), _LONGEST_RETRY_S)
            self.retry_s = time.monotonic() + delay_s


def own_host(master_addr: str) -> str:
    """Return the name or address by which the job's other hosts reach this one.

    It is that of the interface towards the job's master. On the master itself its name may lead to the
    loopback interface, as Debian's /etc/hosts has it: others know it by that name.
    """
    if master_addr == "localhost" or master_addr.startswith("127."):
        return "127.0.0.1"
    with suppress(OSError):
        family, _, _, _, target = socket.getaddrinfo(master_addr, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing
            address = str(probe.getsockname()[0])
            return socket.gethostname() if address.startswith("127.") else address
    return socket.gethostname()
