"""Agreement and sums of a rank that is alone, without process groups; tests/distributed has several ranks."""

import pytest
import torch

from moe_ft.engine import agreement as module
from moe_ft.engine import exchange
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.errors import SnapshotError

TIMEOUT_S = 30.0


@pytest.fixture
def agreement() -> Agreement:
    found = Agreement(TIMEOUT_S)
    found.start()
    return found


def test_single_rank_agrees_with_itself(agreement: Agreement) -> None:
    agreement.begin([3, -(2**62), 0])
    assert agreement.is_under_way
    assert agreement.result() == [3, -(2**62), 0]
    assert not agreement.is_under_way


def test_single_rank_gathers_and_broadcasts_its_own_value(agreement: Agreement) -> None:
    assert agreement.gather("value", exchange.TEXT) == ["value"]
    assert agreement.broadcast("value", exchange.TEXT) == "value"
    agreement.barrier()


def test_sum_of_a_single_rank_is_a_copy_of_its_counts() -> None:
    stage = StageSum(TIMEOUT_S)
    stage.start([0], 0)
    counts = torch.tensor([[1, 2], [3, 4]])
    stage.begin(counts)
    counts.zero_()
    assert stage.result().tolist() == [[1, 2], [3, 4]]


def test_rank_that_has_left_puts_nothing_in(agreement: Agreement) -> None:
    agreement.begin([3])
    agreement.leave()
    assert not agreement.is_under_way
    with pytest.raises(AssertionError):
        agreement.begin([3])


def test_sums_that_are_under_way_are_known_without_reading_them() -> None:
    stage = StageSum(TIMEOUT_S)
    assert stage.pending()() is None
    stage.begin(torch.tensor([[3, 4]]))
    found = stage.pending()()
    assert found is not None and found.tolist() == [[3, 4]]
    assert stage.is_under_way
    assert stage.result().tolist() == [[3, 4]]


class _Unfinished:
    def is_completed(self) -> bool:
        return False


def test_sums_that_are_not_known_in_time_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PENDING_S", 0.0)
    stage = StageSum(TIMEOUT_S)
    stage.begin(torch.tensor([3]))
    stage._work = _Unfinished()
    with pytest.raises(SnapshotError, match="the tokens of the iteration are not added up"):
        stage.pending()()
