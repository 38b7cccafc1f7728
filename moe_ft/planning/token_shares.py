"""Shares of the replicas of experts in the tokens of a layer: which rank sends how many tokens where."""

import numpy as np
import numpy.typing as npt

from moe_ft.errors import PlanError

Numbers = npt.NDArray[np.int64]


def divide(totals: Numbers, weights: Numbers) -> Numbers:
    """Divide integers in proportion to weights, by largest remainder; ties go to the first.

    Args:
        totals: ``[row]`` to be divided.
        weights: ``[row, column]`` whose sum of a row is at least 1.

    Returns:
        ``[row, column]`` less than 1 from the exact share each; the sum of a row is its total.
    """
    sums = weights.sum(axis=1, keepdims=True)
    found, rest = np.divmod(totals[:, None] * weights, sums)
    missing = totals - found.sum(axis=1)
    order = np.argsort(-rest, axis=1, kind="stable")
    extra = (np.arange(weights.shape[1]) < missing[:, None]).astype(np.int64)
    np.put_along_axis(found, order, np.take_along_axis(found, order, axis=1) + extra, axis=1)
    return found


def share_of(tokens: Numbers, replicas: Numbers, source: int) -> tuple[Numbers, Numbers]:
    """Return how many tokens for each expert one rank sends to each other, and what all ranks get.

    Every rank gets tokens of an expert in proportion to its replicas: its own first, then those that others
    have left, in order of the ranks.

    Args:
        tokens: ``[source, expert]`` that a rank has for an expert.
        replicas: ``[expert, rank]`` slots of a rank that have the expert.

    Returns:
        ``[expert, destination]``, whose sum over destinations are the rank's tokens; ``[rank]`` tokens that a
        rank gets, of each expert less than one from the exact share.

    Raises:
        PlanError: if an expert has no replica.

    Source: Lazarus, algorithm 1, with the sum of line 10 over all other receivers, and in integers.
    """
    own, sent, free = _left(tokens, replicas)
    # Lay the tokens left to send and the room left on one line: where two pieces overlap, tokens go.
    end, free_to = sent[:, : source + 1].sum(axis=1, keepdims=True), free.cumsum(axis=1)
    first = np.maximum(end - sent[:, source, None], free_to - free)
    found: Numbers = np.maximum(np.minimum(end, free_to) - first, 0)
    found[:, source] += own[:, source]
    return found, (own + free).sum(axis=0)


def _left(tokens: Numbers, replicas: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Return ``[expert, rank]`` tokens that stay, that are left to send, and that there is room for."""
    if (lost := np.flatnonzero(replicas.sum(axis=1) == 0)).size:
        raise PlanError(f"experts {', '.join(map(str, lost))} have no replica")
    wanted = tokens.T
    capacity = divide(wanted.sum(axis=1), replicas)
    own = np.minimum(wanted, capacity)
    return own, wanted - own, capacity - own
