"""Receives that are answered from logs, and the errors of those that cannot be."""

from pathlib import Path

import pytest
import torch

from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.engine.boundary.reading import open_log
from moe_ft.errors import CorruptStateError, UnrecoverableError
from moe_ft.format.boundary import Direction
from tests.unit.moe_ft.engine.boundary.logs import NEXT, RANK, TRAFFIC, Send, small_log

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
        match=r"tensor 0 .* in iteration 4 has shape \[8, 2, 16\] and type BF16 in the log, and must have",
    ):
        player.receive(RANK, Direction.FORWARD, dtype, shape)


def test_send_that_is_never_received_is_named(player: BoundaryPlayer) -> None:
    player.begin(4)
    player.receive(RANK, Direction.FORWARD, BF16, TRAFFIC.shape)
    with pytest.raises(UnrecoverableError, match="tensor 1 .* was not received"):
        player.end()


def test_damaged_tensor_is_not_played(tmp_path: Path, sends: list[Send]) -> None:
    path = tmp_path / "boundary_0.safetensors"
    offset = open_log(tmp_path)[0][4].index.sent[0].offset
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)
    player = BoundaryPlayer(NEXT, {RANK: open_log(tmp_path)[0]})
    player.begin(4)
    with pytest.raises(CorruptStateError, match="forward/to_00002/0 does not match its checksum"):
        player.receive(RANK, Direction.FORWARD, BF16, TRAFFIC.shape)
