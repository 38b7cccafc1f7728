"""Peers of the ranks of a start: who keeps replicas of whom, or parity with whom. Rank 0 says it.

planning/placement.py and planning/parity.py choose.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.errors import ConfigError, PlanError
from moe_ft.planning.parity import ParityGroup, place_parity
from moe_ft.planning.placement import (
    default_replication_factor,
    describe_domains,
    describe_parity,
    place_replicas,
)
from moe_ft.recovery.facts import JobFacts
from moe_ft.saying import say, warn
from moe_ft.topology import Topology


class Placed(TypedDict):
    """Peers of all ranks; see `Met`."""

    peers: Sequence[tuple[int, ...]]
    groups: Sequence[ParityGroup]


def place_peers(config: MoeFtConfig, facts: JobFacts, topology: Topology) -> Placed:
    """Choose the peers of all ranks.

    Raises:
        ConfigError: if there are too few nodes, or nodes that parity cannot be kept over.
    """
    groups = _groups(config, facts, topology)
    if not groups:
        return Placed(peers=_peers(config, facts, topology), groups=())
    return Placed(peers=[each.others(rank) for rank, each in enumerate(groups)], groups=groups)


def _peers(config: MoeFtConfig, facts: JobFacts, topology: Topology) -> list[tuple[int, ...]]:
    """Return ``[rank]`` the ranks that keep its replicas."""
    factor = config.memory.num_replicas
    num_others = len(topology.nodes) - 1
    if factor is None:
        factor = default_replication_factor(len(topology.nodes))
        for line in _without_replicas(config) if factor == 0 and facts.rank == 0 else ():
            warn(f"{flag_of('replication_factor')}=auto is 0 on one node: {line}")
    elif config.elastic.elastic and factor > num_others:
        if facts.rank == 0:
            warn(
                f"--moe-ft-replication-factor={factor}: {num_others} as long as there are no more nodes"
            )
        factor = num_others
    try:
        peers = place_replicas(topology, factor)
        if topology.domains and facts.rank == 0:
            say(describe_domains(topology, peers, config.memory))
        return peers
    except PlanError as error:
        raise ConfigError(
            f"--moe-ft-replication-factor={factor}: {error}. Lower it, or start more nodes."
        ) from error


def _groups(config: MoeFtConfig, facts: JobFacts, topology: Topology) -> tuple[ParityGroup, ...]:
    """Return ``[rank]`` the groups that keep parity; none where peers keep replicas."""
    size = config.memory.parity_nodes
    if size is None:
        return ()
    try:
        groups = place_parity(topology, size)
    except PlanError as error:
        raise ConfigError(
            f"{flag_of('replicas')}={config.memory.replicas}: {error}. Use nodes with as many ranks each, or "
            f"give {flag_of('replicas')} copies."
        ) from error
    if facts.rank == 0:
        say(describe_parity(topology, groups))
    return groups


def _without_replicas(config: MoeFtConfig) -> list[str]:
    """Return lines on what the user has given for replicas, which there are none of."""
    memory = replace(config.memory, replication_factor="0")
    return replace(config, memory=memory).warnings(None)
