"""The routing of a real training run, and the faults that a simulated run meets.

benchmarks/partial_routing.py measures the cost of these faults.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.output import markdown_table
from moe_ft.planning.experts import Counts

NUM_HOT = 4  # experts of a layer that count as the most loaded
_MOST_FAULTS = 4096
_SKEW_AT = (1, 11, 51, 101, 501, 1001, 1501, 2001, 2501)


def load_routing(path: Path) -> Counts:
    """Return ``[iteration, layer, expert]`` the tokens routed up to each iteration, from 0.

    Args:
        path: NumPy archive of ``iterations`` [sample] from 1 and ``tokens`` [sample, layer, expert], the
            tokens routed to each expert in that iteration. Those in between are interpolated linearly.
    """
    with np.load(path) as file:
        iterations, tokens = file["iterations"], file["tokens"].astype(np.float64)
    wanted = np.arange(1, iterations[-1] + 1)
    after = np.searchsorted(iterations, wanted).clip(1, len(iterations) - 1)
    before = after - 1
    weight = (wanted - iterations[before]) / (iterations[after] - iterations[before])
    weight = weight[:, None, None].clip(0.0, 1.0)
    routed = np.cumsum(tokens[before] * (1 - weight) + tokens[after] * weight, axis=0)
    return np.rint(np.concatenate([np.zeros_like(routed[:1]), routed])).astype(np.int64)


def draw_routing() -> Counts:
    """Return the routing of a short run that never was, like `load_routing`."""
    tokens = np.random.default_rng(0).integers(1, 1000, (64, 2, 32))
    return np.cumsum(np.concatenate([np.zeros_like(tokens[:1]), tokens]), axis=0)


def uniform_routing(routed: Counts) -> Counts:
    """Return the same tokens routed equally to all experts."""
    mean = np.rint(routed.mean(axis=2, keepdims=True)).astype(np.int64)
    return np.broadcast_to(mean, routed.shape)


def find_hot(routed: Counts) -> npt.NDArray[np.bool_]:
    """Return ``[layer, expert]`` whether it is among the `NUM_HOT` most loaded of its layer."""
    total = routed[-1]
    return np.argsort(np.argsort(-total, axis=1, kind="stable"), axis=1) < NUM_HOT


def skewness(tokens: Counts) -> npt.NDArray[np.float64]:
    """Return ``[layer]`` (HHI - 1/E) / (1 - 1/E): 0 if uniform, 1 if one expert gets everything."""
    shares = tokens / tokens.sum(axis=1, keepdims=True)
    even = 1 / tokens.shape[1]
    hhi: npt.NDArray[np.float64] = (shares**2).sum(axis=1)
    skew: npt.NDArray[np.float64] = (hhi - even) / (1 - even)
    return skew


def spread(values: npt.NDArray[np.float64], digits: int = 2) -> str:
    """Return median and range."""
    low, high = values.min(), values.max()
    return f"{np.median(values):.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def skew_table(routed: Counts) -> str:
    """Return how skewed single iterations and the whole run are, over the layers."""
    is_hot = find_hot(routed)
    named = {f"iteration {n}": routed[n] - routed[n - 1] for n in _SKEW_AT if n < len(routed)}
    named["all iterations together"] = routed[-1]
    rows = []
    for name, tokens in named.items():
        shares = 100 * (tokens * is_hot).sum(axis=1) / tokens.sum(axis=1)
        rows.append([name, spread(skewness(tokens), 3), spread(shares, 1)])
    headers = ["routing", "S", f"% of tokens to the {NUM_HOT} experts"]
    return markdown_table(rows, headers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Times of faults, in executed iterations, and the node that each takes: ``[run, fault]``."""

    times: npt.NDArray[np.float64]
    nodes: Counts


def draw_faults(num_seeds: int, means: Sequence[int], num_nodes: int) -> Faults:
    """Return the faults of the runs: all seeds with each of the means, in iterations, between faults."""
    generators = [np.random.default_rng(seed) for seed in range(num_seeds)]
    gaps = np.array([each.exponential(size=_MOST_FAULTS) for each in generators])
    nodes = np.array([each.integers(num_nodes, size=_MOST_FAULTS) for each in generators])
    times = np.cumsum(gaps, axis=1)
    return Faults(
        times=np.concatenate([times * mean for mean in means]),
        nodes=np.concatenate([nodes] * len(means)),
    )
