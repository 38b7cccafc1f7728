"""Tables of slots that are made to survive lost nodes, as Lazarus does; a rank is a node here.

The product makes tables that level the load (moe_ft/planning/slot_tables.py), and says how likely any table
survives (moe_ft/planning/replica_survival.py).
"""

from collections.abc import Sequence
from itertools import combinations

from moe_ft.errors import PlanError
from moe_ft.planning.replica_survival import lost_sets, ranks_of
from moe_ft.planning.slot_tables import Table, cut

_MOST_MENDED = 12  # ranks of tables that are searched, which looks at all sets many times


def spread(counts: Sequence[int], num_ranks: int) -> Table:
    """Return a table whose replicas go around the ranks, expert after expert."""
    dealt = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return tuple(tuple(dealt[rank::num_ranks]) for rank in range(num_ranks))


def compact(counts: Sequence[int], num_ranks: int) -> Table:
    """Return a table whose experts are on as few ranks as can be, one after the other."""
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    return cut(experts, len(experts) // num_ranks)


def overlapping(counts: Sequence[int], num_ranks: int) -> Table:
    """Return a table of maximum rank overlap.

    Groups of as many experts as a rank has slots, in order of their replicas, have ranks of their own: as
    many as the first of the group has replicas, and all of them have the whole group. What is left goes to
    the expert on the fewest ranks first, to a rank without it that has the most free slots.

    Args:
        counts: ``[expert]`` replicas, whose sum is that of the slots of all ranks.

    Source: Lazarus, theorem 1. It says nothing about the order of the rest, which changes nothing where the
    theorem holds.
    """
    slots = _slots_per_rank(counts, num_ranks)
    order = sorted(range(len(counts)), key=lambda expert: (counts[expert], expert))
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    left, first = list(counts), 0
    for start in range(0, len(order), slots):
        group = order[start : start + slots]
        end = min(first + counts[group[0]], num_ranks)
        for rank in range(first, end):
            rows[rank].extend(group)
        for expert in group:
            left[expert] -= end - first
        first = end
    while any(left):
        places = {expert: sum(expert in row for row in rows) for expert in order if left[expert]}
        expert = min(places, key=lambda each: (places[each], each))
        free = [rank for rank in range(num_ranks) if len(rows[rank]) < slots]
        rank = min(free, key=lambda each: (expert in rows[each], len(rows[each]), each))
        rows[rank].append(expert)
        left[expert] -= 1
    return tuple(tuple(sorted(row)) for row in rows)


def surviving(counts: Sequence[int], num_ranks: int) -> Table:
    """Return a table that survives dead ranks as likely as can be: one dead rank first, then two, and so on.

    That is maximum rank overlap, unless its last group has fewer ranks than its first expert has replicas:
    then it may not be the best, and slots are swapped as long as that helps, from it and from `spread`.
    Tables of more than 12 ranks are not searched: the better one of the two is taken, by the ranks of
    the expert that is on the fewest.

    Args:
        counts: ``[expert]`` replicas, whose sum is that of the slots of all ranks.
    """
    table = overlapping(counts, num_ranks)
    if not _is_truncated(counts, num_ranks):
        return table
    tables = (table, spread(counts, num_ranks))
    if num_ranks > _MOST_MENDED:
        return max(tables, key=lambda each: min(map(int.bit_count, ranks_of([each]))))
    return min((_climb(each) for each in tables), key=lambda each: lost_sets([each]))


def _slots_per_rank(counts: Sequence[int], num_ranks: int) -> int:
    slots, rest = divmod(sum(counts), num_ranks)
    if rest or min(counts) < 1 or len(counts) > sum(counts):
        raise PlanError(f"{num_ranks} ranks cannot have equally many of the replicas {counts}")
    return slots


def _is_truncated(counts: Sequence[int], num_ranks: int) -> bool:
    slots = _slots_per_rank(counts, num_ranks)
    return len(counts) > slots and sum(sorted(counts)[::slots]) > num_ranks


def _climb(table: Table) -> Table:
    """Swap slots of two ranks as long as fewer sets of dead ranks lose an expert."""
    rows = [list(row) for row in table]
    best, is_better = lost_sets([table]), True
    while is_better:
        is_better = False
        for one, two in combinations(rows, 2):
            for i in range(len(one)):
                for j in range(len(two)):
                    if one[i] == two[j]:
                        continue
                    one[i], two[j] = two[j], one[i]
                    if (found := lost_sets([rows])) < best:
                        best, is_better = found, True
                    else:
                        one[i], two[j] = two[j], one[i]
    return tuple(tuple(sorted(row)) for row in rows)
