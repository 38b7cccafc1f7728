"""Messages without tags between stages, and losses of ranks that run nothing."""

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.degraded.executor import Mail
from megatron.fault_tolerance.degraded.roles import RolePlace
from moe_ft.planning.lost_ranks import Layout
from moe_ft.planning.schedules import Operation, OpKind, Turn, Way, plan_schedule

LAYOUT = Layout(num_stages=2, tp=1, cp=1, dp=2)
# Rank 3 shares a device with rank 1, and rank 2 runs its micro-batches.
SCHEDULE = plan_schedule(LAYOUT.pipelines(4), {(1, 1): (1, 0)}, ways=[Way.PEERS])
SHAPES = (1,), (2,)
LINKS = "next", "before"


class Work:
    """Work that has ended."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def mail_of(rank: int) -> Mail:
    return Mail(SCHEDULE, RolePlace(LAYOUT, rank), SHAPES, torch.float32, LINKS)


def test_receiver_takes_messages_in_the_order_in_which_each_sender_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers: dict[Any, float] = {}
    queues: dict[int, deque[float]] = {0: deque(), 1: deque()}  # by sender
    for sender in queues:
        for operation in SCHEDULE.operations[sender, 0]:
            if operation.kind is OpKind.FORWARD:
                numbers[operation.cell] = float(len(numbers))
                queues[sender].append(numbers[operation.cell])

    def recv(tensor: torch.Tensor, src: int, group: Any) -> None:
        assert group == "next"
        tensor.detach().fill_(queues[src].popleft())

    monkeypatch.setattr(dist, "recv", recv)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    mail = mail_of(2)
    for operation in SCHEDULE.operations[0, 1]:
        if operation.kind is OpKind.FORWARD:
            assert operation.cell is not None
            role = SCHEDULE.runners[operation.cell, 0], 0
            assert float(mail.receive(role, operation).detach()) == numbers[operation.cell]
    assert len(numbers) == 8, "those of both pipelines"
    mail.finish()


def test_nothing_is_received_for_an_empty_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    found = mail_of(2).receive((0, 0), Operation(OpKind.FORWARD, Turn(0, 0), None))
    assert found.tolist() == [0.0, 0.0]
    assert found.requires_grad


def test_tensor_keeps_its_values_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[torch.Tensor, int, str]] = []

    def isend(tensor: torch.Tensor, dst: int, group: Any) -> Work:
        sent.append((tensor, dst, group))
        return Work()

    monkeypatch.setattr(dist, "isend", isend)
    output = torch.ones(3, requires_grad=True) * 2
    mail_of(0).send(output, (0, 1), SCHEDULE.operations[0, 0][0])
    output.data = torch.empty(1)  # as Megatron frees it
    ((kept, receiver, group),) = sent
    assert (kept.tolist(), receiver, group) == ([2.0] * 3, 2, "next")
