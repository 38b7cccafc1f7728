"""Check of the network: every node reaches every other one, and its peers fast enough; clocks agree."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from moe_ft.doctor.probe import Trip, ping, transfer
from moe_ft.doctor.rows import Row, failed, join_nodes, passed, rate_text, warned
from moe_ft.engine.links.messages import PROGRESS_TIMEOUT_S
from moe_ft.files.patience import SLOWEST_BYTES_PER_S

_REACH, _RATE, _CLOCK, _GROUP = "reach", "bandwidth", "clocks", "groups"
_DEVICES = Path("/sys/class/net")
_MOST_AT_ONCE = 16
_WARN_SKEW_S, _FAIL_SKEW_S = 1.0, 900.0  # S3 refuses requests that are 15 minutes off
_OPEN = (
    "Open TCP ports between the nodes, or lead MASTER_ADDR to the network that all of them share: ranks "
    "listen on the interface towards it."
)

Address = tuple[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """Another node. The address is None if it cannot listen, for the reason."""

    node: str
    address: Address | None
    problem: str = ""


def reach_all(peers: Sequence[Peer], token: str) -> dict[str, Trip | str]:
    """Return a round trip to each node, or the reason why there is none."""

    def visit(peer: Peer) -> Trip | str:
        if peer.address is None:
            return f"it cannot listen: {peer.problem}"
        try:
            return ping(peer.address, token)
        except OSError as error:
            return f"{peer.address[0]}:{peer.address[1]}: {type(error).__name__}: {error}"

    return _at_once({peer.node: partial(visit, peer) for peer in peers})


def _at_once[Found](acts: Mapping[str, Callable[[], Found]]) -> dict[str, Found]:
    """Return what calls return, some at a time. Each must end by itself."""
    found: dict[str, Found] = {}
    waiting = list(acts.items())
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not waiting:
                    return
                name, act = waiting.pop()
            found[name] = act()

    threads = [
        threading.Thread(target=work, name="moe_ft-doctor", daemon=True)
        for _ in range(min(_MOST_AT_ONCE, len(acts)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {name: found[name] for name in acts}


def check_reach(node: str, found: Mapping[str, Trip | str]) -> list[Row]:
    """Return a row on the nodes that a node reaches, and on those that it does not."""
    lost = {name: reason for name, reason in found.items() if isinstance(reason, str)}
    if lost:
        first = next(iter(lost))
        return [failed(_REACH, node, f"not {join_nodes(list(lost))}: {lost[first]}", _OPEN)]
    if [*found] == [node]:
        return [passed(_REACH, node, "the only node; its own listener answers")]
    most_s = max(trip.round_trip_s for trip in found.values() if isinstance(trip, Trip))
    level = "1 ms" if most_s < 1e-3 else "10 ms" if most_s < 1e-2 else f"{most_s * 1e3:.0f} ms"
    others = f"{len(found)} other node{'s' * (len(found) > 1)}"
    return [passed(_REACH, node, f"{others}, round trips below {level}")]


def check_clocks(node: str, found: Mapping[str, Trip | str]) -> list[Row]:
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
) -> list[Row]:
    """Return a row on the bandwidth to each node that would keep replicas, one after the other.

    Args:
        peers: the nodes; those that cannot be reached are left to `check_reach`.
        num_bytes: to send to each.
        snapshot_bytes: that the node sends to its peers after a snapshot; None if nothing is planned.
        most_s: seconds for each.
    """
    rows = []
    for peer in peers:
        if peer.address is None:
            continue
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
            found += f"; replicas of a full snapshot take {snapshot_bytes / rate:.1f} s"
        if rate < SLOWEST_BYTES_PER_S:
            found += f"; below {SLOWEST_BYTES_PER_S / 1e6:.0f} MB/s transfers are given up"
            rows.append(failed(_RATE, node, found, _OPEN))
        else:
            rows.append(passed(_RATE, node, found))
    return rows


def check_group(
    node: str, own: str, environment: Mapping[str, str], host: str, devices: Path = _DEVICES
) -> list[Row]:
    """Return a row on the interface that gloo's groups use, by which ranks agree on checkpoints.

    Args:
        own: the address at which this node listens.
        host: its name, to whose address gloo listens unless it is told an interface.
        devices: has an entry for each interface.
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
    loopback = {each for each in addresses if _is_loopback(each)}
    if addresses - loopback or _is_loopback(own):
        return [passed(_GROUP, node, "the host name leads to the interface")]
    what = f"leads to {', '.join(sorted(loopback))}" if loopback else "has no address"
    found = f"the host name {host} {what}: groups of gloo cannot reach other nodes"
    return [failed(_GROUP, node, found, "Set GLOO_SOCKET_IFNAME to the network's interface.")]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"
