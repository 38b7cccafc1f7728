"""The boundary log: what is kept, what is overwritten, and what gets no log at all."""

import shutil
from pathlib import Path

import pytest
import torch

from moe_ft.engine.boundary.log import SendCopier
from moe_ft.errors import CorruptStateError
from moe_ft.format.boundary import Direction
from tests.unit.moe_ft.engine.boundary.logs import (
    NEXT,
    STAGE,
    TRAFFIC,
    SmallLog,
    open_log,
    sends_of,
    small_log,
)


def check_holds(
    log: SmallLog, iteration: int, sends: list[tuple[int, Direction, torch.Tensor]]
) -> None:
    """Check that the files hold an iteration, bit for bit."""
    logged = open_log(log.directory)[0][iteration]
    assert len(logged.index.sent) == len(sends)
    for entry, (receiver, direction, tensor) in zip(logged.index.sent, sends, strict=True):
        assert (entry.neighbour, entry.direction) == (receiver, direction)
        assert entry.shape == tuple(tensor.shape)
        assert bytes(logged.read(entry)) == bytes(tensor.view(torch.uint8).numpy().tobytes())


def test_tensor_may_be_overwritten_or_freed_once_it_is_recorded(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        sends = list(sends_of(0))
        log.log.begin(0)
        for receiver, direction, tensor in sends:
            passed = tensor.clone().requires_grad_()
            log.log.record(receiver, direction, passed)
            passed.data.zero_()
        log.log.end()
        log.worker.work()
        check_holds(log, 0, sends)


def test_send_after_the_memory_was_closed_is_recorded_nowhere(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.log.begin(0)
        for slot in log.slots:
            slot.close()
        assert "boundary_0.safetensors" in Path("/proc/self/maps").read_text()
        for each in sends_of(0):
            log.log.record(*each)
        log.log.end()
        log.worker.work()
        assert not log.held()
        (reason,) = log.reasons()
        assert "is not open" in reason


def test_iteration_that_sends_more_than_was_computed_gets_no_log_and_says_so(
    tmp_path: Path,
) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
        log.take(1, [*sends_of(1), (NEXT, Direction.FORWARD, torch.zeros(1, dtype=torch.bfloat16))])
        assert log.held() == [0]
        (reason,) = log.reasons()
        assert f"sends more than the {TRAFFIC.slot_bytes(STAGE)} bytes that were computed" in reason
        log.take(2)  # the next one is logged again
        assert log.held() == [0, 2]
        assert not log.reasons()


def test_type_that_files_do_not_know_costs_the_log_and_not_the_iteration(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        log.take(0, [(NEXT, Direction.FORWARD, torch.zeros(2, dtype=torch.complex64))])
        assert not log.held()
        (reason,) = log.reasons()
        assert "complex64" in reason


def test_iteration_that_finds_no_free_slot_gets_no_log_and_waits_for_nobody(tmp_path: Path) -> None:
    with small_log(tmp_path, num_slots=1) as log:
        log.log.begin(0)
        log.log.end()
        log.log.begin(1)
        (reason,) = log.reasons()
        assert "are still being written" in reason
        log.log.record(NEXT, Direction.FORWARD, torch.ones(4))
        log.log.end()
        log.worker.work()
        assert log.held() == [0]


def test_failing_commit_is_reported_and_the_slot_is_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "rank"
    with small_log(folder) as log:
        shutil.rmtree(folder)
        log.take(0)
        assert len(log.reasons()) == 1
        folder.mkdir(mode=0o700)
        log.take(1)
        assert [path.name for path in folder.iterdir()] == ["boundary_0.json"]


def test_start_keeps_the_logs_before_its_iteration_and_drops_those_that_run_again(
    tmp_path: Path,
) -> None:
    with small_log(tmp_path, num_slots=3) as log:
        for iteration in range(3):
            log.take(iteration)
    again = SmallLog(tmp_path, num_slots=3)
    again.log.start(2, 1)
    assert again.held() == [0, 1]
    again.take(2)
    assert again.held() == [0, 1, 2]
    again.take(3)  # the log of iteration 0 is not needed
    assert again.held() == [1, 2, 3]
    assert not again.reasons()


@pytest.mark.parametrize("position", [0, 700, -1])
def test_flipped_byte_of_a_slot_is_found(tmp_path: Path, position: int) -> None:
    with small_log(tmp_path) as log:
        log.take(0)
    path = tmp_path / "boundary_0.safetensors"
    content = bytearray(path.read_bytes())
    start = open_log(tmp_path)[0][0].index.header_bytes
    content[start + position if position > 0 else position] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptStateError, match="does not match its checksum"):
        found, problems = open_log(tmp_path)
        for logged in found.values():
            logged.check()
        raise CorruptStateError(*problems)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_bytes_of_a_tensor_are_copied_whatever_its_type_and_strides(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(4, 6).to(dtype).t()
    target = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
    copier = SendCopier()
    copier.copy(tensor, target)
    assert target.view(dtype).reshape(tensor.shape).equal(tensor)
    assert copier.mark() is None
