"""Logs on other nodes: fetched one iteration ahead, and refused where they are damaged."""

from pathlib import Path

import pytest

from moe_ft.engine.boundary.reading import FetchedLog, open_log
from moe_ft.errors import CorruptStateError, UnrecoverableError
from moe_ft.format.boundary import BoundaryIndex
from tests.unit.moe_ft.engine.boundary.logs import NEXT, small_log


class Node:
    """Another node with a log of three iterations."""

    def __init__(self, directory: Path) -> None:
        with small_log(directory, num_slots=3) as log:
            for iteration in range(3):
                log.take(iteration)
        self.log, problems = open_log(directory)
        assert not problems
        self.directory = directory
        self.asked: list[int] = []
        self.damaged, self.gone = -1, -1
        self.is_closed = False

    def fetch(self, index: BoundaryIndex, offset: int, num_bytes: int) -> memoryview:
        """Return bytes of a log, or fail as told to."""
        self.asked.append(index.iteration)
        if index.iteration == self.gone:
            raise ConnectionResetError("the node is gone")
        content = bytearray((self.directory / index.file).read_bytes()[offset : offset + num_bytes])
        if index.iteration == self.damaged:
            content[0] ^= 1
        return memoryview(content)

    def close(self) -> None:
        """Note it."""
        self.is_closed = True

    def opened(self) -> FetchedLog:
        """Return its log as the rank that it was sent to reads it."""
        indexes = {iteration: each.index for iteration, each in self.log.items()}
        return FetchedLog(indexes, NEXT, self.fetch, self.close)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_everything_that_was_sent_to_the_rank_is_read(node: Node) -> None:
    fetched = node.opened()
    assert list(fetched) == [0, 1, 2] and len(fetched) == 3
    for iteration in range(3):
        own = [each for each in node.log[iteration].index.sent if each.neighbour == NEXT]
        assert own
        for sent in own:
            assert fetched[iteration].read(sent) == node.log[iteration].read(sent)
    assert sorted(set(node.asked)) == [0, 1, 2]
    assert len(node.asked) == 3 * len(own), "each tensor once, those for others never"
    fetched.close()
    assert node.is_closed


def test_next_iteration_is_on_its_way_while_one_is_replayed(node: Node) -> None:
    fetched = node.opened()
    assert not node.asked, "nothing before the replay begins"
    assert fetched.get(0) is fetched.get(0)
    fetched.close()  # waits for what was begun
    assert set(node.asked) <= {0, 1}


def test_iteration_that_the_log_lacks_is_not_there(node: Node) -> None:
    fetched = node.opened()
    assert fetched.get(7) is None
    assert not node.asked


def test_iterations_on_the_own_node_are_not_fetched(node: Node) -> None:
    indexes = {2: node.log[2].index}
    here = {0: node.log[0], 1: node.log[1]}
    fetched = FetchedLog(indexes, NEXT, node.fetch, node.close, here)
    assert list(fetched) == [0, 1, 2]
    assert fetched[0] is here[0] and fetched[1] is here[1]
    assert fetched[2].num_sent(NEXT, node.log[2].index.sent[0].direction) > 0
    assert set(node.asked) == {2}
    fetched.close()


def test_damaged_tensor_is_refused(node: Node) -> None:
    node.damaged = 1
    fetched = node.opened()
    (first, *_) = (each for each in node.log[1].index.sent if each.neighbour == NEXT)
    with pytest.raises(CorruptStateError, match="does not match its checksum"):
        fetched[1].read(first)
    fetched.close()


def test_node_that_is_gone_ends_the_replay_with_its_name(node: Node) -> None:
    node.gone = 0
    fetched = node.opened()
    with pytest.raises(
        UnrecoverableError, match=r"log of rank \d+, iteration 0, cannot be fetched"
    ):
        _ = fetched[0]
    fetched.close()
