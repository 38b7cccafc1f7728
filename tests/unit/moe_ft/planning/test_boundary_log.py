"""Sizes of boundary logs, by hand and against a schedule that is written out."""

import pytest

from moe_ft.planning.boundary_log import (
    PipelineTraffic,
    header_bytes,
    index_bytes,
    log_bytes,
    most_log_bytes,
    num_slots,
)


def traffic(num_stages: int = 4, num_chunks: int = 1, num_microbatches: int = 8) -> PipelineTraffic:
    return PipelineTraffic(
        num_stages=num_stages,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        shape=(128, 2, 64),
        element_bytes=2,
    )


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_sends_are_those_of_every_micro_batch_through_every_chunk(
    num_stages: int, num_chunks: int
) -> None:
    job = traffic(num_stages, num_chunks, 4)
    places = num_stages * num_chunks  # chunk by chunk; the stage of place p is p modulo num_stages
    sends = [0] * num_stages
    for place in range(places - 1):
        sends[place % num_stages] += 4  # activations to the next place
        sends[(place + 1) % num_stages] += 4  # gradients back from there
    assert [job.num_sends(stage) for stage in range(num_stages)] == sends
    assert [job.sent_bytes(stage) for stage in range(num_stages)] == [
        each * 128 * 2 * 64 * 2 for each in sends
    ]


def test_slot_of_the_middle_stage_worked_out_by_hand() -> None:
    # 16 tensors of 32 KiB; 16 entries of 320 bytes and 128 more need two pages.
    assert traffic().slot_bytes(1) == 2 * 4096 + 16 * 32768
    assert header_bytes(16) == 8192


def test_tensors_of_odd_sizes_are_aligned_in_a_slot() -> None:
    job = PipelineTraffic(
        num_stages=2, num_chunks=1, num_microbatches=3, shape=(3, 1, 5), element_bytes=2
    )
    assert job.sent_bytes(0) == 90
    assert job.slot_bytes(0) == 4096 + 3 * 64


@pytest.mark.parametrize(("window", "interval", "expected"), [(1, 1, 4), (1, 10, 13), (3, 1, 10)])
def test_slots_last_until_the_window_after_a_local_recovery(
    window: int, interval: int, expected: int
) -> None:
    assert num_slots(window, interval) == expected


def test_largest_log_is_that_of_a_middle_stage() -> None:
    job = traffic()
    sizes = [log_bytes(job, stage, longest_window=2, interval=1) for stage in range(4)]
    indexes = [index_bytes(job.num_sends(stage)) for stage in range(4)]
    assert sizes == [7 * (job.slot_bytes(stage) + indexes[stage]) for stage in range(4)]
    assert most_log_bytes(job, longest_window=2, interval=1) == sizes[1] > sizes[0]
