"""Tokens that a failure loses at equal bytes: `partial` and `selective` on the routing of a real run.

    python -m benchmarks.papers.routing TRACE.npz [--iterations N] [--output FILE.md]
    python -m benchmarks.papers.routing --quick

The trace is the routing trace of SmartMoE (github thu-pacman/SmartMoE-AE, moe_trace) as a NumPy archive,
played back from its beginning and from its middle on: nothing is trained. Each expert-parallel rank saves
equally many experts in every iteration: in turn or where most tokens are not saved, which is what `partial`
does, or by the rules of strategies/selective/selection.py. Everything is saved at the beginning.
"followed" is what peers have with --moe-ft-replicate gradients: fp32 gradients of the most popular experts in
every iteration, at a third of the bytes of their state, and the others by tokens x age with the rest.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.output import conditions, markdown_table, parse_options, show
from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.strategies.partial.selection import select_load_aware
from moe_ft.strategies.rotating import ExpertVersions, PlannedRun, Selection
from moe_ft.strategies.selective.selection import (
    AGE,
    PAPER,
    Need,
    RankLoads,
    SelectiveConfig,
    as_selection,
    select,
)
from moe_ft.strategies.selective.strategy import SelectiveStrategy

EP_SIZE = 8
PERCENT = (3.125, 6.25, 12.5, 25.0, 37.5, 50.0)
_SIZE = 12  # of an expert, so that its gradient is whole
_WARM_UP = 50  # iterations that are left out of means

Choose = Callable[[Need, int], Selection]  # from the number of the snapshot


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one rule and budget.

    Attributes:
        lost: mean over the run of the tokens that a failure loses, in those of an iteration.
        unsaved: share of the tokens of an iteration whose expert is not saved at its end.
        oldest: the most iterations that an expert was not saved for.
    """

    lost: float
    unsaved: float
    oldest: int


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


def play(routed: Counts, choose: Choose) -> Outcome:
    """Play a trace back.

    Args:
        routed: ``[iteration, layer, expert]`` tokens up to each iteration.
    """
    saved = ExpertVersions.of(routed[0], 0)
    lost: list[float] = []
    unsaved: list[float] = []
    oldest = 0
    for iteration in range(1, len(routed)):
        now = ExpertVersions.of(routed[iteration], iteration)
        selection = choose(Need.between(saved, now), iteration - 1)
        saved = saved.replaced(selection, now)
        if iteration <= min(_WARM_UP, len(routed) // 2):
            continue
        fresh = routed[iteration] - routed[iteration - 1]
        lost.append(float((routed[iteration] - saved.trained).sum() / fresh.sum()))
        unsaved.append(float(fresh[saved.iterations < iteration].sum() / fresh.sum()))
        oldest = max(oldest, int((iteration - saved.iterations).max()))
    return Outcome(lost=float(np.mean(lost)), unsaved=float(np.mean(unsaved)), oldest=oldest)


def following(experts: ExpertLayout, loads: RankLoads, budget_bytes: int, routed: Counts) -> Choose:
    """Return what peers get of a trace if they follow experts; memory gets everything."""
    names = [f"layer.{layer}" for layer in range(experts.num_layers)]
    run = PlannedRun(interval=1, planned_tokens=1, tokens_per_iteration=1)
    options = SelectiveConfig(local_budget=f"{1 << 40}", remote_budget=f"{budget_bytes}")
    strategy = SelectiveStrategy(
        *((), (), names, experts, options, run, loads, 0), has_peers=True, are_followed=True
    )
    everything = as_selection(range(experts.num_layers * experts.num_experts), experts)

    def choose(need: Need, turn: int) -> Selection:
        strategy.add_tokens(routed[turn + 1] - routed[turn])
        window = strategy.plan_window(turn + 1)
        strategy.note_begun(window)
        strategy.note_complete(window, turn + 1)
        strategy.note_sent(window)
        found: Selection | None = window.memo.remote
        return everything if found is None else found

    return choose


def rules(experts: ExpertLayout, count: int, routed: Counts) -> dict[str, Choose]:
    """Return each rule with which every expert-parallel rank saves so many experts."""
    number = np.arange(experts.num_layers * experts.num_experts)
    owners = number % experts.num_experts // experts.num_local
    costs: npt.NDArray[np.int64] = _SIZE * (owners == np.arange(experts.ep_size)[:, None])
    loads = RankLoads([0] * experts.ep_size, costs)
    rooms = loads.rooms(_SIZE * count)
    limit = SelectiveConfig().age_limit

    def in_turn(need: Need, turn: int) -> Selection:
        chosen: list[int] = []
        for rank in range(experts.ep_size):
            own = np.flatnonzero(costs[rank])
            chosen += own[(turn * count + np.arange(count)) % len(own)].tolist()
        return as_selection(chosen, experts)

    def load_aware(need: Need, turn: int) -> Selection:
        k = max(1, count * experts.ep_size // experts.num_layers)
        cursors = [turn * k % experts.num_experts] * experts.num_layers
        return select_load_aware(experts, cursors, need.tokens, k)

    def by(rule: str, age_limit: int) -> Choose:
        return lambda need, turn: select(
            need, loads, rooms, experts, rule, age_limit=age_limit, turn=turn
        )

    return {
        "round robin": in_turn,
        "load-aware": load_aware,
        "Algorithm 1": by(PAPER, limit),
        "tokens x age": by(AGE, limit),
        "tokens x age, no limit": by(AGE, 10**9),
        "followed": following(experts, loads, _SIZE * count, routed),
    }


def compare(routed: Counts) -> str:
    """Return the table of all rules and budgets."""
    num_layers, num_experts = routed.shape[1:]
    experts = ExpertLayout(num_layers=num_layers, num_experts=num_experts, ep_size=EP_SIZE)
    per_rank = num_layers * experts.num_local
    rows = []
    for percent in PERCENT:
        count = max(1, round(per_rank * percent / 100))
        first: Outcome | None = None
        for name, choose in rules(experts, count, routed).items():
            found = play(routed, choose)
            first = first or found
            rows.append(
                [
                    f"{100 * count / per_rank:.1f}",
                    name,
                    f"{found.lost:.3f}",
                    f"{100 * (found.lost / first.lost - 1):+.0f} %",
                    f"{found.unsaved:.3f}",
                    str(found.oldest),
                ]
            )
    headers = ["% of experts", "rule", "lost, iterations", "against round robin"]
    return markdown_table(rows, [*headers, "not saved", "oldest"])


def main() -> None:
    """Play the trace back and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE.npz")
    parser.add_argument("--iterations", type=int, default=1000, help="of each half that are played")
    options = parse_options(parser, iterations=60)
    if not (options.trace or options.quick):
        parser.error("TRACE.npz is missing: only --quick makes up its own routing")
    routed = load_routing(options.trace) if options.trace else draw_routing()
    length = min(options.iterations, len(routed) // 2)
    middle = len(routed) // 2
    num_layers, num_experts = routed.shape[1:]
    about = conditions(
        f"{num_layers} layers of {num_experts} experts on {EP_SIZE} expert-parallel ranks, a snapshot in "
        f"every iteration, {length} iterations of each half. Lost: mean over the run of what a failure "
        "loses, in tokens of an iteration. Not saved: share of an iteration's tokens whose expert is not "
        f"in its snapshot. numpy {np.__version__}."
    )
    parts = [about, "First half", compare(routed[: length + 1])]
    parts += ["Second half", compare(routed[middle : middle + length + 1])]
    show(parts, options.output)


if __name__ == "__main__":
    main()
