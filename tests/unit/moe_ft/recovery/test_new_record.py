"""Record of a rank that did not exist: found by places in the model, or refused by name."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from moe_ft.errors import PlanError
from moe_ft.format.entries import GlobalPlace, ModelPlaces
from moe_ft.format.index import Index
from moe_ft.format.records import OptimizerRecord, RecordTensor
from moe_ft.recovery import new_record
from moe_ft.recovery.new_record import make_record
from tests.unit.moe_ft.builders import make_window

BIAS = RecordTensor("F32", (1,), b"\x00\x00\x80\x3f")
DENSE = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}
EXPERTS = {**DENSE, "is_expert_parallel": True}


ANY_GROUP: dict[str, Any] = {}


def place(layer: int) -> GlobalPlace:
    key = f"decoder.layers.{layer}.mlp.router.expert_bias"
    return GlobalPlace(key=key, shape=(1,), offset=(0,), start=(0,), extent=(1,))


def index_of(
    layer: int,
    *,
    steps: dict[str, float] | None = None,
    groups: tuple[dict[str, Any], ...] = (DENSE,),
    **changes: Any,
) -> Index:
    """Return the index of a rank that has the bias of one layer under the name of its first."""
    index = make_window(length=1).index
    optimizer = OptimizerRecord(groups=groups, steps={"*": 3.0} if steps is None else steps)
    record = msgspec.structs.replace(
        index.records[-1], optimizers=(optimizer,), buffers={"first.bias": BIAS}, **changes
    )
    places = ModelPlaces(buffers={"first.bias": (place(layer),)})
    return msgspec.structs.replace(index, records=(record,), model=places)


def met(*groups: dict[str, Any], layers: tuple[int, ...] = (), stage: int = 0) -> Any:
    """Return what a rank knows that has the biases of some layers, and one optimizer."""
    inner = SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups))
    buffers: dict[str, tuple[GlobalPlace, ...]] = {
        f"layer{layer}.bias": (place(layer),) for layer in layers
    }
    return SimpleNamespace(
        live=SimpleNamespace(
            built=([], SimpleNamespace(chained_optimizers=[inner]), None),
            model_places=ModelPlaces(buffers=buffers),
        ),
        facts=SimpleNamespace(fingerprint={"--seed": 7}, stage=stage),
    )


@pytest.fixture(autouse=True)
def _seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show the seed instead of drawing with it, which takes Megatron's groups."""
    monkeypatch.setattr(new_record, "seeded_states", lambda seed: {"seed": seed})
    monkeypatch.setattr(new_record, "current_num_microbatches", lambda: 6)


def test_buffers_are_found_by_their_places_whatever_their_names_on_ranks() -> None:
    indexes = {0: index_of(4), 1: index_of(5)}
    record = make_record(indexes, met(DENSE, layers=(5,)), -1)
    assert record.buffers == {"layer5.bias": BIAS}
    with pytest.raises(PlanError, match="buffer layer6.bias"):
        make_record(indexes, met(layers=(6,)), -1)


def test_a_buffer_without_a_place_must_mean_nothing() -> None:
    def index(data: bytes) -> Index:
        found = index_of(4)
        buffers = {"count": RecordTensor("F32", (1,), data)}
        record = msgspec.structs.replace(found.records[0], buffers=buffers)
        return msgspec.structs.replace(found, records=(record,))

    assert make_record({0: index(bytes(4))}, met(), -1).buffers == {}
    with pytest.raises(PlanError, match="buffer count, which is no part"):
        make_record({0: index(b"\x00\x00\x80\x3f")}, met(), -1)


def test_random_numbers_follow_from_seed_iteration_and_stage() -> None:
    index = index_of(4)
    seed = 7 + 1_000_003 * index.iteration
    for stage in (0, 1):
        assert make_record({0: index}, met(stage=stage), -1).rng == {"seed": seed + 100 * stage}


def test_groups_get_the_values_of_groups_with_such_parameters() -> None:
    groups = ({**DENSE, "lr": 0.1}, {**EXPERTS, "lr": 0.2}, {**DENSE, "wd_mult": 0.0, "lr": 0.3})
    indexes = {0: index_of(4, groups=groups)}
    no_decay = {**EXPERTS, "wd_mult": 0.0}
    (found,) = make_record(indexes, met(EXPERTS, DENSE, no_decay), -1).optimizers
    assert [(each["lr"], each["is_expert_parallel"]) for each in found.groups] == [
        (0.2, True),
        (0.1, False),
        (0.3, True),
    ]
    with pytest.raises(PlanError, match="group of the optimizer"):
        make_record(indexes, met({**DENSE, "lr_mult": 2.0}), -1)


def test_groups_that_differ_in_their_rates_alone_are_told_apart_by_them() -> None:
    groups = ({**DENSE, "max_lr": 0.1, "lr": 0.1}, {**DENSE, "max_lr": 0.3, "lr": 0.2})
    live = met({**EXPERTS, "max_lr": 0.3}, {**DENSE, "max_lr": 0.1}, {**DENSE, "max_lr": 0.7})
    (found,) = make_record({0: index_of(4, groups=groups)}, live, -1).optimizers
    assert [each["lr"] for each in found.groups] == [0.2, 0.1, 0.1]


def test_steps_are_one_number_that_all_ranks_have_or_none() -> None:
    (found,) = make_record(
        {0: index_of(4), 1: index_of(5, steps={"a": 3.0})}, met(ANY_GROUP), -1
    ).optimizers
    assert found.steps == {"*": 3.0}
    (found,) = make_record({0: index_of(4, steps={})}, met(ANY_GROUP), -1).optimizers
    assert found.steps == {}
    with pytest.raises(PlanError, match="number of steps"):
        make_record({0: index_of(4), 1: index_of(5, steps={"*": 4.0})}, met(), -1)


def test_state_of_a_loop_is_taken_over_if_all_ranks_have_the_same() -> None:
    same = {rank: index_of(rank, loop_state={"epoch": 2}) for rank in range(2)}
    assert make_record(same, met(), -1).loop_state == {"epoch": 2}
    with pytest.raises(PlanError, match="state of its own"):
        make_record({**same, 2: index_of(2, loop_state={"epoch": 3})}, met(), -1)


def test_microbatches_are_those_of_this_layout() -> None:
    assert make_record({0: index_of(4)}, met(), -1).num_microbatches == 6


def test_scales_that_cast_fp8_parameters_belong_to_their_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index = index_of(4, extra_state={"layer/scaling_fwd.scale": BIAS})
    own = met(DENSE, layers=(4,))
    own.live.parameters = [SimpleNamespace(parameter="weight")]
    assert make_record({0: index}, own, -1).extra_state == {}  # of parameters in BF16
    monkeypatch.setattr(new_record, "is_quantized", lambda parameter: parameter == "weight")
    with pytest.raises(PlanError, match="casts its FP8 parameters"):
        make_record({0: index}, own, -1)
    make_record({0: index_of(4)}, own, -1)
