"""The address by which other hosts of the job reach this one, and listening there and nowhere else."""

import errno
import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress

import psutil

from moe_ft.errors import ConfigError

_BACKLOG = 128
_MAX_TRIES = 8  # to find a port that is free on several addresses
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_IDLE_S, _PROBE_S, _NUM_PROBES = 60, 10, 6  # until a peer that is silent is known to be gone


def own_host(master_addr: str) -> str:
    """Return the name or address by which the job's other hosts reach this one.

    It is the address of the interface towards the job's master. On the master itself its name may lead to the
    loopback interface, as Debian's /etc/hosts has it: others know it by that name.
    """
    for family, target in _resolve(master_addr):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 1))  # sends nothing
            address = str(probe.getsockname()[0])
            is_others_name = not _is_address(master_addr) and not is_loopback(master_addr)
            return master_addr if is_others_name and is_loopback(address) else address
    return socket.gethostname()


def interface_of(interfaces: str | None, environment: Mapping[str, str]) -> str:
    """Return the network interface of this rank; empty for the one towards the job's master.

    Args:
        interfaces: as --moe-ft-network-interface takes them.

    Raises:
        ConfigError: if there are several, and not one for each local rank.
    """
    if interfaces is None:
        return ""
    names = [name.strip() for name in interfaces.split(",")]
    num_local = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if not all(names) or len(names) not in (1, num_local):
        raise ConfigError(
            f"--moe-ft-network-interface={interfaces} must be the name of one interface, or of one for "
            f"each of the {num_local} local ranks (LOCAL_WORLD_SIZE), in their order. Name so many, "
            "separated by commas."
        )
    return names[int(environment.get("LOCAL_RANK", "0")) % len(names)]


def own_address(interfaces: str | None, environment: Mapping[str, str]) -> str:
    """Return the name or address by which the job's other hosts reach this rank.

    Args:
        interfaces: as --moe-ft-network-interface takes them.

    Raises:
        ConfigError: as `interface_of` does, or if this host has no such interface, or that has no address.
    """
    interface = interface_of(interfaces, environment)
    if not interface:
        return own_host(environment.get("MASTER_ADDR", "127.0.0.1"))
    return address_of("--moe-ft-network-interface", interface)


def address_of(flag: str, interface: str) -> str:
    """Return the address of a network interface of this host, which a flag names.

    Raises:
        ConfigError: if this host has no such interface, or that has no address.
    """
    found = psutil.net_if_addrs()
    # Addresses of the link itself cannot be reached by their number alone.
    addresses = [
        each.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for each in found.get(interface, [])
        if each.family == family and not each.address.startswith("fe80:")
    ]
    if not addresses:
        raise ConfigError(
            f"{flag}={interface} must be an interface of this host with an address, and "
            f"{socket.gethostname()} has {', '.join(sorted(found))}. Name one of them that leads to the "
            "other nodes, or leave the flag out."
        )
    return addresses[0]


def listen(host: str, port: int = 0, *, is_alone: bool = False) -> list[socket.socket]:
    """Listen on one port of this host's interfaces that a name or an address leads to.

    A name of this host that leads to no interface but the loopback is known to the others by an address that
    cannot be found out here: for such a name alone, on all interfaces.

    Port 0 is one that is free; `is_alone` says that nobody comes from another host. Raises OSError if the
    address is not one of this host, or the port is not free.
    """
    if _is_address(host):
        family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
        return [socket.create_server((host, port), family=family, backlog=_BACKLOG)]
    addresses = _resolve(host)
    if not is_loopback(host) and not is_alone:
        addresses = [each for each in addresses if not is_loopback(each[1])]
    num_tries = 0
    while True:
        num_tries += 1
        try:
            return _listen_on(addresses, port) or [_listen_everywhere(port)]
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE or num_tries == _MAX_TRIES:
                raise


def _listen_on(addresses: list[tuple[socket.AddressFamily, str]], port: int) -> list[socket.socket]:
    """Listen on the same port of all addresses that are of this host."""
    listeners: list[socket.socket] = []
    try:
        for family, address in addresses:
            port = listeners[0].getsockname()[1] if listeners else port
            try:
                listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno in _NOT_HERE:
                    continue
                raise
            listeners.append(listener)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen_everywhere(port: int) -> socket.socket:
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=_BACKLOG)
    return socket.create_server(
        ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
    )


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: a label that is too long
        return []
    return list(dict.fromkeys((family, str(target[0])) for family, _, _, _, target in found))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether an address, or a name, means the loopback interface on every host (RFC 6761)."""
    if _is_address(host):
        return ipaddress.ip_address(host).is_loopback
    return host in ("localhost", "localhost.localdomain") or host.endswith(".localhost")


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and have the kernel notice a peer that is gone."""
    with suppress(OSError):  # it is broken already, which the first step says
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
