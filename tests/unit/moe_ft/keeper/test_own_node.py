"""Links that nodes find dead with datagrams."""

from collections.abc import Callable

import pytest

from moe_ft.keeper.own_node import MOST_SENT, RENEWAL_BEATS, OwnNode

LIMIT_S = 3.0
PERIOD_S = 0.25


def make_nodes(*ids: str) -> dict[str, OwnNode]:
    """Return nodes on this machine that know each other."""
    made = {each: OwnNode({"MASTER_ADDR": "127.0.0.1"}, (), PERIOD_S, LIMIT_S) for each in ids}
    for node in made.values():
        node.open()
    addresses = {each: node.facts(has_ranks=False)["address"] for each, node in made.items()}
    for each, node in made.items():
        node.learn(each, addresses)
    return made


def beat(*nodes: OwnNode) -> list[list[str]]:
    """Have nodes beat until each has heard what the others say of it; return those that they miss."""
    for _ in range(3):
        found = [node.facts(has_ranks=False)["unreached"] for node in nodes]
    return found


def lose_all(node: OwnNode) -> None:
    """Lose what a node is sent from now on."""
    node._receive = lambda now_s: None  # type: ignore[method-assign]


def test_both_ends_of_a_link_that_died_miss_each_other_whichever_direction_died(
    advance: Callable[[float], None],
) -> None:
    nodes = make_nodes("a", "b", "c")
    a, b, c = nodes.values()
    assert beat(a, b, c) == [[], [], []]
    lose_all(b)
    advance(LIMIT_S - 1)
    assert beat(a, b, c) == [[], [], []]
    advance(2)
    assert sorted(b.facts(has_ranks=False)["unreached"]) == ["a", "c"]
    a.facts(has_ranks=False), c.facts(has_ranks=False)  # hear that b does not hear them
    advance(LIMIT_S + 1)
    assert a.facts(has_ranks=False)["unreached"] == ["b"]
    assert beat(c, a) == [["b"], ["b"]], "not each other"


def test_node_that_was_never_reached_is_not_missed(advance: Callable[[float], None]) -> None:
    a, b = make_nodes("a", "b").values()
    lose_all(a)
    lose_all(b)
    beat(a, b)
    advance(100 * LIMIT_S)
    assert beat(a, b) == [[], []]


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
    for _ in range(RENEWAL_BEATS):
        sent.append([])
        node.facts(has_ranks=False)
    assert {len(each) for each in sent} == {MOST_SENT}
    assert {port for each in sent for port in each} == {*range(1, 2048)}
    assert sum(node.is_due() for _ in range(2 * RENEWAL_BEATS)) == 2
