"""A host is known by the address towards the master, and listens there and nowhere else."""

import errno
import socket
from typing import Any

import pytest

from moe_ft.addresses import interface_of, listen, own_address, own_host
from moe_ft.errors import ConfigError

LOOPBACK = "127.0.0.1"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"  # of this host too
ELSEWHERE = "203.0.113.1"  # for documentation: of no host (RFC 5737)
TIMEOUT_S = 120.0
needs_ipv6 = pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names that lead to addresses; the second and third loopback addresses stand for other interfaces."""
    names: dict[str, list[str]] = {}
    resolve = socket.getaddrinfo

    def fake(host: str, *args: Any, **kwargs: Any) -> list[Any]:
        if host not in names:
            return resolve(host, *args, **kwargs)
        return [found for each in names[host] for found in resolve(each, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", fake)
    monkeypatch.setattr(
        "moe_ft.addresses.is_loopback",
        lambda host: host in (LOOPBACK, "::1", "localhost"),
    )
    return names


class Listening:
    """Listeners that are closed at the end."""

    def __init__(self, host: str) -> None:
        self.listeners = listen(host)
        self.addresses = {each.getsockname()[0] for each in self.listeners}
        (self.port,) = {each.getsockname()[1] for each in self.listeners}

    def __enter__(self) -> "Listening":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.listeners:
            each.close()

    def is_reached(self, address: str) -> bool:
        """Return whether someone listens at an address."""
        try:
            socket.create_connection((address, self.port), TIMEOUT_S).close()
        except ConnectionRefusedError:
            return False
        return True


# Listening


@pytest.mark.parametrize("host", [LOOPBACK, FIRST, pytest.param("::1", marks=needs_ipv6)])
def test_address_is_listened_on_alone(host: str) -> None:
    with Listening(host) as listening:
        assert listening.addresses == {host}


def test_address_of_another_host_raises() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        listen(ELSEWHERE)


def test_name_is_listened_on_at_its_interfaces_without_the_loopback_on_one_port(
    names: dict[str, list[str]],
) -> None:
    names["node"] = [LOOPBACK, FIRST, SECOND]
    with Listening("node") as listening:
        assert listening.addresses == {FIRST, SECOND}
        assert listening.is_reached(FIRST)
        assert not listening.is_reached(LOOPBACK)


def test_name_is_listened_on_at_those_of_its_addresses_that_this_host_has(
    names: dict[str, list[str]],
) -> None:
    names["node"] = [ELSEWHERE, FIRST]
    with Listening("node") as listening:
        assert listening.addresses == {FIRST}


@pytest.mark.parametrize("addresses", [[LOOPBACK], [ELSEWHERE]])
def test_name_that_leads_to_no_interface_but_the_loopback_is_listened_on_everywhere(
    names: dict[str, list[str]], addresses: list[str]
) -> None:
    names["node"] = addresses
    with Listening("node") as listening:
        assert listening.is_reached(LOOPBACK)
        assert listening.is_reached(SECOND)


@needs_ipv6
def test_name_that_is_listened_on_everywhere_is_reached_by_ipv6(
    names: dict[str, list[str]],
) -> None:
    names["node"] = [LOOPBACK]
    with Listening("node") as listening:
        assert listening.is_reached("::1")


def test_localhost_is_listened_on_at_the_loopback_alone(names: dict[str, list[str]]) -> None:
    names["localhost"] = [LOOPBACK]
    with Listening("localhost") as listening:
        assert listening.addresses == {LOOPBACK}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count down the times that a port is taken on the second address."""
    times = [0]
    create = socket.create_server

    def fake(address: tuple[str, int], **kwargs: Any) -> socket.socket:
        if address[0] == SECOND and times[0] > 0:
            times[0] -= 1
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return create(address, **kwargs)

    monkeypatch.setattr(socket, "create_server", fake)
    return times


def test_port_that_is_taken_on_one_interface_is_replaced_on_all(
    names: dict[str, list[str]], taken: list[int]
) -> None:
    names["node"], taken[0] = [FIRST, SECOND], 2
    with Listening("node") as listening:
        assert listening.addresses == {FIRST, SECOND}


def test_ports_that_are_taken_again_and_again_raise(
    names: dict[str, list[str]], taken: list[int]
) -> None:
    names["node"], taken[0] = [FIRST, SECOND], 1000
    with pytest.raises(OSError, match="Address already in use"):
        listen("node")


# The own address


@pytest.mark.parametrize("master", [LOOPBACK, pytest.param("::1", marks=needs_ipv6)])
def test_own_address_towards_a_loopback_address_is_that(master: str) -> None:
    assert own_host(master) == master


def test_own_address_towards_localhost_is_a_number(names: dict[str, list[str]]) -> None:
    names["localhost"] = [LOOPBACK]
    assert own_host("localhost") == LOOPBACK


def test_own_address_on_a_master_whose_name_leads_to_the_loopback_is_that_name(
    names: dict[str, list[str]],
) -> None:
    names["master"] = [LOOPBACK]
    assert own_host("master") == "master"


def test_own_address_towards_a_master_whose_first_address_cannot_be_reached_is_that_to_the_next(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.socket.connect

    def fake(probe: socket.socket, target: tuple[str, int]) -> None:
        if target[0] == ELSEWHERE:
            raise OSError(errno.ENETUNREACH, "Network is unreachable")
        connect(probe, target)

    monkeypatch.setattr(socket.socket, "connect", fake)
    names["master"] = [ELSEWHERE, LOOPBACK]
    assert own_host("master") == "master"


@pytest.mark.parametrize("master", ["no-such-host.invalid", "", "x" * 100])
def test_own_address_towards_a_host_that_does_not_exist_is_the_hosts_name(master: str) -> None:
    assert own_host(master) == socket.gethostname()


def test_address_of_an_interface_is_listened_on() -> None:
    address = own_address("lo", {})
    assert address == LOOPBACK
    (listener,) = listen(address)
    with listener:
        assert listener.getsockname()[0] == LOOPBACK


def test_interface_that_this_host_lacks_is_refused_with_those_that_it_has() -> None:
    message = "--moe-ft-network-interface=ib7 must be .* has .*lo.* Name one of them"
    with pytest.raises(ConfigError, match=message):
        own_address("ib7", {})


def test_address_without_an_interface_is_that_towards_the_master() -> None:
    assert own_address(None, {"MASTER_ADDR": LOOPBACK}) == LOOPBACK


@pytest.mark.parametrize(
    ("interfaces", "rank", "name"),
    [(None, "3", ""), ("ib0", "3", "ib0"), ("ib0,ib1", "0", "ib0"), ("ib0, ib1", "1", "ib1")],
)
def test_interface_of_a_rank_is_the_only_one_or_that_of_its_place_on_the_node(
    interfaces: str | None, rank: str, name: str
) -> None:
    environment = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": rank}
    assert interface_of(interfaces, environment) == name


@pytest.mark.parametrize("interfaces", ["ib0,ib1", "ib0,ib1,ib2,ib3", "ib0,,ib2", ""])
def test_interfaces_that_are_not_one_for_each_local_rank_are_refused(interfaces: str) -> None:
    message = f"--moe-ft-network-interface={interfaces} must be .* the 3 local ranks .*Name so many"
    environment = {"LOCAL_WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    with pytest.raises(ConfigError, match=message):
        interface_of(interfaces, environment)
