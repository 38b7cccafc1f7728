"""Crowding: without a spare, a node that trains also runs the ranks of a lost one (moe_ft/cluster decides).

This says at the start whether that is possible, on rank 0 for its node and device: ranks of one job are
alike, and the decision about a lost node looks at the room of each. With `auto` a job in which it is not
possible ends as without it. Asked for by name, it is refused.
"""

import os
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import override

import torch

from moe_ft.calls import nccl_version
from moe_ft.cluster.member import Member
from moe_ft.cluster.rounds import RoundMark
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of, size_text
from moe_ft.config.lost_nodes import FLAG
from moe_ft.doctor.machine import free_bytes
from moe_ft.errors import ConfigError, PlanError
from moe_ft.free_memory import private_bytes
from moe_ft.loop.listeners import EndedIteration, LoopListener
from moe_ft.planning.host_memory import num_regions, regions_at_peers
from moe_ft.planning.placement import default_replication_factor, place_replicas, plan_node_memory
from moe_ft.recovery.job_memory import measure
from moe_ft.recovery.site import Site
from moe_ft.saying import say
from moe_ft.topology import Topology

_SHARED_DEVICE = "NCCL_MULTI_RANK_GPU_ENABLE"
_FIRST_VERSION = (2, 31)
_LIMIT = flag_of("host_memory_limit")


class Crowding(LoopListener):
    """Finds out whether this job can crowd. Owned by the training thread."""

    def __init__(
        self,
        config: MoeFtConfig,
        member: Member,
        find_site: Callable[[], Site | None],
        *,
        uses_nccl: bool,
    ) -> None:
        """Look at nothing yet.

        Args:
            member: tells the coordinator; it is connected when training starts.
            find_site: returns the place of this rank, or None before the setup.
            uses_nccl: whether ranks of a group would share a device.
        """
        self._member = member
        self._find_site = find_site
        self._uses_nccl = uses_nccl
        self._answer = config.answer_to_lost_nodes
        self._is_asked_for = config.recovery.without_spare == self._answer
        self._is_known = member.rank != 0 or member.is_replacement

    @override
    def start(self) -> None:
        if self._uses_nccl and (why := allow_shared_devices(os.environ, _version())):
            self._conclude(why)

    @override
    def after_iteration(self, ended: EndedIteration) -> None:
        """Look at the memory once, when nothing takes more any more."""
        site = None if self._is_known else self._find_site()
        if site is not None and len(site.topology.nodes) > 1:
            self._conclude(why_no_room(site) or (why_no_device() if self._uses_nccl else ""))

    def _conclude(self, why: str) -> None:
        """Say what happens to a lost node.

        Raises:
            ConfigError: if crowding is asked for by name, and is not possible.
        """
        self._is_known = True
        if why and self._is_asked_for:
            raise ConfigError(f"{FLAG}={self._answer} is refused: {why} Or give {FLAG} end.")
        if self._member.rank == 0 and not self._member.is_replacement:
            what = "a node that trains runs its ranks, too"
            if why:
                self._member.rounds.note(RoundMark.FULL)
                what = f"the job ends: {why} Then a node that trains could run its ranks, too"
            say(f"if a node is lost and no spare is left, {what} ({FLAG})")


def _version() -> int:
    """Return the version of NCCL as it states it: 23105 is 2.31.5."""
    try:
        return nccl_version()
    except OSError:  # it is a part of torch's own library
        major, minor, patch, *_ = torch.cuda.nccl.version()
        return int(10000 * major + 100 * minor + patch)


def allow_shared_devices(environment: MutableMapping[str, str], version: int) -> str:
    """Have NCCL allow several ranks of a communicator on one device; return why it does not, if so.

    Args:
        environment: of this rank, before it makes a communicator.
        version: of NCCL.
    """
    major, minor = version // 10000, version // 100 % 100
    needed = ".".join(map(str, _FIRST_VERSION))
    if (major, minor) < _FIRST_VERSION:
        return (
            f"two ranks of a group on one GPU need NCCL {needed}, and this is {major}.{minor}. Load a newer "
            "one (LD_PRELOAD)."
        )
    if environment.setdefault(_SHARED_DEVICE, "1") != "1":
        return (
            f"two ranks of a group on one GPU need {_SHARED_DEVICE}=1, and it is "
            f"{environment[_SHARED_DEVICE]}. Remove it."
        )
    return ""


def with_ranks_of(topology: Topology, host: str, lost: str) -> Topology:
    """Return the places of the ranks once a node also has those of a lost one."""
    domain = topology.lowest_on_node(host).domain
    return Topology(
        ranks=tuple(
            replace(each, node=host, domain=domain) if each.node == lost else each
            for each in topology.ranks
        )
    )


def why_no_room(site: Site) -> str:
    """Return why this node has no memory for the ranks of another one; empty if it has."""
    nodes, memory = site.topology.nodes, site.config.memory
    lost = nodes[(nodes.index(site.node) + 1) % len(nodes)]
    crowded = with_ranks_of(site.topology, site.node, lost)
    if (factor := memory.num_replicas) is None:
        factor = default_replication_factor(len(nodes) - 1)
    try:
        peers = place_replicas(crowded, factor)
    except PlanError as error:
        return f"{flag_of('replication_factor')}={factor}: {error}. Lower it."
    regions = num_regions(persists=site.config.storage.persists)
    replica_regions = regions_at_peers(memory, factor)
    kept = plan_node_memory(crowded, peers, regions, replica_regions)[site.node]
    processes = private_bytes([os.getpid()]) * len(site.topology.on_node(lost))
    limits = free_bytes(memory.memory_dir, measure(site.node_dir)[0])
    if (limit := memory.host_memory_limit_bytes) is not None:
        limits[_LIMIT] = limit, "Raise it."
    for what, (free, remedy) in limits.items():
        needed = kept + processes * (what not in (memory.memory_dir, _LIMIT))
        if needed > free:
            return (
                f"node {site.node} would take {size_text(needed)} with the ranks of another one, and has "
                f"{size_text(free)} ({what}). {remedy}"
            )
    return ""


def why_no_device() -> str:
    """Return why the device of this rank has no memory for another one, after an iteration of this one."""
    free, total = torch.cuda.mem_get_info()
    used = max(total - free, torch.cuda.max_memory_reserved())
    if used <= total - used:
        return ""
    return (
        f"a rank takes {size_text(used)} of its GPU, which has {size_text(total)}. Use smaller "
        "micro-batches, or more ranks."
    )
