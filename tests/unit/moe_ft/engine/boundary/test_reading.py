"""Boundary logs that are read in place or fetched ahead, and played to a rank: every damage is found."""

import os
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.engine.boundary.reading import FetchedLog
from moe_ft.engine.memory.regions import make_header
from moe_ft.errors import CorruptStateError, SnapshotError, UnrecoverableError
from moe_ft.format.boundary import BoundaryIndex, Direction, SentTensor
from moe_ft.format.encoding import decode, encode
from moe_ft.planning.boundary_log import header_bytes
from tests.unit.moe_ft.builders import make_history
from tests.unit.moe_ft.engine.boundary.logs import NEXT, RANK, TRAFFIC, Send, open_log, small_log


def test_file_of_a_log_is_a_valid_safetensors_file(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        sends = log.take(0)
    with safe_open(tmp_path / "boundary_0.safetensors", framework="pt") as opened:
        assert opened.get_tensor("forward/to_00002/1").equal(sends[1][2])
        assert opened.get_tensor("backward/to_00000/0").equal(sends[2][2])


def test_truncated_or_empty_file_is_refused(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
        log.take(1)
    os.truncate(tmp_path / "boundary_0.safetensors", 5000)
    os.truncate(tmp_path / "boundary_1.safetensors", 0)
    found, problems = open_log(tmp_path)
    assert not found
    assert "has 5000 bytes, not" in problems[0]
    assert "boundary_1.safetensors: cannot mmap an empty file" in problems[1]


def test_log_of_the_later_start_is_taken_where_two_have_an_iteration(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
        log.take(1)
    later = {}
    for number, start in ((0, 1), (1, 0)):
        path = tmp_path / f"boundary_{number}.json"
        index = decode(path.read_bytes(), BoundaryIndex, str(path))
        history = make_history([(start, 0)])
        identity = msgspec.structs.replace(index.identity, history=history)
        index = msgspec.structs.replace(index, iteration=5, identity=identity)
        path.write_bytes(encode(index))
        later[start] = index
    found, problems = open_log(tmp_path)
    assert not problems
    assert {iteration: each.index for iteration, each in found.items()} == {5: later[1]}


def test_directory_that_is_missing_holds_no_log(tmp_path: Path) -> None:
    assert open_log(tmp_path / "nothing") == ({}, [])


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


HEADER, SIZE = 4096, 4096 + 1024


def sent(ordinal: int, offset: int) -> SentTensor:
    return SentTensor(
        neighbour=99999,
        direction=Direction.BACKWARD,
        ordinal=ordinal,
        shape=(3, 1, 5),
        dtype="BF16",
        offset=offset,
        checksum="0" * 16,
    )


def test_header_declares_tensors_and_the_gaps_between_them(tmp_path: Path) -> None:
    header = make_header([sent(0, HEADER), sent(1, HEADER + 64)], HEADER, SIZE)
    path = tmp_path / "file.safetensors"
    path.write_bytes(header + bytes(SIZE - HEADER))
    with safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == {
            "backward/to_99999/0",
            "backward/to_99999/1",
            f"__unused__/{HEADER + 30}",
            f"__unused__/{HEADER + 94}",
        }
        assert opened.get_slice("backward/to_99999/1").get_shape() == [3, 1, 5]


def test_header_of_as_many_tensors_as_were_planned_fits() -> None:
    count = 5000
    size = header_bytes(count)
    tensors = [
        SentTensor(
            neighbour=10**7,
            direction=Direction.BACKWARD,
            ordinal=10**6 + number,
            shape=(2**30, 2**20, 2**20),
            dtype="F8_E4M3",
            offset=size + number * 2**72,
            checksum="0" * 16,
        )
        for number in range(count)
    ]
    assert len(make_header(tensors, size, size + count * 2**72)) == size


def test_header_of_too_many_tensors_is_refused() -> None:
    with pytest.raises(SnapshotError, match="the header of 100 tensors takes"):
        make_header([sent(number, HEADER + 64 * number) for number in range(100)], HEADER, SIZE * 9)


BF16 = torch.bfloat16


@pytest.fixture
def sends(tmp_path: Path) -> list[Send]:
    """Return what rank 1 sends in iteration 4, which is in the files."""
    with small_log(tmp_path) as log:
        return log.take(4)


@pytest.fixture
def player(tmp_path: Path, sends: list[Send]) -> BoundaryPlayer:
    """Return what plays that to the next rank."""
    return BoundaryPlayer(NEXT, {RANK: open_log(tmp_path)[0]})


def test_receives_get_what_was_sent_in_its_order(player: BoundaryPlayer, sends: list[Send]) -> None:
    for _ in range(2):  # an iteration may begin again
        player.begin(4)
        for _, direction, tensor in sends[:2]:
            received = player.receive(RANK, direction, BF16, TRAFFIC.shape)
            assert received.equal(tensor)
            received.zero_()  # the log stays as it is
        player.end()


def test_shape_that_only_the_sender_knows_comes_from_the_log(
    player: BoundaryPlayer, sends: list[Send]
) -> None:
    player.begin(4)
    assert player.receive(RANK, Direction.FORWARD, BF16).equal(sends[0][2])


def test_missing_iteration_is_named(player: BoundaryPlayer) -> None:
    player.begin(5)
    with pytest.raises(
        UnrecoverableError,
        match="tensor 0 that rank 2 receives forward from rank 1 in iteration 5 is missing: the log of "
        "rank 1 does not have the iteration",
    ):
        player.receive(RANK, Direction.FORWARD, BF16, TRAFFIC.shape)


def test_receive_beyond_the_last_send_is_named(player: BoundaryPlayer) -> None:
    player.begin(4)
    with pytest.raises(
        UnrecoverableError,
        match="tensor 0 that rank 2 receives backward from rank 1 in iteration 4 is missing",
    ):
        player.receive(RANK, Direction.BACKWARD, BF16, TRAFFIC.shape)


@pytest.mark.parametrize(("shape", "dtype"), [((8, 2, 17), BF16), ((8, 2, 16), torch.float32)])
def test_other_shape_or_type_is_named(
    player: BoundaryPlayer, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    player.begin(4)
    with pytest.raises(
        UnrecoverableError,
        match=r"tensor 0 .* in iteration 4 has shape \[8, 2, 16\] and type BF16 in the log, but must have",
    ):
        player.receive(RANK, Direction.FORWARD, dtype, shape)


def test_send_that_is_never_received_is_named(player: BoundaryPlayer) -> None:
    player.begin(4)
    player.receive(RANK, Direction.FORWARD, BF16, TRAFFIC.shape)
    with pytest.raises(UnrecoverableError, match="tensor 1 .* was not received"):
        player.end()
