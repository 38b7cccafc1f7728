"""Devices that name a GPU are told from others, and become the CPU.

Replacing torch's functions lasts as long as the process: that is tests/distributed/test_cpu_device.py.
"""

import os
from pathlib import Path

import pytest
import torch

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
