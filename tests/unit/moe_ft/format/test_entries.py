"""Entries: the order of versions, and the sizes and packings of tensors."""

from typing import Any

import msgspec
import pytest

from moe_ft.format.entries import (
    TensorEntry,
    UnitEntry,
    lossy_packings,
    tensor_bytes,
    tensor_pieces,
)
from moe_ft.format.identity import (
    changed_settings,
    differing_settings,
    digest_setting,
    has_other_layout,
    incomparable_settings,
)
from moe_ft.format.packings import Packing
from moe_ft.format.records import IterationRecord, OptimizerRecord, numbers_of
from tests.unit.moe_ft.builders import make_identity, make_record
from tests.unit.moe_ft.format.bodies import small_index


def tensor(key: str, packing: Packing, *, is_absent: bool = False) -> TensorEntry:
    return TensorEntry("a.weight", key, 100, 300, "F32", 0, is_absent, packing.value)


def unit(*tensors: TensorEntry) -> UnitEntry:
    return UnitEntry(0, 4096, 1, "full", "0" * 16, tensors)


def test_version_of_a_later_incarnation_is_newer_whatever_its_iteration() -> None:
    unit = small_index().units["embedding"]
    later = msgspec.structs.replace(unit, incarnation=1, iteration=0)
    assert later.version > unit.version


@pytest.mark.parametrize(
    ("packing", "num_bytes"),
    [(Packing.EXACT, 800), (Packing.BF16, 400), (Packing.E4M3, 200), (Packing.E4M3_BLOCKS, 264)],
)
def test_bytes_of_a_tensor_reach_from_its_start_to_the_end_of_its_last_piece(
    packing: Packing, num_bytes: int
) -> None:
    entry = tensor("param", packing)
    assert tensor_bytes(entry) == num_bytes
    assert tensor_pieces(entry)[0].count == 200


def test_packings_that_lose_bits_are_named_by_key_in_ascending_order() -> None:
    first = unit(tensor("param", Packing.SPLIT), tensor("exp_avg", Packing.FP16))
    second = unit(tensor("weight", Packing.EXACT), tensor("exp_avg", Packing.BF16))
    assert lossy_packings([first, second]) == {"exp_avg": "bf16 or fp16"}


def test_absent_tensor_has_no_packing_to_name() -> None:
    assert lossy_packings([unit(tensor("exp_avg", Packing.BF16, is_absent=True))]) == {}


def reread(record: IterationRecord) -> IterationRecord:
    return msgspec.json.decode(msgspec.json.encode(record), type=IterationRecord)


@pytest.mark.parametrize("norm", [0.0, 1.5, None, "inf", "-inf", "nan"])
def test_gradient_norm_of_any_kind_is_read_as_it_was_written(norm: Any) -> None:
    record = msgspec.structs.replace(make_record(5), grad_norm=norm)
    assert reread(record) == record


def test_state_of_a_loop_is_read_as_it_was_written() -> None:
    state = {"epoch": 1, "shards": ["a", None], "rates": {"x": 0.5}}
    record = msgspec.structs.replace(make_record(5), loop_state=state)
    assert reread(record).loop_state == state


def test_record_of_a_loop_without_state_is_written_as_before_there_was_any() -> None:
    record = msgspec.structs.replace(make_record(5), loop_state={})
    assert b"loop_state" not in msgspec.json.encode(record)
    assert reread(record) == record


def test_numbers_say_which_optimizers_have_found_an_infinity_only_if_all_have_looked() -> None:
    looked = OptimizerRecord(groups=(), steps={}, found_inf=True)
    optimizers = (looked, msgspec.structs.replace(looked, found_inf=False))
    record = msgspec.structs.replace(make_record(5), optimizers=optimizers)
    assert numbers_of(record).found_inf == (True, False)
    optimizers = (looked, msgspec.structs.replace(looked, found_inf=None))
    assert numbers_of(msgspec.structs.replace(record, optimizers=optimizers)).found_inf == ()


def test_settings_that_differ_are_described_and_those_that_one_side_lacks_are_named() -> None:
    ours, theirs = {"--a": 1, "--b": 2, "--d": 4}, {"--a": 1, "--b": 3, "--c": None}
    assert differing_settings(ours, theirs) == ["--b: 3 there, 2 now"]
    assert incomparable_settings(ours, theirs) == ["--c", "--d"]


@pytest.mark.parametrize("is_clear", [True, False], ids=["of an earlier version", "digests"])
def test_settings_that_were_changed_added_or_left_out_are_named(is_clear: bool) -> None:
    ours, theirs = {"--a": "1", "--b": "2", "--d": "4"}, {"--a": "1", "--b": "3", "--c": "None"}
    now = {name: digest_setting(name, value) for name, value in ours.items()}
    there = {n: value if is_clear else digest_setting(n, value) for n, value in theirs.items()}
    assert changed_settings(now, there) == ["--b", "--c", "--d"]
    assert changed_settings(now, ours if is_clear else dict(now)) == []


def test_slots_are_compared_with_none_and_other_settings_only_where_both_runs_have_them() -> None:
    run = make_identity()
    sizes = run.fingerprint
    slots = {**sizes, "--moe-ft-expert-slots": 2}
    with_slots = msgspec.structs.replace(run, fingerprint=slots)
    assert has_other_layout(run, slots, run.world_size)
    assert has_other_layout(with_slots, sizes, run.world_size)
    assert not has_other_layout(with_slots, slots, run.world_size)
    assert differing_settings(slots, sizes) == ["--moe-ft-expert-slots: 0 there, 2 now"]
    assert differing_settings(sizes, slots) == ["--moe-ft-expert-slots: 2 there, 0 now"]
    assert incomparable_settings(sizes, slots) == []
    later = {**sizes, "--use-distributed-optimizer": True}  # earlier versions do not say
    assert not has_other_layout(run, later, run.world_size)
    assert incomparable_settings(later, sizes) == ["--use-distributed-optimizer"]
