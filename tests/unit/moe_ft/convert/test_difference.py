"""Differences between states: exact where bits differ, and nothing where they do not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ft.convert import difference
from moe_ft.convert.difference import Difference, compare, render
from moe_ft.convert.source import RunState, open_source
from moe_ft.convert.tensors import find_tensors
from moe_ft.files.storage import Storage
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.convert.models import ITERATION, Known, persist_model

EXPERT = UnitId(kind=UnitKind.EXPERT, layer=0, expert=1)


@pytest.fixture
def changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunState:
    """Return the known model two iterations later, with one more in an element of an expert's masters."""
    value = Known.value

    def changed_value(known: Known, key: str) -> torch.Tensor:
        found = value(known, key)
        if known.unit == EXPERT and key == "param":
            found.view(-1)[7] += 1.0
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Known, "value", changed_value)
        persist_model(Storage(str(tmp_path / "changed")), ITERATION + 2)
    return open_source(str(tmp_path / "changed"))


def differing(first: RunState, second: RunState, **options: bool) -> list[Difference]:
    options = {"with_optimizer": True, **options}
    return [each for each in compare(first, second, **options) if not each.is_equal]


def test_state_does_not_differ_from_itself(source: RunState) -> None:
    found = list(compare(source, source, with_optimizer=True))
    assert {each.kind for each in found} >= {"weight", "master", "exp_avg", "exp_avg_sq"}
    assert all(each.is_equal and each.numel for each in found)
    assert "equal, bit for bit" in render(found)


def test_element_that_differs_is_found_in_its_unit_alone(
    source: RunState, changed: RunState
) -> None:
    found = {each.kind: each for each in differing(source, changed)}
    assert set(found) == {"weight", "master"}  # weights follow from masters
    master = found["master"]
    assert (master.unit, master.num_different, master.numel) == (EXPERT, 1, 72)
    assert master.largest == pytest.approx(1.0)
    assert 0 < master.relative < 1
    assert master.iterations == (ITERATION, ITERATION + 2)


def test_weights_alone_are_compared_where_nothing_else_is_asked_for(
    source: RunState, changed: RunState
) -> None:
    (found,) = differing(source, changed, with_optimizer=False)
    assert found.kind == "weight"
    line = render([found]).splitlines()[2]
    assert line.split()[:4] == [str(EXPERT), "weight", str(ITERATION), str(ITERATION + 2)]


def test_number_that_is_none_in_one_state_differs_without_end(
    source: RunState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = Known.value

    def with_nan(known: Known, key: str) -> torch.Tensor:
        found = value(known, key)
        if known.unit == EXPERT and key == "exp_avg":
            found.view(-1)[0] = torch.nan
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Known, "value", with_nan)
        persist_model(Storage(str(tmp_path / "nan")))
    broken = open_source(str(tmp_path / "nan"))
    (found,) = differing(source, broken)
    assert (found.kind, found.largest) == ("exp_avg", torch.inf)
    assert differing(broken, broken) == []


def test_tensors_of_other_shapes_are_named(
    source: RunState, changed: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        difference,
        "find_tensors",
        lambda given: tuple(
            replace(each, shape=(1,)) if given is changed and each.unit == EXPERT else each
            for each in find_tensors(given)[given is changed :]
        ),
    )
    problems = [each.problem for each in differing(source, changed, with_optimizer=False)]
    assert any("has the shapes" in each for each in problems)
    assert any("the second has no weight of" in each for each in problems)
