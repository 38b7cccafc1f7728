"""Cost of faults to a run with partial snapshots whose routing is as skewed as in a real training run.

    python -m benchmarks.partial_routing TRACE.npz [--seeds N] [--output FILE.md]
    python -m benchmarks.partial_routing --quick

The trace is the routing trace of SmartMoE (github thu-pacman/SmartMoE-AE, moe_trace) as a NumPy archive, read
by benchmarks/routing_trace.py. The routing is played back: effects of lossy recoveries on training are not
modeled, and every recovery succeeds. The runs are simulated by benchmarks/partial_runs.py.
"""

import argparse
import itertools
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.output import markdown_table, parse_options, show
from benchmarks.partial_runs import (
    EP_SIZE,
    MEANS,
    NUM_NODES,
    PERSIST_INTERVAL,
    PLT_LIMIT,
    Mask,
    Percent,
    Runs,
    Setting,
    check_against_planning,
)
from benchmarks.routing_trace import (
    Faults,
    draw_faults,
    draw_routing,
    find_hot,
    load_routing,
    skew_table,
    spread,
    uniform_routing,
)
from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.planning.lost_tokens import expected_plt

INTERVALS = (1, 10)
KS = (1, 2, 4, 8, 16, 32)

Results = dict[tuple[int, int], Percent]  # by mean between faults and K, [seed]


class Comparison:
    """Results of all settings of one kind of fault and one interval, a row per mean and k."""

    def __init__(self, base: Setting, faults: Faults, routed: Counts) -> None:
        self.rows: dict[tuple[int, int], list[str]] = {}
        self.sequential: Results = {}
        self.load_aware: Results = {}
        self.base = base
        self.kind = "Node faults" if base.loses_node else "Process faults"
        is_hot = find_hot(routed)
        for k in KS:
            setting = replace(base, k=k)
            sequential = Runs(setting, faults, routed).finish()
            load_aware = Runs(replace(setting, is_load_aware=True), faults, routed).finish()
            uniform = Runs(setting, faults, uniform_routing(routed)).finish()
            self._add(sequential, load_aware, uniform, is_hot)

    def _add(self, sequential: Runs, load_aware: Runs, uniform: Runs, is_hot: Mask) -> None:
        first, second, third = (each.plt_percent() for each in (sequential, load_aware, uniform))
        repeated = [each.repeated_percent() for each in (sequential, load_aware)]
        first_hot, second_hot = (each.share_percent(is_hot) for each in (sequential, load_aware))
        num_faults = sequential.by_mean(sequential.num_faults)
        k, num_experts = sequential.setting.k, sequential.experts.num_experts
        for row, mean in enumerate(MEANS):
            key = (mean, k)
            self.sequential[key], self.load_aware[key] = first[row], second[row]
            # Seeds that lose nothing either way have no ratio.
            has_ratio = first[row] > 0
            ratio = second[row][has_ratio] / first[row][has_ratio]
            self.rows[key] = [
                str(mean),
                str(k),
                f"{100 * (1 - k / num_experts):.0f}",
                f"{np.median(num_faults[row]):.0f}",
                spread(first[row]),
                spread(second[row]),
                spread(ratio) if len(ratio) else "-",
                f"{first_hot[row]:.0f}, {second_hot[row]:.0f}" if len(ratio) else "-",
                spread(third[row]),
                f"{float(np.median(num_faults[row])) * self._closed_form(sequential):.2f}",
            ]
            if self.base.loses_node:
                self.rows[key].append(", ".join(f"{each[row]:.1f}" for each in repeated))

    def _closed_form(self, runs: Runs) -> float:
        """Return the percentage that one fault loses; of a node fault only what storage loses."""
        per_run = (runs.tokens_per_iteration, runs.num_iterations * runs.tokens_per_iteration)
        k, interval = runs.setting.k, self.base.interval
        if not self.base.loses_node:
            return 100 * expected_plt(runs.experts.num_experts, k, interval, *per_run)
        interval *= PERSIST_INTERVAL
        return 100 * expected_plt(runs.experts.num_experts, k, interval, *per_run) / NUM_NODES

    def table(self) -> str:
        """Return everything."""
        headers = ["mean", "K", "bytes saved %", "faults", "sequential", "load-aware", "ratio"]
        headers += ["hot share %", "uniform", "closed form"]
        headers += ["repeated %"] * self.base.loses_node
        rows = [self.rows[mean, k] for mean, k in itertools.product(MEANS, KS)]
        return markdown_table(rows, headers)

    def least_k(self) -> list[list[str]]:
        """Return for each mean the least K that stays within `PLT_LIMIT`."""
        results = (self.sequential, self.load_aware)
        rows = []
        for mean in MEANS:
            cells = [_least_k(result, mean, np.median) for result in results]
            cells += [_least_k(result, mean, np.max) for result in results]
            rows.append([self.kind.lower(), str(self.base.interval), str(mean), *cells])
        return rows


def _least_k(result: Results, mean: int, over_seeds: Callable[[Percent], np.floating]) -> str:
    # The PLT need not fall with every K: the least K from which on it stays within the limit.
    least = "none"
    for k in reversed(KS):
        if over_seeds(result[mean, k]) > 100 * PLT_LIMIT:
            break
        least = str(k)
    return least


def dynamic_table(faults: Faults, routed: Counts) -> str:
    """Return what Dynamic-K does from K=1 on, with process faults."""
    rows = []
    choices = itertools.product(INTERVALS, ("each k", "all k"), (False, True))
    for interval, limit_of, is_load_aware in choices:
        setting = Setting(k=1, interval=interval, limit_of=limit_of, is_load_aware=is_load_aware)
        runs = Runs(setting, faults, routed).finish()
        copied = runs.by_mean(runs.num_copied / runs.num_snapshots / routed.shape[2])
        for row, mean in enumerate(MEANS):
            selection = "load-aware" if is_load_aware else "sequential"
            final_k, percent = runs.by_mean(runs.k)[row], runs.plt_percent()[row]
            cells = [str(interval), limit_of, selection, str(mean), spread(percent)]
            rows.append([*cells, spread(final_k, 0), spread(100 * (1 - copied[row]), 0)])
    headers = ["interval", "limit of", "selection", "mean", "PLT %", "K at the end"]
    return markdown_table(rows, [*headers, "bytes saved %"])


def persist_table(faults: Faults, routed: Counts) -> str:
    """Return what K of persists does to the PLT of node faults, at one K of snapshots."""
    rows = []
    for interval, k_persist in itertools.product(INTERVALS, (1, 2, 4, 8)):
        base = Setting(k=8, interval=interval, k_persist=k_persist, loses_node=True)
        both = (base, replace(base, is_load_aware=True))
        results = [Runs(each, faults, routed).finish().plt_percent() for each in both]
        for row, mean in enumerate(MEANS):
            cells = [str(interval), str(k_persist), str(mean)]
            rows.append([*cells, *(spread(each[row]) for each in results)])
    headers = ["interval", "k_persist", "mean", "sequential", "load-aware"]
    return markdown_table(rows, headers)


def compare(faults: Faults, routed: Counts) -> Sequence[str]:
    """Return the tables of both kinds of faults, and the least K."""
    bases = (Setting(k=1, interval=1), Setting(k=1, interval=1, loses_node=True))
    parts, least = [], []
    for base, interval in itertools.product(bases, INTERVALS):
        comparison = Comparison(replace(base, interval=interval), faults, routed)
        parts += [f"{comparison.kind}, snapshot interval {interval}: PLT %", comparison.table()]
        least += comparison.least_k()
    headers = ["fault", "interval", "mean", "sequential, median", "load-aware, median"]
    headers += ["sequential, worst seed", "load-aware, worst seed"]
    title = f"Least K with a PLT of at most {100 * PLT_LIMIT:.2f} %"
    return [*parts, title, markdown_table(least, headers)]


def main() -> None:
    """Simulate and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE.npz")
    parser.add_argument("--seeds", type=int, default=24, help="runs for each mean between faults")
    options = parse_options(parser, seeds=1)
    if not (options.trace or options.quick):
        parser.error("TRACE.npz is missing: only --quick makes up its own routing")
    routed = load_routing(options.trace) if options.trace else draw_routing()
    num_layers, num_experts = routed.shape[1:]
    check_against_planning(
        ExpertLayout(num_layers=num_layers, num_experts=num_experts, ep_size=EP_SIZE)
    )
    faults = draw_faults(options.seeds, MEANS, NUM_NODES)
    conditions = (
        f"{len(routed) - 1} iterations, {num_layers} layers of {num_experts} experts on {EP_SIZE} "
        f"expert-parallel ranks, {NUM_NODES} nodes; a persist every {PERSIST_INTERVAL} snapshots; "
        f"median (range) of {options.seeds} seeds. "
        f"Python {platform.python_version()}, numpy {np.__version__}."
    )
    parts = [conditions, "Skewness S of the routing, over the layers", skew_table(routed)]
    parts += compare(faults, routed)
    parts += ["Node faults, K = 8 in snapshots and less in persists: PLT %"]
    parts += [persist_table(faults, routed)]
    parts += [f"Dynamic-K from K = 1, limit {100 * PLT_LIMIT:.2f} %, process faults"]
    show([*parts, dynamic_table(faults, routed)], options.output)


if __name__ == "__main__":
    main()
