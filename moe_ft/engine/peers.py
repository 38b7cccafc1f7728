"""Host memory of other nodes: sending replicas to peers, keeping theirs, and serving a node's memory.

Plain TCP connections between pairs of ranks: a pair that fails stops alone, where one rank's timeout would
end a whole process group. A message is a length, a JSON header and, for some, raw bytes.
"""

import hmac
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from moe_ft.engine.background import PhaseHook, Reports
from moe_ft.engine.memory import ReplicaMemory
from moe_ft.engine.pool import Pool
from moe_ft.engine.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.formats import Index, UnitEntry, check_path, checksum, decode, encode
from moe_ft.topology import RankInfo

PROGRESS_TIMEOUT_S = 10.0  # without a single byte sent or received
_SLOWEST_BYTES_PER_S = 100e6  # of a peer that verifies a replica
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 300.0
_CHUNK_BYTES = 8 << 20
_MAX_HEADER_BYTES = 1 << 20
_MAX_INDEX_BYTES = 1 << 30
_LENGTH = struct.Struct(">I")


class Put(msgspec.Struct, frozen=True, tag=True):
    """Keep a replica: followed by the index, the region's data, and slots of the pool.

    Attributes:
        keep_iteration: the newest complete snapshot, which must not be overwritten.
        slots: names of the units that follow, in this order; their places are in the index.
        slot_bytes: of all of them.
    """

    token: str
    source: int
    iteration: int
    keep_iteration: int | None
    index_bytes: int
    data_bytes: int
    slots: tuple[str, ...] = ()
    slot_bytes: int = 0


class Get(msgspec.Struct, frozen=True, tag=True):
    """Send a range of a file in the node's memory directory; -1 for all of it."""

    token: str
    path: str
    offset: int
    num_bytes: int


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answers both; an empty error means success. Followed by num_bytes raw bytes."""

    error: str = ""
    num_bytes: int = 0


_REQUEST = msgspec.json.Decoder(Put | Get)
_REPLY = msgspec.json.Decoder(Reply)


def _send(connection: socket.socket, header: Put | Get | Reply) -> None:
    encoded = msgspec.json.encode(header)
    _send_all(connection, _LENGTH.pack(len(encoded)) + encoded)


def _send_all(connection: socket.socket, content: bytes | memoryview) -> None:
    """Send everything; the socket's timeout applies to each step, where sendall's is for all of it."""
    rest = memoryview(content)
    while rest:
        rest = rest[connection.send(rest[:_CHUNK_BYTES]) :]


def _receive_into(connection: socket.socket, target: memoryview) -> None:
    while target:
        count = connection.recv_into(target, min(len(target), _CHUNK_BYTES))
        if count == 0:
            raise ConnectionError("the other side closed the connection")
        target = target[count:]


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    content = bytearray(num_bytes)
    _receive_into(connection, memoryview(content))
    return content


def _pass_over(connection: socket.socket, num_bytes: int) -> None:
    """Receive what nobody wants, so that the next message can follow."""
    while num_bytes > 0:
        num_bytes -= len(_receive(connection, min(num_bytes, _CHUNK_BYTES)))


def _receive_header(connection: socket.socket) -> bytearray:
    (num_bytes,) = _LENGTH.unpack(_receive(connection, _LENGTH.size))
    if num_bytes > _MAX_HEADER_BYTES:
        raise ConnectionError(f"a header of {num_bytes} bytes is not one of moe_ft")
    return _receive(connection, num_bytes)


class PeerServer:
    """Keeps replicas for other ranks and serves this node's memory directory.

    Attributes:
        address: host and port, after `start`.
    """

    def __init__(self, node_dir: Path, host: str) -> None:
        self._node_dir, self._host = node_dir, host
        self._token = ""
        self._replicas: Mapping[int, ReplicaMemory] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._listener: socket.socket | None = None
        self.address: tuple[str, int] | None = None

    def start(self) -> None:
        """Listen on a free port; raises OSError if that cannot be done."""
        # A name may mean several interfaces: requests from anywhere need the job's token.
        is_address = self._host.replace(".", "").isdecimal()
        bind_to = self._host if is_address else ""
        self._listener = socket.create_server((bind_to, 0), backlog=128)
        self.address = (self._host, self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="moe_ft-peers", daemon=True).start()

    def admit(self, token: str) -> None:
        """Answer requests that carry this token; before, none are answered."""
        self._token = token

    def keep(self, replicas: Mapping[int, ReplicaMemory]) -> None:
        """Accept replicas of these ranks into this memory, which is open."""
        self._locks = {source: threading.Lock() for source in replicas}
        self._replicas = replicas

    def close(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        listener = self._listener
        while listener is not None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            name = "moe_ft-peer-connection"
            threading.Thread(target=self._serve, args=(connection,), name=name, daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Answer one connection's requests until it closes or something is wrong with it."""
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while self._answer(connection):
                    pass
            except Exception as error:  # the other side learns why, and this connection ends
                with suppress(OSError):
                    _send(connection, Reply(error=f"{type(error).__name__}: {error}"))

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; return False if the connection is to end."""
        connection.settimeout(None)  # between requests a peer may be silent
        if not connection.recv(1, socket.MSG_PEEK):
            return False
        connection.settimeout(PROGRESS_TIMEOUT_S)
        request = _REQUEST.decode(_receive_header(connection))
        if not self._token or not hmac.compare_digest(request.token.encode(), self._token.encode()):
            _send(connection, Reply(error="the token is wrong: another job or an older start"))
            return False
        if isinstance(request, Put):
            _send(connection, Reply(error=self._put(connection, request)))
        else:
            self._get(connection, request)
        return True

    def _put(self, connection: socket.socket, request: Put) -> str:
        """Receive a replica; return what is wrong with it, or nothing."""
        if not 0 <= request.index_bytes <= _MAX_INDEX_BYTES:
            raise ConnectionError(f"an index of {request.index_bytes} bytes is not one of moe_ft")
        content = _receive(connection, request.index_bytes)
        memory = self._replicas.get(request.source)
        if memory is None or memory.regions[0].num_bytes != request.data_bytes:
            expected = "none" if memory is None else f"{memory.regions[0].num_bytes} bytes"
            raise ConnectionError(
                f"a replica of rank {request.source} of {request.data_bytes} bytes; expected {expected}"
            )
        with self._locks[request.source]:
            free = [each for each in memory.regions if _may_go(each, request.keep_iteration)]
            if not free:
                _pass_over(connection, request.data_bytes + request.slot_bytes)
                return f"all regions hold iteration {request.keep_iteration}, which must be kept"
            region = free[0]
            region.invalidate()
            contents = {"": memoryview(region.mapping)}
            try:
                index = decode(bytes(content), Index, f"the index of rank {request.source}")
                slots = _slots_for(request, index, memory, region)
            except CorruptStateError as error:
                _pass_over(connection, request.data_bytes + request.slot_bytes)
                return str(error)
            _receive_into(connection, contents[""])
            if memory.pool is not None and slots:
                contents[memory.pool.name] = memoryview(memory.pool.mapping)
            for unit in slots:
                target = contents[unit.file]
                _receive_into(connection, target[unit.offset : unit.offset + unit.num_bytes])
            arrived = [name for name, unit in index.units.items() if not unit.file]
            try:
                where = f"rank {request.source}"
                check_units(index, contents, where, [*arrived, *request.slots])
            except CorruptStateError as error:
                return str(error)
            named = msgspec.structs.replace(index, file=region.data_path.name)
            try:
                region.commit(encode(named), index.iteration)
            except OSError as error:
                return f"{error}"
        return ""

    def _get(self, connection: socket.socket, request: Get) -> None:
        try:
            check_path(request.path, "a request")
            with (self._node_dir / request.path).open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size - request.offset
                if request.num_bytes >= 0:
                    num_bytes = min(num_bytes, request.num_bytes)
                _send(connection, Reply(num_bytes=max(0, num_bytes)))
                if num_bytes <= 0:
                    return
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                _send_all(connection, content[request.offset : request.offset + num_bytes])
        except OSError as error:
            _send(connection, Reply(error=str(error)))


def _may_go(region: Region, keep_iteration: int | None) -> bool:
    """Return whether a region holds nothing, or nothing that must be kept."""
    return region.iteration is None or region.iteration != keep_iteration


def _slots_for(
    request: Put, index: Index, memory: ReplicaMemory, filled: Region
) -> list[UnitEntry]:
    """Return where the units that follow go, after removing the indexes that name what is there now.

    Raises:
        CorruptStateError: if a place is not one, or a snapshot that must be kept is there.
    """
    slots: dict[int, UnitEntry] = {}
    for name in request.slots:
        unit, pool = index.units.get(name), memory.pool
        if unit is None or pool is None or not pool.has_place(unit):
            raise CorruptStateError(f"unit {name} has no place in the pool")
        slots[unit.offset] = unit
    if len(slots) < len(request.slots) or request.slot_bytes != sum(
        unit.num_bytes for unit in slots.values()
    ):
        raise CorruptStateError("the slots that follow are not those of the index")
    for region in memory.regions:
        if region is not filled and slots and _names_another(region, slots):
            if region.iteration is not None and region.iteration == request.keep_iteration:
                raise CorruptStateError(
                    f"a slot of iteration {region.iteration} would be overwritten, which must be kept"
                )
            region.invalidate()
    return list(slots.values())


def _names_another(region: Region, slots: Mapping[int, UnitEntry]) -> bool:
    """Return whether a region's index names another version than the one that a slot will hold."""
    try:
        index = decode(region.index_path.read_bytes(), Index, str(region.index_path))
    except OSError:
        return False
    named = [(slots[unit.offset], unit) for unit in index.units.values() if unit.offset in slots]
    return any(new.file == old.file and new.checksum != old.checksum for new, old in named)


def check_units(
    index: Index,
    contents: Mapping[str, memoryview],
    where: str,
    names: Iterable[str] | None = None,
) -> None:
    """Raise CorruptStateError if the header or a unit does not have the checksum of the index.

    Args:
        index: describes them.
        contents: of the index's own file, under an empty name, and of others that it names.
        where: for messages.
        names: the units to check; by default all that are in the contents.
    """
    if checksum(contents[""][: index.header_bytes]) != index.header_checksum:
        raise CorruptStateError(f"{where}: the safetensors header does not match its checksum")
    if names is None:
        names = [name for name, unit in index.units.items() if unit.file in contents]
    check_places(index, contents, where, names)


def check_places(
    index: Index, contents: Mapping[str, memoryview], where: str, names: Iterable[str]
) -> None:
    """Raise CorruptStateError if a unit does not have the checksum of the index; see `check_units`."""
    for name in names:
        unit = index.units[name]
        content = contents[unit.file]
        if checksum(content[unit.offset : unit.offset + unit.num_bytes]) != unit.checksum:
            raise CorruptStateError(f"{where}: unit {name} does not match its checksum")


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

    def put(
        self,
        region: Region,
        index: Index,
        keep_iteration: int | None,
        phase_hook: PhaseHook,
        pool: Pool | None = None,
        slots: Sequence[str] = (),
    ) -> None:
        """Send a replica and wait until it is committed there; raises OSError if that fails.

        Args:
            region: holds the snapshot.
            index: describes it.
            keep_iteration: what the peer must not overwrite.
            phase_hook: called in the middle.
            pool: holds the units of `slots`, which are sent too.
            slots: names of units.
        """
        try:
            self._put(region, index, keep_iteration, phase_hook, pool, slots)
        except CorruptStateError:
            raise  # an answer: the connection is in order
        except BaseException:
            self.close()  # in the middle of a message
            raise

    def _put(
        self,
        region: Region,
        index: Index,
        keep_iteration: int | None,
        phase_hook: PhaseHook,
        pool: Pool | None,
        slots: Sequence[str],
    ) -> None:
        connection = self._connected()
        content = encode(index)
        request = Put(
            self._token,
            index.rank,
            index.iteration,
            keep_iteration,
            len(content),
            index.file_bytes,
            tuple(slots),
            sum(index.units[name].num_bytes for name in slots),
        )
        _send(connection, request)
        _send_all(connection, content)
        data = memoryview(region.mapping)
        half = index.file_bytes // 2
        _send_all(connection, data[:half])
        phase_hook(Phase.REPLICATE, index.iteration)
        _send_all(connection, data[half:])
        for name in slots:
            assert pool is not None
            unit = index.units[name]
            with memoryview(pool.mapping) as pooled:
                _send_all(connection, pooled[unit.offset : unit.offset + unit.num_bytes])
        num_bytes = request.data_bytes + request.slot_bytes
        connection.settimeout(PROGRESS_TIMEOUT_S + num_bytes / _SLOWEST_BYTES_PER_S)
        reply = _REPLY.decode(_receive_header(connection))
        connection.settimeout(PROGRESS_TIMEOUT_S)
        if reply.error:
            raise CorruptStateError(reply.error)

    def get(self, path: str, offset: int = 0, num_bytes: int = -1) -> bytearray:
        """Return a range of a file in the peer's node memory; raises OSError if that fails."""
        try:
            connection = self._connected()
            _send(connection, Get(self._token, path, offset, num_bytes))
            reply = _REPLY.decode(_receive_header(connection))
            content = _receive(connection, reply.num_bytes)
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

    def replicate(
        self, region: Region, pool: Pool | None, index: Index, keep_iteration: int | None
    ) -> bool:
        """Send a snapshot to all peers; return whether all of them have it.

        Of the pool a peer gets what it does not have yet.
        A pair that fails is tried again with the next snapshot, then less and less often.
        """
        start = time.perf_counter()
        reached = [
            rank
            for rank, pair in self._pairs.items()
            if self._send(rank, pair, region, pool, index, keep_iteration)
        ]
        if reached:
            self._reports.add(
                "replicate",
                index.iteration,
                bytes=index.file_bytes,
                seconds=time.perf_counter() - start,
                num_units=len(index.units),
                peers=reached,
            )
        return len(reached) == len(self._pairs) and not self._is_lacking_address

    def _send(
        self,
        rank: int,
        pair: "_Pair",
        region: Region,
        pool: Pool | None,
        index: Index,
        keep_iteration: int | None,
    ) -> bool:
        wait_s = pair.retry_s - time.monotonic()
        if wait_s > 0:
            reason = f"rank {rank} failed {pair.num_failures} times; tried again in {wait_s:.0f} s"
            self._reports.add("skipped", index.iteration, part="replicate", reason=reason)
            return False
        try:
            slots = pair.missing(index)
            pair.connection.put(region, index, keep_iteration, self._phase_hook, pool, slots)
        except Exception as error:  # of the network, the peer, or an injected one
            pair.fail()
            self._reports.degraded(
                "replicate",
                index.iteration,
                f"rank {rank} did not take the replica: {type(error).__name__}: {error}; until it takes "
                "one, a loss of this node costs what came after the last one",
            )
            return False
        pair.succeed(index)
        return True

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

    def fail(self) -> None:
        """Note a failure: the next snapshot tries again, the ones after that wait longer and longer."""
        self._known = {}
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
