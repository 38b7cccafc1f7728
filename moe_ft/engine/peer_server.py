"""Keeps replicas for other ranks, and serves the memory of this rank's node. The other side is peers.py."""

import hmac
import mmap
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from moe_ft.engine.checks import check_units
from moe_ft.engine.memory import ReplicaMemory
from moe_ft.engine.peer_messages import (
    REQUEST,
    Get,
    Put,
    Reply,
    pass_over,
    receive,
    receive_header,
    receive_into,
    send,
    send_all,
)
from moe_ft.engine.regions import Region
from moe_ft.errors import CorruptStateError
from moe_ft.formats import Index, IndexHead, UnitEntry, check_path, decode, encode
from moe_ft.planning.recovery import family_of

PROGRESS_TIMEOUT_S = 10.0  # without a single byte sent or received
_MAX_INDEX_BYTES = 1 << 30


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
        self._newest: dict[int, int] = {}  # iteration that was last accepted, by source
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
                    send(connection, Reply(error=f"{type(error).__name__}: {error}"))

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one request; return False if the connection is to end."""
        connection.settimeout(None)  # between requests a peer may be silent
        if not connection.recv(1, socket.MSG_PEEK):
            return False
        connection.settimeout(PROGRESS_TIMEOUT_S)
        request = REQUEST.decode(receive_header(connection))
        if not self._token or not hmac.compare_digest(request.token.encode(), self._token.encode()):
            send(connection, Reply(error="the token is wrong: another job or an older start"))
            return False
        if isinstance(request, Put):
            send(connection, Reply(error=self._put(connection, request)))
        else:
            self._get(connection, request)
        return True

    def _put(self, connection: socket.socket, request: Put) -> str:
        """Receive a replica; return what is wrong with it, or nothing."""
        if not 0 <= request.index_bytes <= _MAX_INDEX_BYTES:
            raise ConnectionError(f"an index of {request.index_bytes} bytes is not one of moe_ft")
        content = receive(connection, request.index_bytes)
        memory = self._replicas.get(request.source)
        region_bytes = 0 if memory is None else memory.regions[0].num_bytes
        if memory is None or not 0 <= request.start_byte <= region_bytes - request.data_bytes:
            raise ConnectionError(
                f"a replica of rank {request.source} up to byte {request.start_byte + request.data_bytes}; "
                f"expected {f'at most {region_bytes} bytes' if memory else 'none'}"
            )
        with self._locks[request.source]:
            try:
                index = decode(bytes(content), Index, f"the index of rank {request.source}")
                self._check_is_newest(index)
                region = _region_for(request, index, memory)
                slots = _slots_for(request, index, memory, region)
            except CorruptStateError as error:
                pass_over(connection, request.data_bytes + request.slot_bytes)
                return str(error)
            contents = {"": memoryview(region.mapping)}
            end_byte = request.start_byte + request.data_bytes
            receive_into(connection, contents[""][request.start_byte : end_byte])
            if memory.pool is not None and slots:
                contents[memory.pool.name] = memoryview(memory.pool.mapping)
            for unit in slots:
                target = contents[unit.file]
                receive_into(connection, target[unit.offset : unit.offset + unit.num_bytes])
            arrived = [
                (name, unit)
                for name, unit in index.entries()
                if (unit.offset >= request.start_byte if not unit.file else name in request.slots)
            ]
            try:
                check_units(index, contents, f"rank {request.source}", arrived)
            except CorruptStateError as error:
                region.invalidate()
                return str(error)
            named = msgspec.structs.replace(index, file=region.data_path.name)
            try:
                region.commit(encode(named), index.iteration)
            except OSError as error:
                return f"{error}"
            self._newest[index.rank] = index.iteration
        return ""

    def _check_is_newest(self, index: Index) -> None:
        """Raise CorruptStateError for what its sender has given up and sent newer snapshots after."""
        newest = self._newest.get(index.rank, -1)
        if index.iteration < newest:
            raise CorruptStateError(f"iteration {index.iteration} comes after iteration {newest}")

    def _get(self, connection: socket.socket, request: Get) -> None:
        try:
            check_path(request.path, "a request")
            with (self._node_dir / request.path).open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size - request.offset
                if request.num_bytes >= 0:
                    num_bytes = min(num_bytes, request.num_bytes)
                send(connection, Reply(num_bytes=max(0, num_bytes)))
                if num_bytes <= 0:
                    return
                content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
                send_all(connection, content[request.offset : request.offset + num_bytes])
        except OSError as error:
            send(connection, Reply(error=str(error)))


def _region_for(request: Put, index: Index, memory: ReplicaMemory) -> Region:
    """Return the region that a stretch goes into; one that is filled from its beginning holds nothing then.

    Raises:
        CorruptStateError: if all regions are needed, or none holds the snapshots before.
    """
    if index.file_bytes != memory.regions[0].num_bytes:
        raise CorruptStateError(
            f"a replica of rank {request.source} of {index.file_bytes} bytes; expected "
            f"{memory.regions[0].num_bytes} bytes"
        )
    if request.start_byte > 0:
        for region in memory.regions:
            if region.iteration == index.iteration - 1 and _goes_on(region, index):
                return region
        raise CorruptStateError(f"there is no window that iteration {index.iteration} continues")
    free = [each for each in memory.regions if _may_go(each, request.keep_iteration)]
    if not free and len(memory.regions) == 1:
        raise CorruptStateError(
            f"all regions hold iteration {request.keep_iteration}, which must be kept"
        )
    # The least valuable goes. Several may hold the iteration to keep, by different families of snapshots: a
    # recovery prefers the best.
    region = min(free or memory.regions, key=_worth)
    region.invalidate()
    return region


def _worth(region: Region) -> tuple[int, int, int]:
    """Return how much a recovery would prefer what a region holds to what others do."""
    try:
        index = decode(region.index_path.read_bytes(), IndexHead, str(region.index_path))
    except (OSError, CorruptStateError):
        return -1, 0, 1
    if not index.is_whole:
        return -1, 0, 0  # it would go on to look like the beginning of something
    return family_of(index.iteration, index.window, index.identity.history)


def _goes_on(region: Region, index: Index) -> bool:
    """Return whether a region holds all snapshots of a window but the newest."""
    try:
        found = decode(region.index_path.read_bytes(), IndexHead, str(region.index_path))
    except OSError:
        return False
    before = (index.identity, index.window, index.num_snapshots - 1, index.header_checksum)
    return before == (found.identity, found.window, found.num_snapshots, found.header_checksum)


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
