"""Devices that name a GPU become the CPU, and gloo gets the collectives that it lacks.

Replacing torch's functions lasts as long as the process: that is tests/distributed/test_cpu_device.py.
"""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.enums import AttnBackend
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.cpu.device import CPU_DEFAULTS, UNFUSED_DEFAULTS, set_cpu_defaults


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


def test_wait_for_a_message_ends_with_the_timeout_of_its_group(group: None) -> None:
    waited: list[Any] = []
    work = type("Work", (), {"wait": lambda self, timeout: waited.append(timeout)})()
    send = cpu_device._with_group_timeout(lambda *args, **kwargs: work)
    send(torch.ones(1), 0).wait()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert waited == [backend.options._timeout]


def test_defaults_change_flags_that_megatron_has_and_leave_the_rest() -> None:
    def parse(*words: str, adapted: bool) -> dict[str, object]:
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser = megatron_arguments.add_megatron_arguments(parser)
        if adapted:
            set_cpu_defaults(parser)
        args: argparse.Namespace = parser.parse_args(words)
        return vars(args)

    stock, adapted = parse(adapted=False), parse(adapted=True)
    assert stock.keys() == adapted.keys()
    changed = {name for name in stock if stock[name] != adapted[name]}
    assert changed == {*CPU_DEFAULTS, *UNFUSED_DEFAULTS}
    assert "apply_rope_fusion" in UNFUSED_DEFAULTS, "only Transformer Engine has it, on GPUs too"
    given = parse("--num-workers", "3", "--attention-backend", "flash", adapted=True)
    assert (given["num_workers"], given["attention_backend"]) == (3, AttnBackend.flash)
