"""Ring of nodes: who watches whom, and which silent nodes are lost because those who watch them miss them.

Each node watches the next ones on the ring by the answers of their kernels (observer.py), so it costs a
node the same however many there are. The ring has the order of the nodes' ids. These are drawn: nodes of
one rack are seldom neighbors, and the loss of a rack leaves observers to most of its nodes.

A node is lost when two of its observers miss it while its own beats are missing. The word of an observer
counts if it was heard just now: one that is cut off misses all others. Those that were not heard still
count as being there, so the node of the store condemns nobody alone when it is cut off itself.

With one observer, in a job of two nodes, its word is enough if another machine keeps the store, which misses
the beats over a link of its own. On the node of the store both are missed over one link. Nobody could tell
whether that is down: then a verdict would take a node from the job that lives, or end it.
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


def missed(nodes: Mapping[str, Node], quiet: Quiet, store: int) -> tuple[list[str], str]:
    """Return the nodes that are lost by the word of others, and why; `store` is the number of its node."""
    observers = defaultdict[str, list[str]](list)
    for each, ids in watched_by(nodes).items():
        for id in ids:
            observers[id].append(each)
    found, names, longest_s = list[str](), set[str](), 0.0
    for id, silent_s in quiet.silent_s.items():
        heard = [nodes[each] for each in observers[id] if each in quiet.heard]
        witnesses = [each.name for each in heard if id in each.missed]
        is_only = len(observers[id]) == 1 and nodes[observers[id][0]].number != store
        if len(witnesses) >= (1 if is_only else _NUM_WITNESSES):
            found.append(id)
            names.update(witnesses)
            longest_s = max(longest_s, silent_s)
    seen_from = ", ".join(sorted(names))
    return found, f"silent for {longest_s:.1f} s, agent and kernel, seen from {seen_from}"
