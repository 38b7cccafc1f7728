"""A replacement learns what the ranks have told each other at their start."""

from typing import Any

import pytest
import torch.distributed as dist

from megatron.fault_tolerance.repair.gathered import Gathered


def test_replacement_gets_all_values_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    of_groups: list[Any] = []

    def gather(values: list[Any], value: Any, group: Any = None) -> None:
        if group is not None:
            of_groups.append(group)
        values[:] = [value, (value, None)]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    store = dist.HashStore()
    for is_replacement in (False, True):
        with Gathered(store, is_replacement=is_replacement).installed():
            found: list[Any] = []
            for value in ("first", "second"):
                own: list[Any] = [None, None]
                dist.all_gather_object(own, "alone" if is_replacement else value)
                found.append(own)
            dist.all_gather_object([None], value, "a group of some ranks")
        assert found == [["first", ("first", None)], ["second", ("second", None)]]
    assert of_groups == ["a group of some ranks"] * 2
    assert dist.all_gather_object is gather
