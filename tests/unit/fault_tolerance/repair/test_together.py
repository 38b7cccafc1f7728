"""The common end of all ranks: results that count, or an exception."""

from argparse import Namespace
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import training
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.nccl import Nccl
from megatron.fault_tolerance.repair.recipes import Recipes
from megatron.fault_tolerance.repair.together import Together
from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.errors import LinksEndedError


@pytest.fixture
def recipes() -> Iterator[Recipes]:
    yield Recipes()
    dist.destroy_process_group()


def make_world(recipes: Recipes) -> None:
    recipes.make(dist.init_process_group, "gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_result_counts_until_the_links_have_ended(recipes: Recipes) -> None:
    make_world(recipes)
    links = Links()
    together = Together(links, recipes)
    together.prepare()
    together.finish()
    links.end(0)
    with pytest.raises(LinksEndedError, match="what was computed since does not count"):
        together.finish()
    links.begin(1)
    together.finish()


def test_ranks_meet_in_their_group_of_gloo_if_they_have_one(recipes: Recipes) -> None:
    make_world(recipes)
    count = dist.distributed_c10d._world.group_count
    together = Together(Links(), recipes)
    together.prepare()
    assert dist.distributed_c10d._world.group_count == count
    assert together._group is None


def test_ranks_whose_group_is_of_gpus_get_one_of_gloo(
    recipes: Recipes, loop_args: Namespace
) -> None:
    loop_args.distributed_timeout_minutes = 1
    world = {"store": FakeStore(), "rank": 1, "world_size": 2}
    recipes.make_fake(dist.init_process_group, default="nccl", backend="fake", **world)
    with Patches() as patches:
        patches.wrap(dist, "new_group", recipes.make_fake)
        together = Together(Links((Gloo(), Nccl())), recipes)
        together.prepare()
    assert recipes.of(together._group).by_device == {"cpu": "gloo", "cuda": "gloo"}


def test_their_group_follows_the_timeout_of_the_others(
    recipes: Recipes, loop_args: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world(recipes)
    changed: list[timedelta] = []
    monkeypatch.setattr(training, "update_pg_timeout", changed.append)
    together, timeout = Together(Links(), recipes), timedelta(seconds=17)
    with Patches() as patches:
        together.install(patches)
        training.update_pg_timeout(timeout)  # the group is Megatron's
        together._group = dist.new_group([0], backend="gloo")
        training.update_pg_timeout(timeout)
    assert changed == [timeout] * 2
    backend = together._group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timeout


@pytest.mark.parametrize("fail_silently", [False, True])
def test_log_line_of_sums_that_may_be_wrong_ends_with_the_links(
    fail_silently: bool, recipes: Recipes, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world(recipes)
    monkeypatch.setattr(training, "training_log", lambda line: line)
    monkeypatch.setattr(Nccl, "settle", lambda transport: None)  # there is no device
    links = Links((Gloo(), Nccl()) if fail_silently else (Gloo(),))

    def lines() -> list[Any]:
        return [training.training_log(1), links.end(0), training.training_log(2)]

    with Patches() as patches:
        Together(links, recipes).install(patches)
        if fail_silently:
            with pytest.raises(LinksEndedError):
                lines()
        else:
            assert lines() == [1, 0, 2], "gloo would have raised in it"
