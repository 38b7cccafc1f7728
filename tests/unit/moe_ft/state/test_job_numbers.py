"""Numbers of the job are those of the record of the same state."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from moe_ft.format.records import JobNumbers, numbers_of
from moe_ft.state.record import IterationFacts, LoopCounters, RecordTaker, capture_numbers, encode


class Scaler:
    """A loss scale."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"scale": torch.tensor([2.0])}


def optimizer_of(*found_inf: float | None) -> Any:
    """Return a chain of optimizers, some of which check their gradients."""
    chained = [
        SimpleNamespace(
            optimizer=torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),
            grad_scaler=None if each is None else Scaler(),
            found_inf=None if each is None else torch.tensor([each]),
        )
        for each in found_inf
    ]
    return SimpleNamespace(chained_optimizers=chained, grad_norms_by_group={"mtp": float("nan")})


def facts_of(grad_norm: float | None = 1.5) -> IterationFacts:
    return IterationFacts(
        iteration=3,
        grad_norm=grad_norm,
        num_tokens=torch.tensor(640),
        num_floating_point_operations=1e15,
        tokens_per_expert={},
        counters=LoopCounters(
            consumed_train_samples=24,
            consumed_valid_samples=8,
            skipped_train_samples=1,
            num_microbatches=2,
        ),
    )


@pytest.mark.parametrize("grad_norm", [1.5, None, float("inf")])
@pytest.mark.parametrize("found_inf", [(), (None, None), (1.0, 0.0), (0.0,)])
def test_numbers_are_those_of_the_record(
    grad_norm: float | None, found_inf: tuple[float | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)  # without a GPU
    optimizer, facts = optimizer_of(*found_inf), facts_of(grad_norm)
    scheduler: Any = SimpleNamespace(state_dict=lambda: {"num_steps": 3})
    taker = RecordTaker([], optimizer, scheduler, [])
    captured = taker.capture(facts)
    taker.complete(captured)
    numbers = capture_numbers(optimizer, facts).encode()
    assert msgspec.json.encode(numbers) == msgspec.json.encode(numbers_of(encode(captured)))
    assert msgspec.json.decode(msgspec.json.encode(numbers), type=JobNumbers).num_tokens == 640


def test_captured_numbers_do_not_follow_the_state() -> None:
    optimizer, facts = optimizer_of(1.0), facts_of()
    captured = capture_numbers(optimizer, facts)
    optimizer.chained_optimizers[0].found_inf.fill_(0.0)
    assert facts.num_tokens is not None
    facts.num_tokens.fill_(1)
    optimizer.grad_norms_by_group["mtp"] = 7.0
    found = captured.encode()
    assert (found.found_inf, found.num_tokens) == ((True,), 640)
    assert found.grad_norms_by_group == {"mtp": "nan"}
