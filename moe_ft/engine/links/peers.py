"""Host memory of other nodes: sending replicas to peers, reading theirs. The other side is server.py.

Which peers get a snapshot when is sender.py.

Plain connections between pairs of ranks: if one pair fails, only that pair stops. In a process group one
rank's timeout would stop all of them.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import msgspec
import numpy as np

from moe_ft.engine.background import BackgroundPart, EventQueue, PhaseHook
from moe_ft.engine.clock import Clock
from moe_ft.engine.links.messages import (
    REPLY,
    Get,
    GetParts,
    Join,
    PeerReply,
    Put,
    answer_challenge,
    receive_challenge,
    receive_header,
    send,
)
from moe_ft.engine.links.parts import Parts, zeros
from moe_ft.engine.links.streams import Streams
from moe_ft.engine.links.transport import PROGRESS_TIMEOUT_S, Connection, Deadline, connect
from moe_ft.engine.memory.regions import Region, UnitPool
from moe_ft.engine.updates import following
from moe_ft.engine.updates.following import Followers, LentUpdate, Sent
from moe_ft.errors import CorruptStateError
from moe_ft.faults import Phase
from moe_ft.files.progress import waiting
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.entries import UnitEntry
from moe_ft.format.index import Index
from moe_ft.format.updates import Update, encode_update
from moe_ft.store.extents import TargetVersions
from moe_ft.topology import RankInfo

_SLOWEST_CHECK_BYTES_PER_S = 100e6  # of a peer that verifies a replica
_BUSY_PAUSE_S = 0.1
_FIRST_RETRY_S, _LONGEST_RETRY_S = 10.0, 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutgoingReplica:
    """A committed snapshot that peers are to have.

    Attributes:
        pool: holds units that the region does not; None without one.
        index: describes both.
        start_byte, end_byte: what the snapshot adds to the region.
        keep_iteration: the last iteration of the newest complete window, which peers keep until they have
            all of this one.
        peers: ranks that are to have it; None for all that keep replicas.
        lent: the step that made it, which a peer can repeat; None where gradients are not kept.
        window_byte: where the snapshot begins of which this is a peer's part for parity; None for a replica.
    """

    region: Region
    pool: UnitPool | None
    index: Index
    start_byte: int
    end_byte: int
    keep_iteration: int | None
    peers: frozenset[int] | None = None
    lent: LentUpdate | None = None
    window_byte: int | None = None

    def within(self, start_byte: int, end_byte: int) -> "OutgoingReplica":
        """Return the part of it in a range of the region."""
        first, last = (
            min(max(each, start_byte), end_byte) for each in (self.start_byte, self.end_byte)
        )
        return replace(self, start_byte=first, end_byte=last, window_byte=self.start_byte)


class PeerConnection:
    """A connection to one peer. Owned by one thread."""

    def __init__(
        self,
        address: tuple[str, int],
        token: str,
        num_streams: int = 1,
    ) -> None:
        self._open = partial(open_streams, address, token, num_streams)
        self._connection: Streams | None = None

    def _connected(self) -> Streams:
        if self._connection is None:
            self._connection = self._open()
        return self._connection

    def put(
        self,
        replica: OutgoingReplica,
        slots: Sequence[str],
        phase_hook: PhaseHook,
        update: Update | None = None,
    ) -> PeerReply:
        """Send a replica and wait until it is committed there; raises OSError if that fails.

        Args:
            slots: names of units of the pool, which are sent too.
            update: is sent with its gradients in place of the region and the slots that it makes.

        Returns:
            The peer's reply. Its error says why it wants the region after all; empty if it has committed.
        """
        try:
            return self._put(replica, slots, phase_hook, update)
        except CorruptStateError:
            raise  # an answer: the connection is in order
        except BaseException:
            self.close()  # in the middle of a message
            raise

    def _put(
        self,
        replica: OutgoingReplica,
        slots: Sequence[str],
        phase_hook: PhaseHook,
        update: Update | None,
    ) -> PeerReply:
        connection, index = self._connected(), replica.index
        if update is not None and update.is_lossy and replica.lent is not None:
            update = msgspec.structs.replace(update, checksum=checksum(replica.lent.gradients))
        content, step = encode(index), b"" if update is None else encode_update(update)
        data = memoryview(replica.region.mapping)[replica.start_byte : replica.end_byte]
        num_made_bytes = len(data)  # there, which takes its time however little is sent
        if update is not None:
            assert replica.lent is not None
            data = replica.lent.gradients
            num_made_bytes += sum(index.units[name].num_bytes for name in update.units)
            slots = [name for name in slots if name not in update.units]
        request = Put(
            index.rank,
            replica.keep_iteration,
            len(content),
            replica.start_byte,
            0 if update else len(data),
            tuple(slots),
            sum(index.units[name].num_bytes for name in slots),
            len(step),
            len(data) if update else 0,
            "" if replica.window_byte is None else checksum(data),
            replica.window_byte or 0,
        )
        num_bytes = max(num_made_bytes, len(data)) + request.slot_bytes
        deadline = Deadline.for_bytes(len(content) + len(step) + num_bytes)
        send(connection, request, deadline)
        connection.send(content, deadline)
        connection.send(step, deadline)
        stretch = _halves(data, partial(phase_hook, Phase.REPLICATE, index.iteration))
        num_body_bytes = request.data_bytes + request.slot_bytes
        if update is not None or request.checksum:  # is used as it arrives
            for part in stretch:
                connection.send(part, deadline)
            num_body_bytes = request.slot_bytes
        body = chain(stretch, _slots(replica, slots))
        connection.send_body(body, num_body_bytes, deadline)
        check_s = PROGRESS_TIMEOUT_S + num_bytes / _SLOWEST_CHECK_BYTES_PER_S
        reply = REPLY.decode(receive_header(connection, Deadline(check_s)))
        if reply.error and not reply.wants_state:
            raise CorruptStateError(reply.error)
        return reply

    def get(self, path: str, offset: int = 0, num_bytes: int = -1) -> memoryview:
        """Return a range of a file in the peer's node memory; raises OSError if that fails."""
        _, (content,) = self._ask(Get(path, offset, num_bytes), Deadline.for_bytes(0))
        return content

    def get_parts(self, request: GetParts, unit_bytes: int) -> memoryview:
        """Return a unit of the peer's node memory of which only ranges are there; the rest is zero.

        The peer verifies all of it before.

        Raises:
            OSError: if that fails.
            CorruptStateError: if other bytes came than were sent.
        """
        unit = zeros(unit_bytes)
        parts = Parts(unit, request.ranges)
        check_s = PROGRESS_TIMEOUT_S + unit_bytes / _SLOWEST_CHECK_BYTES_PER_S
        reply, _ = self._ask(request, Deadline(check_s), parts.carried)
        if reply.checksum != parts.checksum:
            raise CorruptStateError(f"parts of unit {request.unit} do not match their checksum")
        parts.spread()
        return unit

    def _ask(
        self,
        request: Get | GetParts,
        deadline: Deadline,
        targets: Sequence[memoryview] | None = None,
    ) -> tuple[PeerReply, Sequence[memoryview]]:
        """Send a request and fill targets, or new memory; return the reply and what was filled."""
        try:
            connection = self._connected()
            send(connection, request, deadline)
            with waiting(deadline.rest_s):
                reply = REPLY.decode(receive_header(connection, deadline))
            if targets is None:
                # Not zeroed: that takes as long as receiving, and the sender waits for it.
                targets = [memoryview(np.empty(reply.num_bytes, np.uint8))]
            elif not reply.error and sum(map(len, targets)) != reply.num_bytes:
                raise ConnectionError(
                    f"{reply.num_bytes} bytes are other parts than those asked for"
                )
            if not reply.error:
                deadline = Deadline.for_bytes(reply.num_bytes)
                with waiting(deadline.rest_s):
                    connection.receive_body(targets, reply.num_bytes, deadline)
        except BaseException:
            self.close()  # in the middle of a message
            raise
        if reply.error:
            raise OSError(reply.error)
        return reply, targets

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _halves(data: memoryview, hook: Callable[[], None]) -> Iterator[memoryview]:
    """Yield what follows the index of a replica, and call a hook in the middle."""
    half = len(data) // 2
    yield data[:half]
    hook()
    yield data[half:]


def _slots(replica: OutgoingReplica, names: Sequence[str]) -> Iterator[memoryview]:
    for name in names:
        assert replica.pool is not None
        unit = replica.index.units[name]
        with memoryview(replica.pool.mapping) as pooled:
            yield pooled[unit.offset : unit.offset + unit.num_bytes]


def open_streams(address: tuple[str, int], token: str, num_streams: int) -> Streams:
    """Return connections to a peer that carry large bodies together; raises OSError if that fails."""
    pair = secrets.token_bytes(16).hex()
    opened: list[Connection] = []
    try:
        while len(opened) < num_streams:
            opened.append(open_connection(address, token))
            if num_streams > 1:
                deadline, is_last = Deadline(PROGRESS_TIMEOUT_S), len(opened) == num_streams
                send(opened[-1], Join(pair, num_streams - 1 if is_last else None), deadline)
                reply = REPLY.decode(receive_header(opened[-1], deadline))
                if reply.error:
                    raise ConnectionError(reply.error)
    except BaseException:
        Streams(*opened).close()
        raise
    return Streams(*reversed(opened))


def open_connection(address: tuple[str, int], token: str) -> Connection:
    """Return a connection to a peer whose two sides know the token; raises OSError if that fails."""
    deadline = Deadline(PROGRESS_TIMEOUT_S)
    while (connection := _connect(address, token, deadline)) is None:
        time.sleep(_BUSY_PAUSE_S)
        if deadline.is_over:
            raise TimeoutError(
                f"{address[0]}:{address[1]} refuses connections before authentication: it has too many "
                "unauthenticated ones, or its start has failed"
            )
    return connection


def _connect(address: tuple[str, int], token: str, deadline: Deadline) -> Connection | None:
    """Return a connection; None while the server takes no strangers."""
    connection = connect(address, deadline)
    try:
        try:
            challenge = receive_challenge(connection, deadline)
        except ConnectionError:
            connection.close()
            return None
        answer_challenge(connection, token, challenge, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


class PeerReplicator:
    """Sends committed regions to this rank's peers. Owned by the sending worker.

    The training thread closes it when that worker has ended, or was left because it hangs.

    Attributes:
        most_bytes: the most that a peer got of the last snapshot, in slots too.
        can_follow: False once a peer computes other bits than this rank.
        lacking: peers that do not have what was last to be sent to them.
    """

    def __init__(
        self,
        peers: Sequence[RankInfo],
        token: str,
        reports: EventQueue,
        phase_hook: PhaseHook,
        clock: Clock,
        num_streams: int = 1,
        stripes: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Connect to nobody yet.

        Args:
            stripes: ranges of the region that peers add to parity, by rank; None if they keep replicas.
        """
        self._reports = reports
        self._phase_hook = phase_hook
        self._clock = clock
        self._stripes = stripes or {}
        self._pairs = {
            peer.rank: _Pair(PeerConnection(peer.address, token, num_streams), clock)
            for peer in peers
            if peer.address
        }
        self._versions: TargetVersions[int, tuple[int, str], tuple[int, str]] = (
            TargetVersions()
        )  # by rank
        self._followers = Followers(reports)
        self._is_lacking_address = len(self._pairs) < len(peers)
        self.most_bytes = 0
        self.can_follow = True
        self.lacking: set[int] = set()

    @property
    def adds_to_parity(self) -> bool:
        """True if peers keep parity, not replicas."""
        return bool(self._stripes)

    def replicate(self, replica: OutgoingReplica) -> bool:
        """Send a snapshot to its peers; return whether all of them have it. Failures are reported.

        Of the window and the pool a peer gets what it does not have yet.
        A pair that fails is tried again with the next snapshot, then less and less often.
        """
        start, index = self._clock.perf_counter(), replica.index
        sent = {
            rank: self._send(rank, pair, replica)
            for rank, pair in self._pairs.items()
            if replica.peers is None or rank in replica.peers
        }
        self._followers.judge(index.rank, index.iteration)
        reached = {rank: each for rank, each in sent.items() if each is not None}
        self.lacking = (self.lacking | sent.keys()) - reached.keys()
        self.can_follow = self._followers.can_follow
        self.most_bytes = max((each.num_bytes for each in reached.values()), default=0)
        if reached:
            self._reports.add(
                "replicate",
                index.iteration,
                **following.fields_of(reached),
                seconds=self._clock.perf_counter() - start,
                num_units=sum(1 for _ in index.entries()),
                peers=[*reached],
            )
        return len(reached) == len(sent) and not self._is_lacking_address

    def _send(self, rank: int, pair: "_Pair", replica: OutgoingReplica) -> Sent | None:
        """Send what a peer lacks, or what makes it; return how much that was, None if it failed."""
        wait_s = pair.retry_s - self._clock.monotonic()
        iteration = replica.index.iteration
        if wait_s > 0:
            reason = f"rank {rank} failed {pair.num_failures} times; tried again in {wait_s:.0f} s"
            self._reports.skipped(BackgroundPart.REPLICATE, iteration, reason)
            return None
        units = _units_of(replica.index)
        versions = {each: (unit.iteration, unit.checksum) for each, unit in units.items()}
        try:
            lacking = self._versions.lacking(rank, versions)
            slots = [each[1] for each in lacking if units[each].file]
            in_region = [units[each].offset for each in lacking if not units[each].file]
            if min(in_region, default=replica.start_byte) < replica.start_byte:
                replica = replace(replica, start_byte=0)
            if rank in self._stripes:
                replica = replica.within(*self._stripes[rank])
            made = following.made_slots(replica.lent)
            # Other ranks save the state outside experts, and no expert is followed.
            is_empty = not made and all(unit.file for unit in units.values())
            sent = self._followers.send(
                rank,
                None if is_empty else replica.lent,
                replica.keep_iteration,
                following.known_bases(self._versions.known(rank), units, made, iteration),
                lambda update: pair.connection.put(replica, slots, self._phase_hook, update),
                replica.end_byte - replica.start_byte,
                {name: replica.index.units[name].num_bytes for name in slots},
            )
        except Exception as error:  # of the network, the peer, or an injected one
            pair.fail()
            self._versions.forget(rank)
            self._reports.degraded(
                BackgroundPart.REPLICATE,
                iteration,
                f"rank {rank} did not take the replica: {type(error).__name__}: {error}; until it takes "
                "one, a loss of this node may cost all that storage does not have",
            )
            return None
        pair.num_failures = 0
        self._versions.note(rank, versions)
        return sent

    def close(self) -> None:
        """Close all connections."""
        for pair in self._pairs.values():
            pair.connection.close()


class _Pair:
    """A peer: the connection to it, and when to try it again after failures."""

    def __init__(self, connection: PeerConnection, clock: Clock) -> None:
        self.connection = connection
        self._clock = clock
        self.num_failures = 0
        self.retry_s = 0.0

    def fail(self) -> None:
        """Note a failure: the next snapshot tries again, the ones after that wait longer and longer."""
        self.num_failures += 1
        if self.num_failures > 1:
            delay_s = min(_FIRST_RETRY_S * 2 ** (self.num_failures - 2), _LONGEST_RETRY_S)
            self.retry_s = self._clock.monotonic() + delay_s


def _units_of(index: Index) -> dict[tuple[int, str], UnitEntry]:
    """Return all unit versions by name, and by the snapshot that has the weights; -1 for FULL."""
    snapshots = enumerate((index.units, *index.compute), -1)
    return {(number, name): unit for number, units in snapshots for name, unit in units.items()}
