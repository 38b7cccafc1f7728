"""The late device itself: what each of its rules allows, and what it notes."""

import torch

from tests.device.queues import POISON, Device, Event, Stream
from tests.device.tensors import LateTensor, new, on_device, pinned

LATE = next(seed for seed in range(10_000) if not Device(seed).default.eagerness)


def late(*, count: int = 1) -> tuple[Device, list[Stream]]:
    """Return a device and streams that run nothing before they must."""
    device = Device(LATE)
    streams = [Stream(device) for _ in range(count)]
    for each in (device.default, device.freed, *streams):
        each.eagerness = 0.0
    return device, streams


def _host(device: Device, count: int = 4) -> torch.Tensor:
    made = torch.zeros(count)
    pinned(device, made)
    return made


def test_copy_into_page_locked_memory_is_poison_until_its_stream_is_waited_for() -> None:
    device, _ = late()
    source, target = new(device, torch.arange(4.0)), _host(device)
    target.copy_(source, non_blocking=True)
    assert set(target.view(torch.uint8).tolist()) == {POISON}
    device.default.synchronize()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_copy_into_pageable_memory_is_complete_when_it_returns() -> None:
    device, _ = late()
    target = torch.zeros(4)
    target.copy_(new(device, torch.arange(4.0)), non_blocking=True)
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_copy_from_page_locked_memory_reads_what_the_host_writes_later() -> None:
    device, _ = late()
    source = _host(device)
    target = on_device(device, torch.zeros(4))
    target.copy_(source, non_blocking=True)
    source.fill_(7.0)
    assert target.tolist() == [7.0] * 4


def test_copy_from_pageable_memory_has_read_it_when_it_returns() -> None:
    device, _ = late()
    source = torch.zeros(4)
    target = on_device(device, torch.ones(4))
    target.copy_(source, non_blocking=True)
    source.fill_(7.0)
    assert target.tolist() == [0.0] * 4


def test_stream_that_waits_for_no_other_meets_poison_and_is_noted() -> None:
    device, (side,) = late()
    source, target = new(device, torch.ones(4)), _host(device)
    with device.using(side):
        target.copy_(source, non_blocking=True)
    side.synchronize()
    assert target.tolist() != [1.0] * 4
    assert device.conflicts == ["copy to the host on stream 2 did not wait for fill on stream 0"]


def test_event_orders_two_streams_by_what_it_stood_for_at_the_wait() -> None:
    device, (side,) = late()
    tensor, target = new(device, torch.ones(4)), _host(device)
    event = Event(device)
    event.record()
    side.wait_event(event)
    tensor.add_(1.0)  # queued after the event: nobody waits for it
    event.record()
    with device.using(side):
        target.copy_(tensor, non_blocking=True)
    side.synchronize()
    assert target.tolist() == [1.0] * 4
    device.synchronize()
    assert device.conflicts != []


def test_event_that_was_never_recorded_stops_nobody() -> None:
    device, (side,) = late()
    new(device, torch.ones(4))
    event = Event(device)
    side.wait_event(event)
    assert event.query()
    assert side.query()


def _copy_and_free(device: Device, side: Stream, target: torch.Tensor, *, says_so: bool) -> None:
    tensor: LateTensor = new(device, torch.ones(4))
    side.wait_stream(device.default)
    with device.using(side):
        target.copy_(tensor, non_blocking=True)
    if says_so:
        tensor.record_stream(side)


def test_freed_memory_goes_to_the_next_user_while_another_stream_reads_it() -> None:
    device, (side,) = late()
    target = _host(device)
    _copy_and_free(device, side, target, says_so=False)
    device.default.synchronize()
    side.synchronize()
    assert target.tolist() != [1.0] * 4
    assert "next use of freed memory" in device.conflicts[0]


def test_freed_memory_stays_until_streams_that_were_told_of_have_read_it() -> None:
    device, (side,) = late()
    target = _host(device)
    _copy_and_free(device, side, target, says_so=True)
    device.synchronize()
    assert target.tolist() == [1.0] * 4
    assert device.conflicts == []


def test_number_that_python_reads_waits_for_its_stream() -> None:
    device, _ = late()
    tensor = new(device, torch.arange(4.0))
    assert float(tensor.sum()) == 6.0


def test_memory_that_is_unregistered_before_its_copy_is_noted() -> None:
    device, _ = late()
    target = torch.zeros(4)
    device.pin(target.data_ptr(), 16)
    target.copy_(new(device, torch.ones(4)), non_blocking=True)
    device.unpin(target.data_ptr())
    assert device.conflicts == [
        "memory was unregistered before copy to the host on stream 0 has run"
    ]
