"""Messages without tags between stages, and losses of a role."""

from collections import deque
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.degraded.executor import Mail, added_up, plan
from megatron.fault_tolerance.degraded.roles import RolePlace
from moe_ft.planning.lost_ranks import Layout
from moe_ft.planning.schedules import Operation, OpKind

LAYOUT = Layout(num_stages=2, tp=1, cp=1, dp=2)
DEAD = frozenset({(1, 1)})  # rank 3, whose role rank 2 plays


class Work:
    """Work that has ended."""

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


def test_receiver_takes_messages_in_the_order_in_which_each_sender_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule, numbers = plan(RolePlace(LAYOUT, 2), DEAD, 4), dict[Operation, float]()
    queues: dict[int, deque[float]] = {0: deque(), 1: deque()}  # by sender
    for sender in queues:
        for operation in schedule.operations[sender, 0]:
            if operation.kind is OpKind.FORWARD:
                numbers[operation] = float(len(numbers))
                queues[sender].append(numbers[operation])

    def irecv(tensor: torch.Tensor, src: int, group: Any) -> Work:
        tensor.detach().fill_(queues[src].popleft())
        return Work()

    monkeypatch.setattr(dist, "irecv", irecv)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    mail = Mail(schedule, RolePlace(LAYOUT, 2), (1,), torch.float32, None)
    for operation in schedule.operations[0, 1]:
        if operation.kind is OpKind.FORWARD:
            role = schedule.runners[operation.cell, 0], 0
            assert float(mail.receive(role, operation).detach()) == numbers[operation]
    assert len(numbers) == 8, "those of both pipelines"
    mail.finish()


def test_tensor_keeps_its_values_until_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[torch.Tensor, int]] = []

    def isend(tensor: torch.Tensor, dst: int, group: Any) -> Work:
        sent.append((tensor, dst))
        return Work()

    monkeypatch.setattr(dist, "isend", isend)
    place = RolePlace(LAYOUT, 0)
    mail = Mail(plan(place, DEAD, 1), place, (1,), torch.float32, None)
    output = torch.ones(3, requires_grad=True) * 2
    mail.send(output, (0, 1))
    output.data = torch.empty(1)  # as Megatron frees it
    ((kept, receiver),) = sent
    assert (kept.tolist(), receiver) == ([2.0] * 3, 2)


def test_losses_of_a_role_are_a_sum_with_its_divisor_or_a_mean() -> None:
    sums = [{"lm loss": torch.tensor([3.0, 2.0])}, {"lm loss": torch.tensor([5.0, 4.0])}]
    assert added_up(sums)["lm loss"].tolist() == [8.0, 6.0]
    means = [{"lm loss": torch.tensor(3.0)}, {"lm loss": torch.tensor(5.0)}]
    assert added_up(means)["lm loss"].tolist() == [4.0]
