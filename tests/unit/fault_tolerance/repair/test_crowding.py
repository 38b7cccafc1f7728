"""Jobs whose nodes can run the ranks of a lost one, too, and why others cannot."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fault_tolerance.repair.crowding import (
    Crowding,
    allow_shared_devices,
    why_no_room,
    with_ranks_of,
)
from moe_ft.cluster.rounds import RoundMark
from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.errors import ConfigError
from moe_ft.loop.listeners import EndedIteration
from moe_ft.recovery.site import Site
from moe_ft.topology import Topology
from tests.unit.moe_ft.recovery import jobs
from tests.unit.signed import member_of

ENDED = EndedIteration(iteration=1, losses={}, is_skipped=False, num_samples=4, seconds=1.0)
GIB = 1 << 30


def site(
    place: Path, *, region_bytes: int = 4096, limit: str | None = None, factor: str = "auto"
) -> Site:
    """Return the place of rank 0 of three nodes of two ranks."""
    found = jobs.site_of(place, limit=limit)
    found.node_dir.mkdir(parents=True)
    (first,) = found.topology.ranks
    ranks = [
        replace(first, rank=rank, node=f"node{rank // 2 or ''}", region_bytes=region_bytes)
        for rank in range(6)
    ]
    memory = replace(found.config.memory, replication_factor=factor)
    return replace(
        found,
        topology=Topology(ranks=tuple(ranks)),
        config=replace(found.config, memory=memory),
    )


def conclude(site: Site | None, value: str = "auto", rank: int = 0) -> bool:
    """Look at a site after two iterations; return what the coordinator learns."""
    config = MoeFtConfig(recovery=RecoveryConfig(without_spare=value))
    member = member_of(rank)
    listener = Crowding(config, member, lambda: site, uses_nccl=False)
    listener.start()
    for _ in range(2):
        listener.after_iteration(ENDED)
    return member.rounds.has(RoundMark.FULL)


def test_ranks_of_a_lost_node_are_on_the_host_and_in_its_domain(memory_dir: Path) -> None:
    ranks = [replace(each, domain=f"of {each.node}") for each in site(memory_dir).topology.ranks]
    crowded = with_ranks_of(Topology(ranks=tuple(ranks)), "node", "node2")
    places = [(each.node, each.domain) for each in crowded.ranks]
    own, other = ("node", "of node"), ("node1", "of node1")
    assert places == [own, own, other, other, own, own]


def test_job_with_room_says_so_once(memory_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 0):
        assert not conclude(site(memory_dir / str(rank)), rank=rank)
    assert capsys.readouterr().err == (
        "moe_ft: if a node is lost and no spare is left, a node that trains runs its ranks, too "
        "(--moe-ft-without-spare)\n"
    )


REFUSED = [
    # Four ranks with two regions each, and with replicas of the two on the other node.
    (
        {"region_bytes": GIB, "limit": "11GiB"},
        "12.00 GiB .* has 11.00 GiB .--moe-ft-host-memory-lim",
    ),
    ({"region_bytes": 1 << 50}, "would take .* TiB with the ranks of another one, and has "),
    (
        {"factor": "2"},
        "--moe-ft-replication-factor=2: 2 replicas need 3 nodes, there are 2. Lower it",
    ),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=["limit", "room", "replicas"])
def test_job_without_room_is_refused_if_it_asks_for_crowding_and_says_so_else(
    changes: dict[str, str], why: str, memory_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = site(memory_dir, **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--moe-ft-without-spare=crowd is refused: .*{why}"):
        conclude(place, "crowd")
    assert conclude(place)
    assert "and no spare is left, the job ends: " + why_no_room(place) in capsys.readouterr().err


def test_job_on_one_node_or_without_checkpoints_says_nothing(
    memory_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conclude(None)
    conclude(jobs.site_of(memory_dir))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "given", "why"),
    [
        (23100, None, ""),
        (30000, "1", ""),
        (22907, None, "need NCCL 2.31, and this is 2.29. Load"),
        (23100, "0", "need NCCL_MULTI_RANK_GPU_ENABLE=1, and it is 0. Remove it."),
    ],
)
def test_nccl_is_told_to_share_devices_where_it_can(
    version: int, given: str | None, why: str
) -> None:
    environment = {} if given is None else {"NCCL_MULTI_RANK_GPU_ENABLE": given}
    found = allow_shared_devices(environment, version)
    assert why in found and bool(why) == bool(found)
    assert environment.get("NCCL_MULTI_RANK_GPU_ENABLE") == (given if why else "1")
