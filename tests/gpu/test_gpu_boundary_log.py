"""Sends from a GPU are in the boundary log as they were sent, though the schedule frees them at once."""

from pathlib import Path

import pytest
import torch

from moe_ft.engine.boundary.log import SendCopier
from moe_ft.engine.memory.rank_memory import _register, _unregister
from tests.unit.moe_ft.engine.boundary.logs import open_log, sends_of, small_log

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_memory_of_a_sent_tensor_is_not_given_away_before_the_copy_has_ended() -> None:
    target = torch.zeros(256 << 20, dtype=torch.uint8, pin_memory=True)
    copier, slow = SendCopier(), torch.randn(4096, 4096, device="cuda")
    for value in range(5):
        for _ in range(20):  # the tensor is ready only after a while
            slow = slow @ slow
        tensor = torch.full((256 << 20,), value, dtype=torch.uint8, device="cuda")
        copier.copy(tensor, target)
        tensor.data = torch.empty(1, dtype=torch.uint8, device="cuda")  # as Megatron frees it
        other = torch.full((256 << 20,), 99, dtype=torch.uint8, device="cuda")
        copied = copier.mark()
        assert copied is not None
        copied.synchronize()
        assert bool((target == value).all())
        del other


def test_log_of_tensors_on_a_gpu_holds_what_was_sent(tmp_path: Path) -> None:
    with small_log(tmp_path) as log:
        for slot in log.slots:
            slot.mappings.pin([slot.data_path], _register, _unregister)
        for iteration in range(4):
            log.log.keep(iteration)
            log.take(iteration, [(*each[:2], each[2].cuda()) for each in sends_of(iteration)])
        assert not log.reasons()
        for iteration in (2, 3):
            logged = open_log(tmp_path)[0][iteration]
            for entry, (_, _, tensor) in zip(logged.index.sent, sends_of(iteration), strict=True):
                assert bytes(logged.read(entry)) == tensor.view(torch.uint8).numpy().tobytes()
