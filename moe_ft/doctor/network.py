"""Checks of the network: every node reaches every other one, and its peers fast enough; clocks agree.

Nodes talk over the connections that training will use: the server side is a `PeerListener` with the same
address, port and proof of the token as that of training.
"""

import socket
import struct
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.pool import ThreadPool
from pathlib import Path

import msgspec

from moe_ft.addresses import is_loopback
from moe_ft.doctor.rows import CheckRow, failed, join_nodes, passed, rate_text, warned
from moe_ft.engine.links.messages import pass_over, receive
from moe_ft.engine.links.peers import open_connection
from moe_ft.engine.links.transport import CHUNK_BYTES, PROGRESS_TIMEOUT_S, Connection, Deadline
from moe_ft.files.progress import SLOWEST_BYTES_PER_S

_REACH, _RATE, _CLOCK, _GROUP = "reach", "bandwidth", "clocks", "groups"
_DEVICES = Path("/sys/class/net")
_MOST_AT_ONCE = 16
_WARN_SKEW_S, _FAIL_SKEW_S = 1.0, 900.0  # S3 refuses requests that are 15 minutes off
_OPEN = (
    "Open TCP ports between the nodes, or lead MASTER_ADDR to the network that all of them share: ranks "
    "listen on the interface towards it."
)

Address = tuple[str, int]

_REQUEST, _TIME = struct.Struct(">BI"), struct.Struct(">q")
_NUM_TRIPS = 5  # the quickest one says most about the clock


class _Ask(IntEnum):
    TIME = 1  # answered with the time
    TAKE = 2  # followed by bytes, not answered
    DONE = 3  # answered when everything before it has arrived


def serve(connection: Connection) -> None:
    """Answer the requests of a node until it closes the connection."""
    try:
        while True:
            request = receive(connection, _REQUEST.size, Deadline(PROGRESS_TIMEOUT_S))
            ask, num_bytes = _REQUEST.unpack(request)
            if ask == _Ask.TAKE:
                pass_over(connection, num_bytes, Deadline(PROGRESS_TIMEOUT_S))
            else:
                answer = _TIME.pack(time.time_ns())
                connection.send(answer, Deadline(PROGRESS_TIMEOUT_S))
    except OSError:  # it has closed the connection, or the other side reports the failure
        return


@dataclass(frozen=True, kw_only=True, slots=True)
class Trip:
    """The quickest of a few round trips; the other clock is ahead, give or take half of it."""

    round_trip_s: float
    ahead_s: float


def ping(address: Address, token: str) -> Trip:
    """Connect to a node and ask for its time; raises OSError if it does not answer."""
    with closing(open_connection(address, token)) as connection:
        return min((_ask_time(connection) for _ in range(_NUM_TRIPS)), key=lambda t: t.round_trip_s)


def _ask_time(connection: Connection) -> Trip:
    deadline = Deadline(PROGRESS_TIMEOUT_S)
    wall_ns, start_s = time.time_ns(), time.perf_counter()
    connection.send(_REQUEST.pack(_Ask.TIME, 0), deadline)
    (theirs_ns,) = _TIME.unpack(receive(connection, _TIME.size, deadline))
    trip_s = time.perf_counter() - start_s
    return Trip(round_trip_s=trip_s, ahead_s=(theirs_ns - wall_ns) / 1e9 - trip_s / 2)


def transfer(address: Address, token: str, num_bytes: int, most_s: float) -> tuple[int, float]:
    """Send bytes to a node; return how many, and the seconds until the last one has arrived.

    Args:
        most_s: after which no more are sent.

    Raises:
        OSError: if the node does not take them.
    """
    content = memoryview(bytes(min(CHUNK_BYTES, num_bytes)))
    sent = 0
    with closing(open_connection(address, token)) as connection:
        start_s = time.perf_counter()
        while sent < num_bytes and time.perf_counter() - start_s < most_s:
            piece = content[: num_bytes - sent]
            deadline = Deadline(PROGRESS_TIMEOUT_S)
            connection.send(_REQUEST.pack(_Ask.TAKE, len(piece)), deadline)
            connection.send(piece, deadline)
            sent += len(piece)
        deadline = Deadline(PROGRESS_TIMEOUT_S)
        connection.send(_REQUEST.pack(_Ask.DONE, 0), deadline)
        receive(connection, _TIME.size, deadline)
        return sent, time.perf_counter() - start_s


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and the rank that speaks for it. The address is None if that cannot listen, for the reason."""

    node: str
    rank: int = 0
    address: Address | None = None
    problem: str = ""


def reach_all(peers: Sequence[Peer], token: str) -> dict[str, Trip | str]:
    """Return a round trip to each node, or the reason why there is none; some nodes are asked at a time."""
    with ThreadPool(_MOST_AT_ONCE) as pool:
        trips = pool.map(lambda peer: _visit(peer, token), peers, chunksize=1)
    return {peer.node: trip for peer, trip in zip(peers, trips, strict=True)}


def _visit(peer: Peer, token: str) -> Trip | str:
    if peer.address is None:
        return f"it cannot listen: {peer.problem}"
    try:
        return ping(peer.address, token)
    except OSError as error:
        return f"{peer.address[0]}:{peer.address[1]}: {type(error).__name__}: {error}"


def check_reach(node: str, found: Mapping[str, Trip | str]) -> list[CheckRow]:
    """Return a row on the nodes that a node reaches, and on those that it does not."""
    lost = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    if lost:
        first = next(iter(lost))
        return [failed(_REACH, node, f"not {join_nodes(list(lost))}: {lost[first]}", _OPEN)]
    if [*found] == [node]:
        return [passed(_REACH, node, "the only node; its own listener answers")]
    most_s = max(trip.round_trip_s for trip in found.values() if isinstance(trip, Trip))
    level = "1 ms" if most_s < 1e-3 else "10 ms" if most_s < 1e-2 else f"{most_s * 1e3:.0f} ms"
    others = f"{len(found)} other {'node' if len(found) == 1 else 'nodes'}"
    return [passed(_REACH, node, f"{others}, round trips below {level}")]


def check_clocks(node: str, found: Mapping[str, Trip | str]) -> list[CheckRow]:
    """Return a row on how far the clocks of other nodes are from that of this one."""
    trips = {name: trip for name, trip in found.items() if isinstance(trip, Trip)}
    if not trips:
        return []
    worst = max(trips, key=lambda name: abs(trips[name].ahead_s))
    ahead_s, error_s = trips[worst].ahead_s, trips[worst].round_trip_s / 2
    text = f"{worst} is {abs(ahead_s):.4f} s {'ahead of' if ahead_s > 0 else 'behind'} {node}"
    text += f" (within {error_s:.4f} s)"
    remedy = "Synchronize clocks (chrony): event logs are merged by time, S3 refuses a skew of 15 minutes."
    if abs(ahead_s) - error_s >= _FAIL_SKEW_S:
        return [failed(_CLOCK, "all nodes", text, remedy)]
    if abs(ahead_s) - error_s >= _WARN_SKEW_S:
        return [warned(_CLOCK, "all nodes", text, remedy)]
    return [passed(_CLOCK, "all nodes", f"the farthest: {text}")]


def check_rates(
    node: str,
    peers: Sequence[Peer],
    token: str,
    num_bytes: int,
    snapshot_bytes: int | None,
    most_s: float = 1.0,
    what: str = "replicas",
) -> list[CheckRow]:
    """Return a row on the bandwidth to each node that would keep state, one after the other.

    Args:
        peers: nodes that were reached.
        snapshot_bytes: that the node sends to its peers after a snapshot; None if nothing is planned.
        most_s: seconds for each.
        what: that peers keep.
    """
    rows = []
    for peer in peers:
        assert peer.address is not None
        try:
            sent, took_s = transfer(peer.address, token, num_bytes, most_s)
        except OSError as error:
            found = f"to {peer.node}: {type(error).__name__}: {error}"
            remedy = f"Look for packet loss or a wrong MTU: {PROGRESS_TIMEOUT_S:.0f} s pass without a byte."
            rows.append(failed(_RATE, node, found, remedy))
            continue
        rate = sent / took_s
        found = f"to {peer.node}: {rate_text(sent, took_s)} over one connection"
        if snapshot_bytes is not None:
            found += f"; {what} of a full snapshot take {snapshot_bytes / rate:.1f} s"
        if rate < SLOWEST_BYTES_PER_S:
            found += f"; below {SLOWEST_BYTES_PER_S / 1e6:.0f} MB/s transfers are given up"
            rows.append(failed(_RATE, node, found, _OPEN))
        else:
            rows.append(passed(_RATE, node, found))
    return rows


def check_group(
    node: str, own: str, environment: Mapping[str, str], host: str, devices: Path = _DEVICES
) -> list[CheckRow]:
    """Return a row on the interface that gloo's groups use, by which ranks agree on checkpoints.

    Args:
        own: the address at which this node listens.
        host: its name, at whose address gloo listens unless it is told an interface.
    """
    chosen = environment.get("GLOO_SOCKET_IFNAME")
    if chosen:
        missing = [name for name in chosen.split(",") if not (devices / name).exists()]
        if missing:
            found = f"GLOO_SOCKET_IFNAME={chosen}, and there is no {', '.join(missing)}"
            remedy = f"Name one of {', '.join(sorted(each.name for each in devices.iterdir()))}."
            return [failed(_GROUP, node, found, remedy)]
        return [passed(_GROUP, node, f"GLOO_SOCKET_IFNAME={chosen}")]
    try:
        addresses = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError:
        addresses = set()
    loopback = {each for each in addresses if is_loopback(each)}
    if addresses - loopback or is_loopback(own):
        return [passed(_GROUP, node, "the host name leads to the interface")]
    what = f"leads to {', '.join(sorted(loopback))}" if loopback else "has no address"
    found = f"the host name {host} {what}: groups of gloo cannot reach other nodes"
    return [failed(_GROUP, node, found, "Set GLOO_SOCKET_IFNAME to the network's interface.")]
