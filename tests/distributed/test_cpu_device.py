"""Calls to CUDA that the CPU answers."""

from pathlib import Path

import torch

from megatron.fault_tolerance.cpu import device as cpu_device
from tests.harness import run_ranks


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
