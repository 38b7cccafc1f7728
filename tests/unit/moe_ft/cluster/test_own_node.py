"""Facts that nodes find out: links that are dead, by datagrams, and room for ranks."""

import os
from collections.abc import Callable

import pytest

from moe_ft.cluster import own_node
from moe_ft.cluster.own_node import MOST_SENT, RENEWAL_BEATS, OwnNode

LIMIT_S = 3.0
PERIOD_S = 0.25


def make_nodes(*ids: str) -> dict[str, OwnNode]:
    """Return nodes on this machine that know each other."""
    made = {each: OwnNode("127.0.0.1", None, PERIOD_S, LIMIT_S) for each in ids}
    for node in made.values():
        node.open()
    addresses = {each: node.facts(has_ranks=False)["address"] for each, node in made.items()}
    for each, node in made.items():
        node.learn(each, addresses)
    return made


Watch = Callable[..., dict[str, list[str]]]


@pytest.fixture
def watch(advance: Callable[[float], None]) -> Watch:
    """Return a function that has nodes beat for some seconds, and returns those that each misses then."""

    def run(seconds: float, nodes: dict[str, OwnNode]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for _ in range(round(seconds / PERIOD_S)):
            advance(PERIOD_S)
            found = {
                each: sorted(node.facts(has_ranks=False)["unreached"])
                for each, node in nodes.items()
            }
        return found

    return run


def lose_all(node: OwnNode) -> None:
    """Lose what a node is sent from now on."""
    node._receive = lambda now_s: None  # type: ignore[method-assign]


def test_both_ends_of_a_link_that_died_miss_each_other_though_one_direction_alone_died(
    watch: Watch,
) -> None:
    nodes = make_nodes("a", "b", "c")
    assert watch(1, nodes) == {"a": [], "b": [], "c": []}
    lose_all(nodes["b"])
    assert watch(LIMIT_S - 1, nodes) == {"a": [], "b": [], "c": []}
    assert watch(2, nodes) == {"a": [], "b": ["a", "c"], "c": []}
    assert watch(LIMIT_S, nodes) == {"a": ["b"], "b": ["a", "c"], "c": ["b"]}


def test_nodes_that_all_did_something_else_for_long_do_not_miss_each_other(
    watch: Watch, advance: Callable[[float], None]
) -> None:
    nodes = make_nodes("a", "b")
    watch(1, nodes)
    advance(100 * LIMIT_S)
    assert watch(PERIOD_S, nodes) == {"a": [], "b": []}


def test_node_that_was_never_reached_is_not_missed(watch: Watch) -> None:
    nodes = make_nodes("a", "b")
    for node in nodes.values():
        lose_all(node)
    assert watch(10 * LIMIT_S, nodes) == {"a": [], "b": []}


def test_node_sends_to_few_of_many_with_each_beat_and_to_all_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (node,) = make_nodes("a").values()
    many = {f"n{number}": ("127.0.0.1", number) for number in range(1, 2048)}
    node.learn("a", many)
    sent: list[list[int]] = []

    class Sending:
        def sendto(self, _: bytes, address: tuple[str, int]) -> None:
            sent[-1].append(address[1])

        def recv(self, _: int) -> bytes:
            raise BlockingIOError

    monkeypatch.setattr(node, "_socket", Sending())
    for _ in range(2048 // MOST_SENT):
        sent.append([])
        node.facts(has_ranks=False)
    assert {len(each) for each in sent} == {MOST_SENT}
    assert {port for each in sent for port in each} == {*range(1, 2048)}
    assert sum(node.is_due() for _ in range(2 * RENEWAL_BEATS)) == 2


class SmallMemory:
    """Memory of ranks that uses 40 bytes of a file system, which has 60 others."""

    def used_bytes(self) -> int:
        return 40

    def room_bytes(self) -> int:
        return 100

    def remove_unused(self) -> None: ...


@pytest.mark.parametrize(
    ("available", "private", "room"),
    [(1000, 100, 100), (130, 100, 70), (90, 100, 40)],
    ids=["the file system", "the node", "none"],
)
def test_room_for_further_ranks_is_for_their_processes_too(
    available: int, private: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_node, "available_bytes", lambda: available)
    monkeypatch.setattr(own_node, "private_bytes", lambda pids: private)
    node = OwnNode("127.0.0.1", SmallMemory(), PERIOD_S, LIMIT_S)
    facts = node.facts(has_ranks=True, server=os.getpid())
    assert (facts["used_bytes"], facts["room_bytes"]) == (40, room)
    spare = node.facts(has_ranks=False, server=os.getpid())
    assert (spare["used_bytes"], spare["room_bytes"]) == (0, 100)
