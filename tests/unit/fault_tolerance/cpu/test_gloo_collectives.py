"""Unequal pieces are padded and cut; the collectives of several ranks are in tests/distributed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.cpu import device


@pytest.fixture
def group() -> Iterator[None]:
    """Be a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_padding_adds_rows_of_zeros() -> None:
    padded = device._padded(torch.ones(2, 3), 4)
    assert padded.tolist() == [[1.0] * 3] * 2 + [[0.0] * 3] * 2


def test_splits_that_are_tensors_become_integers(group: None) -> None:
    exchange = device._integer_splits(dist.all_to_all_single)
    output, splits = torch.empty(3), torch.tensor([3])
    exchange(output, torch.arange(3.0), splits, splits)
    assert output.tolist() == [0.0, 1.0, 2.0]


def test_equal_pieces_are_left_to_gloo(group: None) -> None:
    gather = device._uneven_all_gather(dist.all_gather)
    received = [torch.empty(2)]
    gather(received, torch.tensor([1.0, 2.0]))
    assert received[0].tolist() == [1.0, 2.0]


def test_piece_that_is_longer_than_the_own_one_is_cut_from_what_was_padded() -> None:
    def all_gather(received: list[torch.Tensor], sent: torch.Tensor, group: Any) -> None:
        received[0].copy_(sent)
        received[1].copy_(torch.full_like(sent, 5.0))  # of another rank

    received = [torch.empty(1, 2), torch.empty(3, 2)]
    device._uneven_all_gather(all_gather)(received, torch.ones(1, 2))
    assert [piece.tolist() for piece in received] == [[[1.0, 1.0]], [[5.0, 5.0]] * 3]


def test_wait_for_a_message_ends_with_the_timeout_of_its_group(group: None) -> None:
    waited: list[Any] = []
    work = type("Work", (), {"wait": lambda self, timeout: waited.append(timeout)})()
    send = device._with_group_timeout(lambda *args, **kwargs: work)
    send(torch.ones(1), 0).wait()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert waited == [backend.options._timeout]
