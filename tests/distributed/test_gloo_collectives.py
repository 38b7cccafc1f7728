"""Collectives that gloo lacks return the result of their definition."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.cpu import device as cpu_device
from tests.harness import run_ranks

LENGTHS = (3, 0, 5)  # rows per rank
RANKS = len(LENGTHS)


def start() -> int:
    cpu_device.install()
    dist.init_process_group("gloo")
    return dist.get_rank()


def gather_uneven() -> None:
    rank = start()
    pieces = [torch.full((rows, 2), float(index)) for index, rows in enumerate(LENGTHS)]
    received = [torch.full((rows, 2), -1.0) for rows in LENGTHS]
    dist.all_gather(received, pieces[rank])
    assert all(torch.equal(a, b) for a, b in zip(received, pieces, strict=True))


def reduce_scatter_uneven() -> None:
    rank = start()
    # Row i of piece p holds 10 p + i, multiplied on each rank by its number plus one.
    pieces = [(10.0 * p + torch.arange(rows)) for p, rows in enumerate(LENGTHS)]
    output = torch.empty(LENGTHS[rank])
    dist.reduce_scatter(output, [piece * (rank + 1) for piece in pieces])
    assert torch.equal(output, pieces[rank] * sum(range(1, RANKS + 1)))


def exchange_with_tensor_splits() -> None:
    rank = start()
    output = torch.empty(RANKS)
    splits = torch.ones(RANKS, dtype=torch.int64)
    sent = torch.arange(RANKS, dtype=torch.float32) + 10 * rank
    dist.all_to_all_single(output, sent, splits, splits)
    assert torch.equal(output, 10 * torch.arange(RANKS, dtype=torch.float32) + rank)


@pytest.mark.parametrize(
    "target", [gather_uneven, reduce_scatter_uneven, exchange_with_tensor_splits]
)
def test_collective_gives_what_its_definition_says(
    target: Callable[..., Any], tmp_path: Path
) -> None:
    run_ranks(target, RANKS, log_dir=tmp_path).check()
