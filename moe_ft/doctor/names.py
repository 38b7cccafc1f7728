"""Check of names: those of nodes are unique and stable, that of the job is given, ranks are as planned."""

import re
from collections.abc import Mapping, Sequence

from moe_ft.config.config import MemoryConfig
from moe_ft.doctor.facts import RankFacts
from moe_ft.doctor.rows import Result, Row, failed, join_nodes, passed, refused, warned
from moe_ft.errors import ConfigError

_NODES, _RANKS, _JOB = "node names", "ranks", "job name"
_CONTAINER = re.compile(r"[0-9a-f]{12}")  # a name that docker draws
_GIVE_NAMES = "Set MOE_FT_NODE_ID on each node to a name that it keeps."


def check_names(everyone: Sequence[RankFacts], environment: Mapping[str, str]) -> list[Row]:
    """Return rows on the names of nodes.

    Args:
        environment: of this process; others are taken to be in the same kind of container.
    """
    rows = [
        failed(_NODES, f"rank {facts.rank}", facts.node_problem, _GIVE_NAMES)
        for facts in everyone
        if facts.node_problem
    ]
    machines: dict[str, set[str]] = {}
    nodes: dict[str, list[str]] = {}
    for facts in everyone:
        machines.setdefault(facts.node, set()).add(facts.boot or facts.host)
        nodes.setdefault(facts.boot or facts.host, []).append(facts.node)
    for node, boots in machines.items():
        if len(boots) > 1:
            found = f"{len(boots)} machines have this name: their memory would count as one"
            rows.append(failed(_NODES, node, found, _GIVE_NAMES))
    for names in nodes.values():
        distinct = list(dict.fromkeys(names))
        if len(distinct) > 1:
            found = "are one machine: a failure takes all of them, replicas included"
            remedy = "Nothing for a test. Else give the ranks of a machine one name."
            rows.append(warned(_NODES, join_nodes(distinct), found, remedy))
    unstable = [facts for facts in everyone if _may_change(facts, environment)]
    if unstable:
        found = (
            "the host name of a container, which a restart may change: memory would not be found"
        )
        rows.append(warned(_NODES, unstable[0].node, found, _GIVE_NAMES))
    if rows:
        return rows
    names = list(machines)
    return [passed(_NODES, join_nodes(names), f"{len(names)}, from {everyone[0].node_source}")]


def _may_change(facts: RankFacts, environment: Mapping[str, str]) -> bool:
    is_drawn = _CONTAINER.fullmatch(facts.host) or "KUBERNETES_SERVICE_HOST" in environment
    return facts.node_source == "the host name" and bool(is_drawn)


def check_ranks(everyone: Sequence[RankFacts], planned: tuple[int, int] | None) -> list[Row]:
    """Return rows on the ranks of each node, and on the nodes that the command of training needs.

    Args:
        planned: ranks of the job and of a node, None if they are not known.
    """
    counts: dict[str, int] = {}
    for facts in everyone:
        counts[facts.node] = counts.get(facts.node, 0) + 1
    found = f"{len(everyone)} processes of doctor on {len(counts)} nodes"
    most = max(counts.values())
    fewer = [node for node, count in counts.items() if count < most]
    if fewer:
        found = f"{counts[fewer[0]]} processes; other nodes have {most}"
        return [warned(_RANKS, join_nodes(fewer), found, "Start as many processes on every node.")]
    if planned is not None and len(everyone) > 1:
        world_size, per_node = planned
        needed = -(-world_size // per_node)
        text = f"training starts {world_size} ranks, {per_node} on a node: {needed} nodes"
        if needed != len(counts):
            remedy = "Start doctor on the nodes of training, or correct the launcher's numbers."
            return [failed(_RANKS, "all nodes", f"{len(counts)} nodes; {text}", remedy)]
        found = f"{found}; {text}"
    return [passed(_RANKS, "all nodes", found)]


def check_job(memory: MemoryConfig, environment: Mapping[str, str], *, is_planned: bool) -> Row:
    """Return a row on the name by which a restart finds its memory.

    Args:
        is_planned: whether the command of training is known, so that its flags count.
    """
    try:
        return passed(_JOB, "this job", memory.resolve_job_id(environment))
    except ConfigError as error:
        return refused(_JOB, "this job", error, Result.FAIL if is_planned else Result.WARN)
