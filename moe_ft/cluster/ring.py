"""Ring of nodes: who watches whom, and which silent nodes are lost because those who watch them miss them.

Each node watches the next ones on the ring by the answers of their kernels (observer.py), so it costs a
node the same however many there are. The ring has the order of the nodes' ids. These are drawn: nodes of
one rack are seldom neighbors, and the loss of a rack leaves observers to most of its nodes.

A node is lost when two of its observers miss it while its own beats are missing. The word of an observer
counts if it was heard just now: one that is cut off misses all others. Those that were not heard still
count as being there, so the node of the store condemns nobody alone when it is cut off itself.

With one observer, in a job of two nodes, nobody can tell whose link is down. Its word then means as much as
that of ranks that have lost connections: the beats must be missing for longer.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

from moe_ft.cluster.membership import Node, Quiet

NUM_WATCHED = 3
_NUM_WITNESSES = 2


def watched_by(ids: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return the nodes that each node watches, by id."""
    order = sorted(ids)
    num, twice = min(NUM_WATCHED, len(order) - 1), order * 2
    return {id: tuple(twice[place : place + num]) for place, id in enumerate(order, 1)}


def missed(nodes: Mapping[str, Node], quiet: Quiet) -> tuple[list[str], str]:
    """Return the nodes that are lost by the word of others, and why."""
    observers = defaultdict[str, list[str]](list)
    for each, ids in watched_by(nodes).items():
        for id in ids:
            observers[id].append(each)
    found, names, longest_s = list[str](), set[str](), 0.0
    for id, silent_s in quiet.silent_s.items():
        heard = [nodes[each] for each in observers[id] if each in quiet.heard]
        witnesses = [each.name for each in heard if id in each.missed]
        may_be_one = len(observers[id]) == 1 and silent_s > quiet.suspected_s
        if len(witnesses) >= (1 if may_be_one else _NUM_WITNESSES):
            found.append(id)
            names.update(witnesses)
            longest_s = max(longest_s, silent_s)
    seen_from = ", ".join(sorted(names))
    return found, f"silent for {longest_s:.1f} s, agent and kernel, seen from {seen_from}"
