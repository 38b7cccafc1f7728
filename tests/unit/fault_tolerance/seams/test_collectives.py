"""Collectives that others than their ranks answer: where some ranks run an iteration again, or are alone."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.seams.collectives import alone, fake_world
from megatron.fault_tolerance.seams.replay import answering
from moe_ft.errors import UnrecoverableError
from moe_ft.format.records import JobNumbers, numbers_of
from tests.unit.moe_ft.builders import make_record

SCOPE = frozenset({0, 1})  # of three ranks


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """Be rank 0 of three, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=3)
    yield
    dist.destroy_process_group()


class Job:
    """An optimizer of two inner ones that look for gradients that are not finite, and a model's config."""

    def __init__(self) -> None:
        self.inner = [Namespace(found_inf=torch.zeros(1)) for _ in range(2)]
        self.optimizer = Namespace(chained_optimizers=self.inner)
        self.counted: list[Any] = []
        self.config = Namespace(finalize_model_grads_func=self.finalize)

    def finalize(self, model: Any, num_tokens: Any = None, *, force: bool = False) -> None:
        """Sum the tokens of all stages, as Megatron does."""
        if num_tokens is not None:
            dist.broadcast(num_tokens, src=2)
            dist.all_reduce(num_tokens)
        self.counted.append((model, num_tokens, force))

    def answered(self, **numbers: Any) -> Any:
        """Have an iteration answered that ends with some numbers."""
        common = numbers_of(make_record(4))
        given: JobNumbers = msgspec.structs.replace(common, **numbers)
        return answering(self.optimizer, self.config, given, SCOPE)


@pytest.fixture
def job() -> Job:
    return Job()


def test_each_optimizer_is_told_whether_its_gradients_were_finite(job: Job) -> None:
    with job.answered(found_inf=(False, True)):
        for each in job.inner:
            dist.all_reduce(each.found_inf, op=dist.ReduceOp.MAX)
    assert [float(each.found_inf) for each in job.inner] == [0.0, 1.0]


def test_number_of_tokens_is_that_of_the_job(job: Job) -> None:
    num_tokens = torch.tensor(7, dtype=torch.int)
    with job.answered(num_tokens=4096):
        job.config.finalize_model_grads_func("model", num_tokens, force=True)
    assert int(num_tokens) == 4096
    assert job.counted == [("model", num_tokens, True)], "Megatron's own code has run"


def test_losses_per_micro_batch_need_no_number_of_tokens(job: Job) -> None:
    with job.answered(num_tokens=None):
        job.config.finalize_model_grads_func("model", None)
    assert job.counted == [("model", None, False)]


def test_tensor_is_answered_in_its_iteration_only(job: Job) -> None:
    finalize, all_reduce = job.config.finalize_model_grads_func, dist.all_reduce
    with job.answered(found_inf=(True, True)):
        assert dist.all_reduce is not all_reduce
    assert (job.config.finalize_model_grads_func, dist.all_reduce) == (finalize, all_reduce)
    dist.all_reduce(job.inner[0].found_inf)
    assert float(job.inner[0].found_inf) == 0.0


def test_missing_numbers_end_the_replay(job: Job) -> None:
    lacks_finite = pytest.raises(
        UnrecoverableError, match="iteration 4 .* gradients are not finite"
    )
    with job.answered(found_inf=()), lacks_finite:
        dist.all_reduce(job.inner[0].found_inf)
    lacks_tokens = pytest.raises(UnrecoverableError, match="iteration 4 .* the number of tokens")
    with job.answered(num_tokens=None), lacks_tokens:
        job.config.finalize_model_grads_func("model", torch.tensor(7))


def test_collective_among_the_ranks_of_the_scope_is_run(job: Job) -> None:
    group = dist.new_group([0, 1])
    with job.answered():
        dist.all_reduce(torch.ones(1), group=group)
        dist.all_gather_into_tensor(torch.ones(2), torch.ones(1), group)  # the group by its place
        dist.barrier(group=group)


def test_collective_that_reaches_another_rank_is_refused_by_name(job: Job) -> None:
    group = dist.new_group([0, 2])
    with job.answered():
        with pytest.raises(UnrecoverableError, match=r"broadcast of ranks \[0, 2\] .* rank 2"):
            dist.broadcast(torch.ones(1), 0, group)
        with pytest.raises(UnrecoverableError, match="--moe-ft-recovery global"):
            dist.all_gather_object([None] * 3, "all ranks are the default")
        with pytest.raises(UnrecoverableError, match="barrier"):
            dist.barrier()


def test_rank_of_a_plan_speaks_for_all() -> None:
    values, total, args = [""] * 3, torch.ones(1), Namespace()
    with fake_world(args), alone():
        assert args.fake_process_group
        dist.all_gather_object(values, "mine")
        assert dist.all_reduce(total) is None
    assert (values, float(total)) == (["mine"] * 3, 1.0)
    assert not hasattr(args, "fake_process_group")
