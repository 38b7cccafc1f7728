"""Devices that name a GPU become the CPU, and gloo gets the collectives that it lacks.

Replacing torch's functions lasts as long as the process: that is tests/distributed/test_cpu_device.py.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.cpu import device
from megatron.fault_tolerance.cpu import device as cpu_device


@pytest.mark.parametrize(
    ("device", "names_cuda"),
    [
        *((each, True) for each in ("cuda", "cuda:3", torch.device("cuda", 1), 0, 7)),
        *(
            (each, False)
            for each in ("cpu", "meta", torch.device("cpu"), None, True, torch.float32)
        ),
    ],
)
def test_gpu_is_named_by_string_device_or_index(device: object, names_cuda: bool) -> None:
    assert cpu_device._names_cuda(device) is names_cuda


def test_constructor_makes_on_the_cpu_what_is_asked_for_on_a_gpu() -> None:
    made = cpu_device._with_cpu_device(torch.zeros)(2, device="cuda", pin_memory=True)
    assert made.device.type == "cpu"
    assert cpu_device._with_cpu_device(torch.zeros)(2, device="meta").device.type == "meta"


def test_stream_and_event_have_nothing_to_wait_for() -> None:
    with cpu_device._Stream() as stream:
        event = stream.record_event()
    assert stream.query()
    assert event.query()
    assert event.elapsed_time(cpu_device._Event()) == 0.0


def test_memory_is_at_least_what_the_process_has_now() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    now_bytes = num_pages * os.sysconf("SC_PAGE_SIZE")
    assert cpu_device.memory_bytes() >= 0.9 * now_bytes > 0  # the kernel counts both in batches


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
