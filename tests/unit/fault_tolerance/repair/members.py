"""Ranks of a round of repairs, and the process groups of one process."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.swap import Recipes
from megatron.fault_tolerance.repair.watcher import Watcher
from megatron.fault_tolerance.seams.megatron_loop import COUNTERS
from moe_ft.cluster.member import LoopPosition
from moe_ft.cluster.rounds import Entry, Rounds
from tests.simulation.repairs import product
from tests.unit.signed import LookedAt, member_of, signed


class Watched:
    """Rank 0 of some ranks in round 0, with a watcher of its links."""

    def __init__(self, num_ranks: int = 1, transport: Gloo | None = None) -> None:
        self.job_store = LookedAt()
        self.store = signed(self.job_store)
        self.member = member_of(0, num_ranks, self.job_store)
        self.link = self.member.link
        self.links = Links(self.member, (transport or Gloo(),))
        self.watcher = Watcher(Rounds(self.store, 0, num_ranks), self.links, self.member)


def position_at(iteration: int, **changes: Any) -> LoopPosition:
    """Return the position of a loop in an iteration of 8 samples, in a job of 9 groups."""
    counters = dict.fromkeys(COUNTERS, 0) | {"consumed_train_samples": iteration * 8}
    given = {"counters": counters, "num_groups": 9, **changes}
    return replace(product.position_at(iteration), **given)


def survivor(rank: int, iteration: int, **changes: Any) -> Entry:
    """Return the entry of a rank that has left an iteration, or the evaluation after it."""
    return Entry(rank=rank, facts=position_at(iteration, **changes).facts())


def make_world(recipes: Recipes) -> None:
    """Make the world of one rank."""
    recipes.make(dist.init_process_group, "gloo", store=dist.HashStore(), rank=0, world_size=1)


def fake_world(recipes: Recipes, backend: str, rank: int = 1) -> None:
    """Make the world of a replacement, as Megatron does with a fake process group."""
    world = {"store": FakeStore(), "rank": rank, "world_size": 2}
    recipes.make_fake(dist.init_process_group, default=backend, backend="fake", **world)
