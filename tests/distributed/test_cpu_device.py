"""CUDA calls that the CPU answers, and collectives that gloo lacks: they give what their definition says."""

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


def answer_cuda_with_the_cpu() -> None:
    cpu_device.install()
    cpu_device.install()
    tensors = [
        torch.zeros(2, device="cuda"),
        torch.empty(2, device=torch.device("cuda", 0)),
        torch.ones(2).to(torch.cuda.current_device()),
        torch.ones(2).cuda().pin_memory(),
        torch.ones(2).new_zeros(3, device="cuda"),
    ]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert tensors[0].type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).to(torch.float64).dtype is torch.float64
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_event(torch.cuda.Event())
    assert torch.compile(lambda x: x + 1)(torch.ones(1)) == 2
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), drawn)
    before = torch.get_rng_state()
    list(torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_cuda_calls_are_answered_by_the_cpu(tmp_path: Path) -> None:
    run_ranks(answer_cuda_with_the_cpu, 1, log_dir=tmp_path).check()
