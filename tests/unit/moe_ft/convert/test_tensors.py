"""Names, shapes, ages and content of the tensors of the model, and what is refused."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moe_ft.convert.source import RunState, open_source
from moe_ft.convert.tensors import GlobalTensor, find_tensors, read_tensor
from moe_ft.errors import ConfigError, CorruptStateError
from moe_ft.files.storage import Storage
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.index import Index
from tests.unit.moe_ft.convert.models import BIAS, ITERATION, LAYER, Change, persist_model

FC1 = f"{LAYER}.mlp.experts.experts.1.linear_fc1.weight"
PROJECTION = f"{LAYER}.self_attention.linear_proj.weight"


def tensors_of(folder: Path, change: Change) -> dict[str, GlobalTensor]:
    """Return the tensors of a checkpoint whose indexes were changed."""
    persist_model(Storage(str(folder)), change=change)
    return {each.name: each for each in find_tensors(open_source(str(folder)))}


def edit_units(edit: Any) -> Change:
    """Return a change of every unit of the indexes."""

    def change(index: Index) -> Index:
        units = {name: edit(index, name, unit) for name, unit in index.units.items()}
        kept = {name: unit for name, unit in units.items() if unit is not None}
        return msgspec.structs.replace(index, units=kept)

    return change


def test_expert_is_a_tensor_of_its_own_with_its_place_in_the_stack(source: RunState) -> None:
    expert = next(each for each in find_tensors(source) if each.name == FC1)
    assert str(expert.unit) == "layer.0.expert.1"
    assert (expert.shape, expert.stacked_shape, expert.index) == ((12, 6), (2, 12, 6), (1,))
    assert expert.key == f"{LAYER}.mlp.experts.experts.linear_fc1.weight"
    kinds = ("weight", "master", "exp_avg", "exp_avg_sq")
    assert expert.iterations == dict.fromkeys(kinds, ITERATION)


def test_buffer_belongs_to_the_unit_of_its_router(source: RunState) -> None:
    (bias,) = (each for each in find_tensors(source) if each.buffer)
    assert (bias.name, str(bias.unit)) == (f"{LAYER}.mlp.router.expert_bias", "layer.0.router")


def test_expert_has_the_age_of_its_version(tmp_path: Path) -> None:
    def edit(_: Index, name: str, unit: Any) -> Any:
        return msgspec.structs.replace(
            unit, iteration=2 if name == "layer.0.expert.1" else ITERATION
        )

    assert tensors_of(tmp_path, edit_units(edit))[FC1].iterations["exp_avg"] == 2


def test_expert_of_which_ranks_have_different_versions_is_refused(tmp_path: Path) -> None:
    def edit(index: Index, name: str, unit: Any) -> Any:
        is_older = name == "layer.0.expert.1" and index.rank == 3
        return msgspec.structs.replace(unit, iteration=2) if is_older else unit

    with pytest.raises(ConfigError, match=r"linear_fc1.weight must be of one iteration.*\[2, 4\]"):
        tensors_of(tmp_path, edit_units(edit))


def test_expert_that_was_never_saved_is_named(tmp_path: Path) -> None:
    change = edit_units(lambda _, name, unit: None if name == "layer.0.expert.1" else unit)
    with pytest.raises(ConfigError, match=r"lacks .*local_experts.1.linear_fc1.weight: it was not"):
        tensors_of(tmp_path, change)


def test_checkpoint_of_an_earlier_version_is_refused_with_the_reason(tmp_path: Path) -> None:
    def change(index: Index) -> Index:
        old = {
            name: msgspec.structs.replace(entry, places=(), dtype="")
            for name, entry in index.parameters.items()
        }
        return msgspec.structs.replace(index, parameters=old)

    with pytest.raises(ConfigError, match="nor of 4 others: an earlier version of moe_ft wrote it"):
        tensors_of(tmp_path, change)


def test_tensor_that_is_not_described_is_named(tmp_path: Path) -> None:
    def change(index: Index) -> Index:
        known = {name: each for name, each in index.parameters.items() if name != PROJECTION}
        return msgspec.structs.replace(index, parameters=known)

    with pytest.raises(
        CorruptStateError, match=f"holds {PROJECTION}, which its indexes do not mention"
    ):
        tensors_of(tmp_path, change)


def test_model_that_megatron_could_not_describe_is_refused_with_its_reason(tmp_path: Path) -> None:
    def change(index: Index) -> Index:
        return msgspec.structs.replace(index, model=ModelPlaces(problem="ValueError: odd"))

    with pytest.raises(ConfigError, match="when the job started: ValueError: odd"):
        tensors_of(tmp_path, change)


def test_block_that_no_rank_has_is_named(tmp_path: Path) -> None:
    def change(index: Index) -> Index:
        entry = index.parameters[PROJECTION]
        (place,) = entry.places
        place = msgspec.structs.replace(place, offset=(0, 0))
        changed = {**index.parameters, PROJECTION: msgspec.structs.replace(entry, places=(place,))}
        return msgspec.structs.replace(index, parameters=changed)

    with pytest.raises(CorruptStateError, match=f"{PROJECTION}: no rank has saved 30 of its 60"):
        tensors_of(tmp_path, change)


def test_slice_that_no_rank_has_saved_is_named(tmp_path: Path) -> None:
    def edit(index: Index, name: str, unit: Any) -> Any:
        if index.rank != 2 or name != "embedding":
            return unit
        fewer = [each for each in unit.tensors if each.key != "exp_avg"]
        return msgspec.structs.replace(unit, tensors=tuple(fewer))

    message = r"embedding.*: no rank has saved 11 of its 48 elements of exp_avg$"
    with pytest.raises(CorruptStateError, match=message):
        tensors_of(tmp_path, edit_units(edit))


def test_moments_that_did_not_exist_are_no_kind(tmp_path: Path) -> None:
    def edit(_: Index, name: str, unit: Any) -> Any:
        absent = [
            msgspec.structs.replace(each, is_absent=each.key != "param") for each in unit.tensors
        ]
        return msgspec.structs.replace(unit, tensors=tuple(absent))

    found = tensors_of(tmp_path, edit_units(edit))
    assert set(found[FC1].iterations) == {"weight", "master"}


def test_buffer_comes_from_the_record(source: RunState) -> None:
    (bias,) = (each for each in find_tensors(source) if each.buffer)
    assert torch.equal(read_tensor(source, bias), BIAS)


def test_kind_that_a_tensor_lacks_is_refused(source: RunState) -> None:
    tensor = find_tensors(source)[0]
    with pytest.raises(ConfigError, match=f"has no momentum_buffer of {tensor.name}"):
        read_tensor(source, tensor, "momentum_buffer")


def test_byte_that_was_changed_is_found_before_it_is_used(checkpoints: Path) -> None:
    (path,) = checkpoints.glob("iter_*/rank_00001_*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    source = open_source(str(checkpoints))
    with pytest.raises(CorruptStateError, match="layer.0.expert.1 does not match its checksum"):
        for tensor in find_tensors(source):
            read_tensor(source, tensor)
