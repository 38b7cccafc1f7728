"""Serves the memory of this rank's node, and keeps replicas or parity for others. The other side is peers.py.

listener.py lets connections in. The memory itself is memory/rank_memory.py.
"""

import mmap
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import xxhash

from moe_ft.engine.background import BackgroundPart, EventQueue
from moe_ft.engine.links.listener import PeerListener
from moe_ft.engine.links.messages import (
    REQUEST,
    Get,
    GetParts,
    Join,
    PeerReply,
    Put,
    pass_over,
    receive,
    receive_header,
    send,
)
from moe_ft.engine.links.parts import VerifiedUnits
from moe_ft.engine.links.streams import Loans, Streams, Target
from moe_ft.engine.links.transport import (
    CHUNK_BYTES,
    PROGRESS_TIMEOUT_S,
    Connection,
    Deadline,
)
from moe_ft.engine.memory.parity import ParityStore
from moe_ft.engine.memory.rank_memory import ReplicaMemory
from moe_ft.engine.memory.region_stores import ReplicaStore
from moe_ft.engine.memory.regions import Region
from moe_ft.engine.updates.adam import begin_repetition
from moe_ft.errors import CorruptStateError, SnapshotError
from moe_ft.files.private_files import open_private
from moe_ft.format.encoding import check_found, check_path, checksum, checksums, decode
from moe_ft.format.index import Index, check_units
from moe_ft.format.updates import Update, decode_update

_MAX_INDEX_BYTES = 1 << 30


class ReplicaKeeper:
    """Owned by the connections' threads, one at a time for each rank whose replicas are kept."""

    def __init__(self) -> None:
        self._replicas: Mapping[int, ReplicaStore] = {}
        self._locks: dict[int, threading.Lock] = {}
        self._newest: dict[int, int] = {}  # iteration that was last accepted, by source
        self._parity: ParityStore | None = None

    def keep(
        self, replicas: Mapping[int, ReplicaMemory], parity: ParityStore | None = None
    ) -> None:
        """Accept replicas of these ranks into this memory, which is open, or what others add to parity."""
        self._parity = parity
        self._locks = {source: threading.Lock() for source in replicas}
        self._replicas = {
            source: ReplicaStore(each.regions, each.pool) for source, each in replicas.items()
        }

    def close(self) -> None:
        """Let nothing be added to parity any more, when what is being added is in there."""
        if self._parity is not None:
            self._parity.close()

    def receive(self, connection: Streams, request: Put) -> PeerReply:
        """Receive a replica; return what is wrong with it, or nothing.

        Raises OSError if it does not arrive in time, or cannot be meant for this rank: the connection ends.
        """
        if request.index_bytes > _MAX_INDEX_BYTES or request.update_bytes > _MAX_INDEX_BYTES:
            raise ConnectionError(
                f"an index of {request.index_bytes} bytes does not come from moe_ft"
            )
        content = receive(connection, request.index_bytes, Deadline.for_bytes(request.index_bytes))
        if self._parity is not None:
            return _receive_stripe(self._parity, connection, request, bytes(content))
        memory = self._replicas.get(request.source)
        region_bytes = 0 if memory is None else memory.regions[0].num_bytes
        if memory is None or request.start_byte + request.data_bytes > region_bytes:
            raise ConnectionError(
                f"a replica of rank {request.source} up to byte {request.start_byte + request.data_bytes}; "
                f"expected {f'at most {region_bytes} bytes' if memory else 'none'}"
            )
        with self._alone(request.source):
            slot_bytes = memory.pool.num_bytes if memory.pool else 0
            made_bytes = region_bytes + slot_bytes if request.update_bytes else 0
            body_bytes = request.data_bytes + request.slot_bytes
            sent_bytes = request.update_bytes + request.gradient_bytes + body_bytes
            deadline = Deadline.for_bytes(sent_bytes + made_bytes)
            update = receive(connection, request.update_bytes, deadline)
            try:
                index = decode(bytes(content), Index, f"the index of rank {request.source}")
                step = decode_update(update) if update else None
                made = step.units if step else ()
                self._check_is_expected(index, request, region_bytes, made)
                continues, sent = request.start_byte > 0, {*request.slots, *made}
                region, index = memory.begin(
                    index, sent, request.keep_iteration, continues=continues
                )
                repeat = None
                if step is not None:
                    num_bytes = request.gradient_bytes
                    repeat = begin_repetition(step, num_bytes, memory, region, index)
            except (OSError, SnapshotError) as error:
                pass_over(connection, request.gradient_bytes, deadline)
                connection.receive_body([body_bytes], body_bytes, deadline)
                return PeerReply(error=str(error), wants_state=bool(update))
            if repeat is not None:
                index = repeat(lambda gradients: connection.receive_into(gradients, deadline))
            contents = {"": memoryview(region.mapping)}
            if memory.pool is not None and sent:
                contents[memory.pool.name] = memoryview(memory.pool.mapping)
            connection.receive_body(_targets(request, index, contents), body_bytes, deadline)
            error_text = self._commit(request, index, memory, region, contents, sent)
            if not error_text or step is None:
                return PeerReply(error=error_text)
            return PeerReply(
                error=error_text,
                wants_state=True,
                made=_made(index, contents, made),
                is_base_damaged=_is_damaged(memory, step, region),
            )

    @contextmanager
    def _alone(self, source: int) -> Iterator[None]:
        """Keep other connections from the replicas of a rank; raises TimeoutError if one stays."""
        # The sender has given up the other connection, which is noticed as soon as it is read from.
        lock = self._locks[source]
        if not lock.acquire(timeout=PROGRESS_TIMEOUT_S):
            raise TimeoutError(f"another replica of rank {source} is being received")
        try:
            yield
        finally:
            lock.release()

    def _check_is_expected(
        self, index: Index, request: Put, region_bytes: int, made: Collection[str]
    ) -> None:
        """Raise CorruptStateError for what another rank wrote, or what its sender has given up since."""
        if index.rank != request.source:
            raise CorruptStateError(
                f"an index of rank {index.rank} in a replica of rank {request.source}"
            )
        if index.file_bytes != region_bytes:
            raise CorruptStateError(
                f"a replica of rank {request.source} of {index.file_bytes} bytes; expected "
                f"{region_bytes} bytes"
            )
        sizes = {name: unit.num_bytes for name, unit in index.units.items() if unit.file}
        names = set(request.slots)
        if not names.isdisjoint(made):
            raise CorruptStateError("an update and a slot that it makes")
        if request.update_bytes and (request.start_byte or request.data_bytes):
            raise CorruptStateError("an update and a stretch of the region that it makes")
        if names - sizes.keys() or request.slot_bytes != sum(sizes[name] for name in names):
            raise CorruptStateError("the slots that follow do not match the index")
        newest = self._newest.get(index.rank, -1)
        if index.iteration < newest:
            raise CorruptStateError(f"iteration {index.iteration} comes after iteration {newest}")

    def _commit(
        self,
        request: Put,
        index: Index,
        memory: ReplicaStore,
        region: Region,
        contents: Mapping[str, memoryview],
        sent: Collection[str],
    ) -> str:
        """Check what arrived and make it a replica; return what is wrong with it."""
        arrived = [
            (name, unit)
            for name, unit in index.entries()
            if (unit.offset >= request.start_byte if not unit.file else name in sent)
        ]
        try:
            check_units(index, contents, f"rank {request.source}", arrived)
        except CorruptStateError as error:
            memory.drop(region)
            return str(error)
        try:
            memory.commit(region, index)
        except OSError as error:
            return f"{error}"
        self._newest[index.rank] = index.iteration
        return ""


def _made(index: Index, contents: Mapping[str, memoryview], names: Collection[str]) -> str:
    """Return a checksum of the units in a region and of some in slots, as they are here."""
    units = [unit for name, unit in index.units.items() if not unit.file or name in names]
    parts = [contents[unit.file][unit.offset :][: unit.num_bytes] for unit in units]
    return checksum("".join(checksums(parts)).encode())


def _is_damaged(memory: ReplicaStore, step: Update, target: Region) -> bool:
    """Return whether the state before a step is not what its index describes: a wrong state follows."""
    region, base = memory.base(step.base_iteration, target)
    contents = {"": region.view}
    if memory.pool is not None and step.units:
        contents[memory.pool.name] = memory.pool.view
    units = [(name, unit) for name, unit in base.entries() if not unit.file or name in step.units]
    try:
        check_units(base, contents, "", units)
    except CorruptStateError:
        return True
    return False


def _receive_stripe(
    store: ParityStore, connection: Streams, request: Put, content: bytes
) -> PeerReply:
    """Receive a stretch of a stripe and add it; return what is wrong with it, or nothing.

    Args:
        content: the index of the sender.

    Raises:
        OSError: if it does not arrive in time, or cannot be meant for this rank: the connection ends.
    """
    group, holder, source = store.group, store.holder, request.source
    is_member = source in group.others(holder)
    start, end = group.stripe(source, holder) if is_member else (0, -1)
    first = request.start_byte - start
    if not 0 <= first <= first + request.data_bytes <= end - start:
        raise ConnectionError(
            f"{request.data_bytes} bytes at byte {request.start_byte} of rank {source} are not of the "
            f"stripe that rank {holder} keeps"
        )
    deadline = Deadline.for_bytes(request.data_bytes)
    version, why_not = None, ""
    try:
        index = decode(content, Index, f"the index of rank {source}")
        if index.rank != source:
            raise CorruptStateError(f"an index of rank {index.rank} from rank {source}")
        version = store.begin(index, request.window_byte, request.keep_iteration)
    except (OSError, SnapshotError) as error:
        why_not = str(error)
    if version is None:
        pass_over(connection, request.data_bytes, deadline)
        return PeerReply(error=why_not)
    found, at = xxhash.xxh3_64(), first
    room = memoryview(bytearray(min(request.data_bytes, CHUNK_BYTES)))
    try:
        while rest := first + request.data_bytes - at:
            piece = room[:rest]
            connection.receive_into(piece, deadline)
            found.update(piece)
            store.add(version, at, piece)
            at += len(piece)
        check_found(f"a stripe of rank {source}", found.hexdigest(), request.checksum)
    except BaseException as error:
        version.is_broken = True
        if not isinstance(error, CorruptStateError):
            raise
        return PeerReply(error=str(error))
    try:
        store.finish(version, index)
    except OSError as error:
        return PeerReply(error=str(error))
    return PeerReply()


def _targets(request: Put, index: Index, contents: Mapping[str, memoryview]) -> Iterator[Target]:
    """Yield the places of a stretch and of slots in region and pool, which are named as units name them."""
    yield contents[""][request.start_byte : request.start_byte + request.data_bytes]
    for unit in map(index.units.__getitem__, request.slots):
        target = contents[unit.file][unit.offset : unit.offset + unit.num_bytes]
        # If it is there it may be kept: nothing else may be written to it.
        yield unit.num_bytes if checksum(target) == unit.checksum else target


class PeerServer:
    """Keeps replicas for other ranks and serves this node's memory directory."""

    def __init__(self, node_dir: Path, host: str) -> None:
        self._node_dir = node_dir
        self._host = host
        self._keeper = ReplicaKeeper()
        self._verified = VerifiedUnits(node_dir)
        self._loans = Loans()
        self._listener = PeerListener(host, self._serve, self._report)
        self._lock = threading.Lock()
        self._reports: EventQueue | None = None
        self._unreported: list[str] = []  # until there are reports
        self.address: tuple[str, int] | None = None

    def start(self) -> None:
        """Listen on a free port of the host's interfaces; raises OSError if that cannot be done."""
        self.address = (self._host, self._listener.start())

    def admit(self, token: str) -> None:
        """Answer peers that know this token; before, nobody is answered."""
        self._listener.admit(token)

    def keep(
        self,
        replicas: Mapping[int, ReplicaMemory],
        reports: EventQueue,
        parity: ParityStore | None = None,
    ) -> None:
        """Accept replicas of these ranks into this memory, which is open, and report failures from now on.

        Args:
            parity: accepts what other ranks add to parity; None where there are replicas.
        """
        self._keeper.keep(replicas, parity)
        with self._lock:
            self._reports = reports
            unreported, self._unreported = self._unreported, []
        for reason in unreported:
            self._report(reason)

    def close(self) -> None:
        """Stop listening, and let nothing be added to parity: its files may be removed."""
        self._listener.close()
        self._keeper.close()

    def _report(self, reason: str) -> None:
        with self._lock:
            if self._reports is None:
                self._unreported.append(reason)
            else:
                self._reports.degraded(BackgroundPart.PEER_SERVER, 0, reason)

    def _serve(self, connection: Connection) -> None:
        """Answer a peer's requests until it closes the connection or something is wrong with it."""
        streams = Streams(connection)
        try:
            while self._answer(streams):
                pass
        except Exception as error:  # the other side learns why, and this connection ends
            reply = PeerReply(error=f"{type(error).__name__}: {error}")
            with suppress(OSError):
                send(connection, reply, Deadline.for_bytes(0))

    def _answer(self, connection: Streams) -> bool:
        """Answer one request; return whether there may be another."""
        if not connection.wait():
            return False
        request = REQUEST.decode(receive_header(connection, Deadline.for_bytes(0)))
        if isinstance(request, Put):
            send(connection, self._keeper.receive(connection, request), Deadline.for_bytes(0))
        elif isinstance(request, Join):
            self._join(connection, request)
        elif isinstance(request, GetParts):
            self._get_parts(connection, request)
        else:
            self._get(connection, request)
        return True

    def _join(self, connection: Streams, request: Join) -> None:
        """Make a connection one stream of a pair, as long as that exists."""

        def confirm() -> None:
            send(connection, PeerReply(), Deadline.for_bytes(0))

        if request.num_before is None:
            self._loans.lend(request.pair, connection, confirm)
            return
        with self._loans.taken(request.pair) as others:
            if len(others) != request.num_before:
                raise ConnectionError(f"{len(others)} streams are there, not {request.num_before}")
            connection.add(others)
            confirm()
            while self._answer(connection):
                pass

    def _get_parts(self, connection: Streams, request: GetParts) -> None:
        try:
            parts, found = self._verified.parts(request)
        except OSError as error:
            send(connection, PeerReply(error=str(error)), Deadline.for_bytes(0))
            return
        deadline = Deadline.for_bytes(parts.num_bytes)
        send(connection, PeerReply(num_bytes=parts.num_bytes, checksum=found), deadline)
        connection.send_body(parts.carried, parts.num_bytes, deadline)

    def _get(self, connection: Streams, request: Get) -> None:
        try:
            check_path(request.path, "a request")
            with open_private(self._node_dir / request.path) as file:
                content = _range_of(file, request)
        except OSError as error:
            send(connection, PeerReply(error=str(error)), Deadline.for_bytes(0))
            return
        deadline = Deadline.for_bytes(len(content))
        send(connection, PeerReply(num_bytes=len(content)), deadline)
        connection.send_body([content], len(content), deadline)


def _range_of(file: BinaryIO, request: Get) -> memoryview:
    end = os.fstat(file.fileno()).st_size
    if request.num_bytes >= 0:
        end = min(end, request.offset + request.num_bytes)
    if end <= request.offset:
        return memoryview(b"")
    return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[request.offset : end]
