"""Records: JSON has no infinity and no NaN, so norms have names for them."""

from typing import Any

import msgspec
import pytest

from moe_ft.format.records import IterationRecord, JobNumbers, OptimizerRecord, numbers_of
from tests.unit.moe_ft.builders import make_record


def reread(record: IterationRecord) -> IterationRecord:
    return msgspec.json.decode(msgspec.json.encode(record), type=IterationRecord)


@pytest.mark.parametrize("norm", [0.0, 1.5, None, "inf", "-inf", "nan"])
def test_gradient_norm_of_any_kind_is_read_as_it_was_written(norm: Any) -> None:
    record = msgspec.structs.replace(make_record(5), grad_norm=norm)
    assert reread(record) == record


def test_gradient_norm_of_another_name_is_refused() -> None:
    record = msgspec.structs.replace(make_record(5), grad_norm="infinity")  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError, match=r"\$\.grad_norm"):
        reread(record)


def test_unknown_field_of_an_optimizer_is_refused() -> None:
    content = msgspec.json.encode({"groups": [], "steps": {}, "momentum": 1})
    with pytest.raises(msgspec.ValidationError, match="momentum"):
        msgspec.json.decode(content, type=OptimizerRecord)


def test_state_of_a_loop_is_read_as_it_was_written() -> None:
    state = {"epoch": 1, "shards": ["a", None], "rates": {"x": 0.5}}
    record = msgspec.structs.replace(make_record(5), loop_state=state)
    assert reread(record).loop_state == state


def test_record_of_a_loop_without_state_is_written_as_before_there_was_any() -> None:
    record = msgspec.structs.replace(make_record(5), loop_state={})
    assert b"loop_state" not in msgspec.json.encode(record)
    assert reread(record) == record


def test_numbers_of_the_job_are_those_of_the_record() -> None:
    record = msgspec.structs.replace(make_record(5), grad_norm="inf", num_tokens=77)
    numbers = numbers_of(record)
    assert msgspec.json.decode(msgspec.json.encode(numbers), type=JobNumbers) == numbers
    for name in {*JobNumbers.__struct_fields__} - {"found_inf"}:
        assert getattr(numbers, name) == getattr(record, name), name


def test_numbers_say_which_optimizers_have_found_an_infinity_only_if_all_have_looked() -> None:
    looked = OptimizerRecord(groups=(), steps={}, found_inf=True)
    optimizers = (looked, msgspec.structs.replace(looked, found_inf=False))
    record = msgspec.structs.replace(make_record(5), optimizers=optimizers)
    assert numbers_of(record).found_inf == (True, False)
    optimizers = (looked, msgspec.structs.replace(looked, found_inf=None))
    assert numbers_of(msgspec.structs.replace(record, optimizers=optimizers)).found_inf == ()
