"""A step that is repeated elsewhere, in blocks: the bits are those of torch's optimizers."""

from typing import Any

import pytest
import torch

from moe_ft.engine.updates.adam import repeat_step
from moe_ft.engine.updates.following import MOST_LOSSY_STEPS
from moe_ft.format.updates import AdamStep
from moe_ft.state.gradients import _step_of

NUM_STEPS = 250
LENGTH, PIECE = 3001, 700
BOTH = (torch.optim.Adam, torch.optim.AdamW)


def odd(count: int) -> torch.Tensor:
    """Return memory that no vector instruction likes."""
    return torch.zeros(count + 5)[5:]


def copies_of(state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    copies = tuple(odd(each.numel()) for each in state)
    for copy, each in zip(copies, state, strict=True):
        copy.copy_(each.detach())
    return copies


def repeated(
    before: tuple[torch.Tensor, ...], gradient: torch.Tensor, step: AdamStep
) -> tuple[torch.Tensor, ...]:
    """Return the state after a step, which is made piece by piece."""
    after = tuple(odd(len(gradient)) for _ in before)
    for first in range(0, len(gradient), PIECE):
        place = slice(first, first + PIECE)
        pieces = [tuple(each[place] for each in state) for state in (before, after)]
        sent = gradient[place].clone()
        repeat_step(pieces[0], sent, pieces[1], step, torch.empty(len(sent)))
    return after


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_repeated_steps_make_the_bits_of_the_optimizer(kind: Any, weight_decay: float) -> None:
    generator = torch.Generator().manual_seed(1)
    groups = [
        {"params": [torch.randn(LENGTH, generator=generator)], "weight_decay": weight_decay},
        {"params": [torch.randn(LENGTH, generator=generator)], "betas": (0.8, 0.95), "eps": 1e-5},
    ]
    optimizer = kind(groups, lr=1e-3)
    masters = [group["params"][0] for group in optimizer.param_groups]
    replicas: list[tuple[torch.Tensor, ...]] = []
    for number in range(1, NUM_STEPS + 1):
        sent = []
        for master, group in zip(masters, optimizer.param_groups, strict=True):
            group["lr"] = 1e-3 / number * (1 + number % 3)
            master.grad = torch.randn(LENGTH, generator=generator) * 10.0 ** (number % 5 - 4)
            sent.append(_step_of(group, float(number), "F32", ()))
        optimizer.step()
        if replicas:
            replicas = [
                repeated(replica, master.grad, step)
                for replica, master, step in zip(replicas, masters, sent, strict=True)
            ]
        owned = [
            (master, *(optimizer.state[master][key] for key in ("exp_avg", "exp_avg_sq")))
            for master in masters
        ]
        replicas = replicas or [*map(copies_of, owned)]
        for own, replica in zip(owned, replicas, strict=True):
            for one, other in zip(own, replica, strict=True):
                assert torch.equal(one.view(torch.int32), other.view(torch.int32)), number


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_optimizer_that_rounds_otherwise_stays_near_what_is_repeated_for_as_long_as_it_is(
    kind: Any, options: dict[str, bool]
) -> None:
    """The bounds of docs/gradient_replicas.md, of which no GPU has been asked."""
    generator = torch.Generator().manual_seed(2)
    master = torch.randn(LENGTH, generator=generator)
    optimizer = kind([master], weight_decay=0.1, **options)
    (group,) = optimizer.param_groups
    replica: tuple[torch.Tensor, ...] = ()
    mean, moved = torch.zeros(LENGTH), 0.0
    for number in range(1, MOST_LOSSY_STEPS + 2):
        group["lr"] = 1e-3 / number * (1 + number % 3)
        master.grad = torch.randn(LENGTH, generator=generator) * 10.0 ** (number % 5 - 4)
        gradient, step = master.grad.clone(), _step_of(group, float(number), "F32", ())
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient.abs()
        state = optimizer.state[master]
        own = (master, state["exp_avg"], state["exp_avg_sq"])
        if not replica:
            replica = copies_of(own)
            continue
        replica, moved = repeated(replica, gradient, step), moved + group["lr"]
        gaps = [(one - other).abs() for one, other in zip(own, replica, strict=True)]
        size = torch.finfo(torch.float32).eps * master.abs() * (number - 1)
        assert bool((gaps[0] <= 1e-5 * moved + size).all())
        assert bool((gaps[1] <= 1e-6 * mean).all())
        assert bool((gaps[2] <= 2e-6 * own[2]).all())
