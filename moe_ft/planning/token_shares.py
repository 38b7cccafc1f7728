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


def shares(tokens: Numbers, replicas: Numbers) -> Numbers:
    """Return how many tokens for each expert each rank sends to each other.

    Every rank gets tokens of an expert in proportion to its replicas: its own first, then those that others
    have left, in order of the ranks.

    Args:
        tokens: ``[source, expert]`` that a rank has for an expert.
        replicas: ``[expert, rank]`` slots of a rank that have the expert.

    Returns:
        ``[expert, source, destination]``. The sum over destinations is `tokens`; that over sources is less
        than one token from the exact share.

    Raises:
        PlanError: if an expert has no replica.

    Source: Lazarus, algorithm 1, with the sum of line 10 over all other receivers, and in integers.
    """
    if (lost := np.flatnonzero(replicas.sum(axis=1) == 0)).size:
        raise PlanError(f"experts {', '.join(map(str, lost))} have no replica")
    wanted = tokens.T
    capacity = divide(wanted.sum(axis=1), replicas)
    own = np.minimum(wanted, capacity)
    # What is left of senders and receivers lies on one line: where two pieces overlap, tokens go.
    sent, free = wanted - own, capacity - own
    sent_to, free_to = sent.cumsum(axis=1)[:, :, None], free.cumsum(axis=1)[:, None]
    sent_from, free_from = sent_to - sent[:, :, None], free_to - free[:, None]
    overlap = np.minimum(sent_to, free_to) - np.maximum(sent_from, free_from)
    found: Numbers = np.maximum(overlap, 0)
    index = np.arange(len(tokens))
    found[:, index, index] += own
    return found
