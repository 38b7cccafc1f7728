"""Fixtures of repairs: links of a rank, and the record of its groups, which end with the test."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.swap import Recipes
from moe_ft.cluster.link import Link


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def links(link: Link) -> Links:
    return Links(link, (Gloo(),))


@pytest.fixture
def recipes() -> Iterator[Recipes]:
    """Yield the record; the test makes the group of all ranks."""
    yield Recipes()
    dist.destroy_process_group()
