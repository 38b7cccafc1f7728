"""Fixtures of repairs: links of a rank, and the record of its groups, which end with the test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.swap import Recipes
from moe_ft.cluster.member import Member
from tests.unit.signed import member_of


@pytest.fixture
def member() -> Member:
    return member_of()


@pytest.fixture
def links(member: Member) -> Links:
    return Links(member, (Gloo(),))


@pytest.fixture
def recipes() -> Iterator[Recipes]:
    """Yield the record; the test makes the group of all ranks."""
    yield Recipes()
    dist.destroy_process_group()
