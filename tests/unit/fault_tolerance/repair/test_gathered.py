"""A replacement learns what the ranks have told each other at their start, bit for bit and by no code."""

import enum
import math
import pickle
import struct
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some

from megatron.fault_tolerance.repair.gathered import Gathered, from_json, to_json
from moe_ft.errors import ConfigError, RepairError
from tests.unit.signed import signed

VALUES = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inner: (
        some.lists(inner)
        | some.lists(inner).map(tuple)
        | some.dictionaries(some.text() | some.tuples(some.integers(), some.floats()), inner)
    ),
    max_leaves=10,
)


def bits_of(value: Any) -> Any:
    """Return a value in which types and the bits of numbers can be compared."""
    if isinstance(value, float):
        return struct.pack(">d", value)
    if isinstance(value, dict):
        return ["dict", *(bits_of(each) for each in value.items())]
    if isinstance(value, list | tuple):
        return [type(value), *map(bits_of, value)]
    return (type(value), value)


@given(some.lists(VALUES))
def test_values_come_back_with_their_types_and_bits(values: list[Any]) -> None:
    assert bits_of(from_json(to_json(values))) == bits_of(values)


def test_numbers_that_json_lacks_come_back_and_equal_ones_of_another_type_stay_apart() -> None:
    values = [(math.inf, -math.inf, -0.0, 0.1), (1, 1.0, True), (1.0, True, 1), None, ()]
    assert bits_of(from_json(to_json(values))) == bits_of(values)


def test_many_ranks_that_say_the_same_are_kept_once() -> None:
    kept = to_json([[(("max_lr", 1e-3),), False]] * 10_000)
    assert len(kept["values"]) == 1 and len(kept["of_rank"]) == 10_000


class _Setting(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("value", [_Setting.ONE, {1}, b"bytes", object])
def test_value_that_cannot_be_kept_bit_for_bit_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="--moe-ft-repair=auto keeps what .* Leave the flag out"):
        to_json([(value,)])


@pytest.fixture
def _others(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have another rank say something; return the groups of some ranks that gather."""
    of_groups: list[Any] = []

    def gather(values: list[Any], value: Any, group: Any = None) -> None:
        if group is not None:
            of_groups.append(group)
        values[:] = [value, (value, None)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return of_groups


def test_replacement_gets_all_values_in_their_order(_others: list[Any]) -> None:
    store, gather = signed(), dist.all_gather_object
    for is_replacement in (False, True):
        with Gathered(store, is_replacement=is_replacement).installed():
            found: list[Any] = []
            for value in ("first", "second"):
                own: list[Any] = [None, None]
                dist.all_gather_object(own, "alone" if is_replacement else value)
                found.append(own)
            dist.all_gather_object([None], value, "a group of some ranks")
        assert found == [["first", ("first", None)], ["second", ("second", None)]]
    assert _others == ["a group of some ranks"] * 2
    assert dist.all_gather_object is gather


class _Payload:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("the stranger's code runs",))


@pytest.mark.usefixtures("_others")
def test_code_of_a_stranger_in_the_store_does_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    store.set("gathered_0", pickle.dumps([_Payload()]))
    with (
        Gathered(signed(store), is_replacement=True).installed(),
        pytest.raises(RepairError, match="gathered_0, which the ranks have told each other"),
    ):
        dist.all_gather_object([None, None], "alone")
    assert "a value of gathered_0 in the job's store is ignored" in capsys.readouterr().err
