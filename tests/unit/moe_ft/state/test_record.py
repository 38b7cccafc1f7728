"""Records: buffers, scalars and random numbers come back as they were taken."""

import json
import math
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import ConfigError
from moe_ft.format.records import IterationRecord, JobNumbers, numbers_of
from moe_ft.state.packed_values import from_json, pack, to_json, unpack
from moe_ft.state.random_states import apply_rng, current_rng
from moe_ft.state.record import (
    CapturedRecord,
    IterationFacts,
    LoopCounters,
    RecordTaker,
    apply,
    capture_numbers,
    encode,
    step_ahead,
)
from moe_ft.state.schedule import state_of
from moe_ft.state.tensors import buffer_places
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import make_parameter, make_record


class Tables(RotaryEmbedding):
    """The tables of sines that multi-latent attention has in each layer."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.register_buffer("cos_cached", torch.zeros(4), persistent=False)


def model() -> Any:
    """Return a layer with a router's bias and tables."""
    layer = torch.nn.Module()
    layer.router = torch.nn.Module()
    layer.router.register_buffer("expert_bias", torch.zeros(2))
    layer.router.register_buffer("local_tokens", torch.zeros(2), persistent=False)
    layer.rotary_pos_emb = Tables()
    return layer


def test_record_holds_what_training_changes_and_no_tables_of_sines() -> None:
    names = ["chunk0.router.expert_bias", "chunk0.router.local_tokens"]
    assert list(buffer_places([model()])) == names


def test_tables_of_sines_that_an_earlier_version_has_noted_are_passed_over() -> None:
    packed = make_record(3).buffers["layer.0.expert_bias"]
    buffers = {"chunk0.rotary_pos_emb.cos_cached": packed, "chunk0.router.expert_bias": packed}
    record = msgspec.structs.replace(make_record(3), buffers=buffers, optimizers=())
    live, scheduler, optimizer = model(), SimpleNamespace(), SimpleNamespace(chained_optimizers=[])
    apply(record, [live], optimizer, scheduler, [])
    assert torch.equal(live.rotary_pos_emb.cos_cached, torch.zeros(4))
    assert torch.equal(live.router.expert_bias, unpack(packed))


def test_record_of_a_model_with_other_buffers_is_refused() -> None:
    packed = make_record(3).buffers["layer.0.expert_bias"]
    record = msgspec.structs.replace(make_record(3), buffers={"chunk0.other": packed})
    with pytest.raises(
        ConfigError, match=r"iteration 3 holds chunk0\.other, which this model lacks"
    ):
        apply(record, [model()], None, None, [])


class Rank:
    """A layer, its optimizer after one step, and what a record of them is taken and put back with."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.layer = model()
        self.master = torch.nn.Parameter(torch.randn(3))
        self.adam = torch.optim.Adam([self.master], lr=seed / 8, betas=(0.5, 0.75))
        self.scale: dict[str, Any] = {"scale": torch.tensor([1024.0 * seed]), "growth": seed}
        scaler = SimpleNamespace(
            state_dict=lambda: self.scale, load_state_dict=lambda found: self.scale.update(found)
        )
        self.inner = SimpleNamespace(
            optimizer=self.adam, grad_scaler=scaler, found_inf=torch.zeros(1)
        )
        self.scheduler = SimpleNamespace(num_steps=8 * seed)
        self.scheduler.state_dict = lambda: {"num_steps": self.scheduler.num_steps}
        unit = UnitId(kind=UnitKind.FINAL_NORM)
        self.parameters = [
            make_parameter(
                unit, "norm", parameter=self.master, optimizer=self.inner, master=self.master
            )
        ]
        for _ in range(seed):
            self.master.grad = torch.randn(3)
            self.adam.step()
        self.layer.router.expert_bias.fill_(seed)

    def capture(self) -> tuple[RecordTaker, CapturedRecord]:
        """Return a taker and what it has captured."""
        taker = RecordTaker([self.layer], self.inner, self.scheduler, self.parameters)
        return taker, taker.capture(facts_of(math.inf))

    def put_back(self, record: IterationRecord) -> None:
        """Apply a record to this state."""
        apply(record, [self.layer], self.inner, self.scheduler, self.parameters)


def facts_of(grad_norm: float | None = 1.5) -> IterationFacts:
    return IterationFacts(
        iteration=3,
        grad_norm=grad_norm,
        num_tokens=torch.tensor(640),
        num_floating_point_operations=1e15,
        tokens_per_expert={"layer.0": torch.tensor([5, 3])},
        counters=LoopCounters(
            consumed_train_samples=24,
            consumed_valid_samples=8,
            skipped_train_samples=1,
            num_microbatches=2,
        ),
    )


def written(record: IterationRecord) -> IterationRecord:
    """Return a record as a start reads it from its file."""
    return msgspec.json.decode(msgspec.json.encode(record), type=IterationRecord)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)


def test_record_of_one_rank_makes_another_one_the_same(cpu: None) -> None:
    saved, live = Rank(2), Rank(5)
    taker, captured = saved.capture()
    taker.complete(captured)
    record = written(encode(captured))
    live.put_back(record)
    assert torch.equal(live.layer.router.expert_bias, torch.full((2,), 2.0))
    assert live.scheduler.num_steps == 16
    assert live.adam.state[live.master]["step"] == 2
    assert live.adam.param_groups[0]["lr"] == 0.25
    assert live.adam.param_groups[0]["betas"] == (0.5, 0.75)
    assert live.scale == {"scale": torch.tensor([2048.0]), "growth": 2}
    assert (record.grad_norm, record.num_tokens) == ("inf", 640)
    assert record.tokens_per_expert == {"layer.0": (5, 3)}
    again = live.capture()
    again[0].complete(again[1])
    taken_again = msgspec.structs.replace(encode(again[1]), rng=record.rng)
    assert taken_again == record


def test_captured_record_does_not_follow_the_state(cpu: None) -> None:
    rank = Rank(2)
    taker, captured = rank.capture()
    rank.layer.router.expert_bias.fill_(9)
    rank.scale["scale"].fill_(1)
    rank.scheduler.num_steps = 99
    taker.complete(captured)
    record = encode(captured)
    assert unpack(record.buffers["chunk0.router.expert_bias"]).tolist() == [2.0, 2.0]
    assert record.scheduler == {"num_steps": 16}
    assert Rank(2).capture()[1].values["optimizers"][0]["scaler"]["scale"] == 2048
    live = Rank(5)
    live.put_back(record)
    assert live.scale["scale"] == 2048


FACTS: Any = None


def make_scheduler() -> Any:
    """Return a scheduler that warms up, decays, and changes the weight decay, and its optimizer."""
    groups: list[dict[str, Any]] = [
        {"params": [torch.zeros(1)], "lr": 0.0, "max_lr": 1.0, "min_lr": 0.0, "wd_mult": 1.0},
        {"params": [torch.zeros(1)], "lr": torch.zeros(1), "max_lr": 2.0, "min_lr": 0.5},
    ]
    return OptimizerParamScheduler(
        SimpleNamespace(param_groups=groups),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.0,
        lr_warmup_steps=16,
        lr_decay_steps=64,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.1,
        wd_incr_steps=64,
        wd_incr_style="linear",
    )


def captured(scheduler: Any) -> CapturedRecord:
    """Return copies of the values that a scheduler changes."""
    groups = [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in group.items()
            if key != "params"
        }
        for group in scheduler.optimizer.param_groups
    ]
    optimizers = [{"groups": groups[:1]}, {"groups": groups[1:]}]
    values = {"scheduler": state_of(scheduler), "optimizers": optimizers}
    return CapturedRecord(facts=FACTS, values=values)


def test_record_ahead_is_the_one_after_the_step() -> None:
    scheduler = make_scheduler()
    for _ in range(6):  # through the end of the warm-up
        record = captured(scheduler)
        step_ahead(record, scheduler, 8)
        scheduler.step(8)
        assert record.values == captured(scheduler).values


def test_record_ahead_leaves_a_scheduler_alone_whose_steps_are_wrapped() -> None:
    scheduler = make_scheduler()
    before = captured(scheduler).values
    with Patches() as patches:
        patches.wrap(scheduler, "step", lambda original, increment: original(increment - 1))
        record = captured(scheduler)
        step_ahead(record, scheduler, 8)
        assert captured(scheduler).values == before
    scheduler.step(8)
    assert record.values == captured(scheduler).values


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_small_tensor_is_unpacked_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    found = unpack(pack(tensor))
    assert (found.dtype, found.shape) == (dtype, tensor.shape)
    assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_number_that_json_lacks_is_read_as_it_was(value: float) -> None:
    assert from_json(json.loads(json.dumps(to_json({"norm": value})))) == {"norm": value}
    assert math.isnan(from_json(to_json(math.nan)))


def test_tensor_among_values_is_read_as_it_was() -> None:
    found = from_json(json.loads(json.dumps(to_json([{"scale": torch.tensor([0.1, 3.0])}]))))
    assert torch.equal(found[0]["scale"], torch.tensor([0.1, 3.0]))


def test_random_numbers_continue_where_they_were_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)  # without a GPU
    monkeypatch.setattr(torch.cuda, "set_rng_state", torch.set_rng_state)

    def draw() -> tuple[float, float, float]:
        return random.gauss(), float(np.random.normal()), float(torch.rand(1))

    random.gauss()
    np.random.normal()  # both keep a second number for the next call
    states = json.loads(json.dumps(current_rng()))
    expected = draw()
    assert draw() != expected
    apply_rng(states)
    assert draw() == expected
