"""Collectives over groups with dead members: answered by the live ones, or refused by name."""

from argparse import Namespace
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.training import global_vars
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.degraded.live_groups import LiveGroups
from moe_ft.errors import RepairError


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveGroups]:
    """Be rank 0 of two, of which the other is dead; this one is its deputy."""
    args = Namespace(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=None)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found = LiveGroups(frozenset({1}), {1: 0}, "without_1")
    with found.answering():
        yield found
    dist.destroy_process_group()


def test_reduction_leaves_the_dead_ranks_part_with_its_deputy(groups: LiveGroups) -> None:
    gradients, part = torch.arange(4.0), torch.zeros(2)
    param_and_grad_buffer.dist_reduce_scatter_func(part, gradients)
    assert part.tolist() == [0.0, 1.0]
    assert gradients.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_gather_takes_the_dead_ranks_part_from_its_deputy(groups: LiveGroups) -> None:
    weights = torch.tensor([0.0, 0.0, 7.0, 8.0])
    param_and_grad_buffer.dist_all_gather_func(weights, torch.tensor([1.0, 2.0]))
    assert weights.tolist() == [1.0, 2.0, 7.0, 8.0]


def test_object_of_a_dead_rank_is_that_of_its_deputy(groups: LiveGroups) -> None:
    values: list[str] = ["", ""]
    dist.all_gather_object(values, "mine")
    assert values == ["mine", "mine"]


def test_mean_is_that_of_the_healthy_job(groups: LiveGroups) -> None:
    value = torch.tensor([6.0])  # of two roles
    dist.all_reduce(value, op=dist.ReduceOp.AVG)
    assert value.tolist() == [3.0]


def test_number_of_tokens_is_counted_once(groups: LiveGroups) -> None:
    num_tokens = torch.tensor(5, dtype=torch.int)
    groups.count(num_tokens)
    dist.broadcast(num_tokens, src=1)  # along the pipeline, from the last stage
    dist.all_reduce(num_tokens, op=dist.ReduceOp.AVG)
    assert int(num_tokens) == 5


def test_collective_without_an_answer_is_refused_by_name(groups: LiveGroups) -> None:
    with pytest.raises(RepairError, match=r"gather_object of ranks \[0, 1\] .* ranks \[1\]"):
        dist.gather_object("value", [None] * 2)
    with pytest.raises(RepairError, match="rank 1, which broadcasts"):
        dist.broadcast(torch.ones(1), src=1)


def test_later_operation_has_a_handle_that_has_ended(groups: LiveGroups) -> None:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None and work.wait()
    assert dist.all_reduce(torch.ones(1)) is None


def test_idle_rank_takes_part_in_what_the_whole_job_decides_and_in_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Rank 3 is dead, and rank 2 divides tensors with it.
    args = Namespace(distributed_timeout_minutes=1, distributed_timeout_seconds_after_init=None)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    stage = dist.new_group([0, 1, 2, 3])
    found = LiveGroups(frozenset({3}), {2: 0, 3: 1}, "without_3")
    with found.answering():
        assert (found.ranks, found.idle) == ([0, 1, 2], {2})
        assert dist.get_process_group_ranks(found.everyone) == [0, 1, 2]
        assert found._live[stage] is None
        weights = torch.zeros(4)
        dist.all_gather_into_tensor(weights, torch.ones(1), group=stage)
        dist.broadcast(weights, src=3, group=stage)  # from a dead one
        assert weights.tolist() == [0.0, 0.0, 1.0, 0.0]
    dist.destroy_process_group()
