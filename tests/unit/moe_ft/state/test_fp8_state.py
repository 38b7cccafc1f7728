"""FP8 scales and histories are kept without a pickle, with stand-ins for Transformer Engine's modules."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from moe_ft.errors import ConfigError, SnapshotError
from moe_ft.format.records import IterationRecord
from moe_ft.state import record as records
from moe_ft.state.fp8_state import clone_state, put_back

HISTORY_LENGTH = 3


class Linear(torch.nn.Module):
    """Scales its input by what it saw before, as delayed scaling does; makes its tensors when first used."""

    def __init__(self, history_length: int = HISTORY_LENGTH) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.history_length, self.is_on, self.num_made = history_length, True, 0

    def get_extra_state(self) -> torch.Tensor:
        """Do what nobody should ask for."""
        raise AssertionError("waits for the GPU and pickles")

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Do what nobody should ask for."""
        raise AssertionError("unpickles")

    def init_fp8_meta_tensors(self, recipe: str) -> None:
        """Make the tensors, which others refer to from then on."""
        self.num_made += 1
        for meta in ("scaling_fwd", "scaling_bwd"):
            history = torch.zeros(self.history_length, 2)
            self.fp8_meta[meta] = SimpleNamespace(scale=torch.ones(2), amax_history=history)
        self.quantizer = self.fp8_meta["scaling_fwd"].scale[0]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the tokens scaled; note how large they were."""
        if not self.is_on:
            return tokens
        while self.num_made < 2:  # with FP8 parameters they are made twice
            self.init_fp8_meta_tensors("delayed")
        result: torch.Tensor = tokens * self.quantizer
        for meta in ("scaling_fwd", "scaling_bwd"):
            each = self.fp8_meta[meta]
            each.amax_history.copy_(each.amax_history.roll(1, 0))
            each.amax_history[0] = tokens.abs().max()
            each.scale.copy_(1 / each.amax_history.amax(0))
        return result


class Model(torch.nn.Module):
    """One chunk with one such layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer


def train(layer: Linear, iterations: range) -> list[float]:
    return [float(layer(torch.tensor([1.0 + number]))) for number in iterations]


def taker(layer: torch.nn.Module) -> records.RecordTaker:
    scheduler = SimpleNamespace(state_dict=lambda: {"num_steps": 0})
    return records.RecordTaker([Model(layer)], OPTIMIZER, scheduler, [])


OPTIMIZER = SimpleNamespace(chained_optimizers=[])
FACTS = records.IterationFacts(
    iteration=1,
    grad_norm=None,
    num_tokens=torch.tensor(7),
    num_floating_point_operations=0.0,
    tokens_per_expert={},
    counters=records.LoopCounters(consumed_train_samples=0, num_microbatches=1),
)


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)


def record_of(layer: torch.nn.Module) -> IterationRecord:
    take = taker(layer)
    captured = take.capture(FACTS)
    take.complete(captured)
    return records.encode(captured)


def recovered(record: IterationRecord, layer: Linear) -> Linear:
    records.apply(record, [Model(layer)], OPTIMIZER, SimpleNamespace(), [])
    return layer


def test_recovered_layer_goes_on_as_the_one_that_never_stopped() -> None:
    layer = Linear()
    train(layer, range(4))
    record = record_of(layer)
    assert record.num_tokens == 7
    assert train(recovered(record, Linear()), range(4, 7)) == train(layer, range(4, 7))


def test_state_is_that_of_the_iteration_although_training_goes_on_before_it_is_copied() -> None:
    layer = Linear()
    train(layer, range(4))
    expected = record_of(layer)
    take = taker(layer)
    captured = take.capture(FACTS)
    train(layer, range(4, 6))
    take.complete(captured)
    assert records.encode(captured).extra_state == expected.extra_state


def test_layer_that_is_in_use_gets_its_state_back_in_place() -> None:
    layer = Linear()
    train(layer, range(4))
    record, expected = record_of(layer), train(layer, range(4, 6))
    assert train(recovered(record, layer), range(4, 6)) == expected


@pytest.mark.parametrize("history_length", [2, 5])
def test_history_of_another_length_keeps_its_newest_rows(history_length: int) -> None:
    layer, other = Linear(), Linear(history_length)
    train(layer, range(4))
    other.init_fp8_meta_tensors("delayed")
    put_back(other, clone_state("layer", layer))
    num_rows = min(HISTORY_LENGTH, history_length)
    history = other.fp8_meta["scaling_bwd"].amax_history
    assert history[:num_rows].tolist() == [[4, 4], [3, 3], [2, 2]][:num_rows]
    assert not history[num_rows:].any()


# What is not Transformer Engine's


class Other(torch.nn.Module):
    """A module with extra state of its own."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        """Return it as it is."""
        return self.state


@pytest.mark.parametrize("state", [None, torch.empty(0, dtype=torch.uint8), {}, b""])
def test_module_whose_extra_state_is_empty_is_no_trouble(state: Any) -> None:
    assert record_of(Other(state)).extra_state == {}


def test_module_with_extra_state_of_another_kind_is_refused_at_start() -> None:
    with pytest.raises(
        ConfigError, match=r"chunk0.layer \(Other\) has extra state that moe_ft cann"
    ):
        taker(Other(torch.ones(3)))


def test_module_that_gets_such_state_later_fails_the_snapshot() -> None:
    module = Other(None)
    take = taker(module)
    module.state = {"scale": 1.0}
    with pytest.raises(SnapshotError, match="or with --moe-ft-strategy none"):
        take.capture(FACTS)


@pytest.mark.parametrize("name", ["chunk0.layer", "chunk0.gone/scaling_fwd.scale"])
def test_recorded_state_that_has_no_place_is_refused_and_not_unpickled(name: str) -> None:
    layer = Linear()
    train(layer, range(2))
    record = record_of(layer)
    (packed, *_) = record.extra_state.values()
    changed = msgspec.structs.replace(record, extra_state={name: packed})
    with pytest.raises(ConfigError, match="no place for"):
        recovered(changed, Linear())
