"""Cost to the training thread of counting tokens per expert and of choosing experts.

    python -m benchmarks.router_load [--layers N] [--experts N] [--tokens N] [--quick] [--output FILE.md]

A stage of a large model, by default 58 MoE layers of 256 experts (top-8) and 4096 tokens of a micro-batch on
each rank, on the CPU. The sum over the stage is measured on two ranks over gloo on one host, apart from the
rest: in training it runs alongside the optimizer step.
"""

import argparse
import json
import os
import platform
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.output import parse_options, show
from benchmarks.planning import Rows, milliseconds, table
from moe_ft.engine.agreement import StageSum
from moe_ft.planning.experts import ExpertLayout
from moe_ft.state.router_load import RouterLoad
from moe_ft.state.router_load import table as table_of_counts
from moe_ft.strategies.partial.config import PartialConfig
from moe_ft.strategies.partial.selection import RankShare
from moe_ft.strategies.partial.strategy import PartialStrategy
from moe_ft.strategies.rotating import PlannedRun
from moe_ft.units import UnitId, UnitKind
from tests.harness import run_ranks

EP_SIZE, TOP_K = 32, 8
_REDUCTIONS = 50
_TIMEOUT_S = 60.0


def measure_counting(num_layers: int, num_experts: int, num_tokens: int, count: int) -> Rows:
    """Time the hook on the routers, for all layers of one micro-batch, and the table of an iteration."""
    load = RouterLoad()
    config = SimpleNamespace(moe_pad_expert_input_to_capacity=False)
    routers: list[Any] = [SimpleNamespace(config=config, number=n) for n in range(num_layers)]
    load._names = {router: f"layer.{router.number}" for router in map(_hashable, routers)}
    routers = list(load._names)
    probabilities = torch.rand(num_tokens, num_experts)
    routing_map = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    routing_map.scatter_(1, probabilities.topk(TOP_K, dim=1).indices, True)
    layers = [f"layer.{number}" for number in range(num_layers)]

    def hook_all() -> None:
        for router in routers:
            load._count(router, None, (probabilities, routing_map))

    rows: Rows = {
        f"hooks of {num_layers} routers, a micro-batch of {num_tokens} tokens": [],
        "table of the iteration": [],
    }
    hooks, tables = rows.values()
    for _ in range(count):
        load.begin()
        hooks.append(milliseconds(hook_all))
        tables.append(milliseconds(lambda: table_of_counts(load.counts(), layers, num_experts)))
    return rows


def _hashable(router: Any) -> Any:
    """Return a stand-in for a router that can be a key."""
    made = torch.nn.Module()
    made.config, made.number = router.config, router.number
    return made


def measure_selection(num_layers: int, num_experts: int, count: int) -> Rows:
    """Time what the strategy does in an iteration with a snapshot."""
    experts = ExpertLayout(num_layers=num_layers, num_experts=num_experts, ep_size=EP_SIZE)
    units = [
        UnitId(kind=UnitKind.EXPERT, layer=layer, expert=expert)
        for layer in range(num_layers)
        for expert in range(experts.num_local)
    ]
    names = [f"layer.{layer}" for layer in range(num_layers)]
    counts = np.random.default_rng(0).integers(0, 1000, (num_layers, num_experts))
    rows: Rows = {}
    for is_load_aware in (False, True):
        kind = "load-aware" if is_load_aware else "sequential"
        options = PartialConfig(k_snapshot=str(num_experts // 16), selection=kind)
        run = PlannedRun(interval=1, planned_tokens=10**12, tokens_per_iteration=10**6)
        share = RankShare(always_bytes=10**9, unit_bytes=10**8)
        strategy = PartialStrategy([], units, names, experts, options, run, share)
        plans = rows.setdefault(f"plan of a snapshot, {kind}", [])
        rest = rows.setdefault(f"tokens of an iteration, plan and completion, {kind}", [])
        persists = rows.setdefault(f"plan of what goes to storage, {kind}", [])

        def advance(strategy: PartialStrategy, iteration: int) -> None:
            strategy.add_tokens(counts)
            strategy.note_complete(strategy.plan_window(iteration), iteration)

        for iteration in range(count):
            plans.append(milliseconds(partial(strategy.plan_window, iteration)))
            rest.append(milliseconds(partial(advance, strategy, iteration)))
            persists.append(milliseconds(strategy.plan_persist))
    return rows


def reduce_on_rank(path: str, num_layers: int, num_experts: int) -> None:
    """Time the sum over a stage of two ranks; rank 0 writes what it measured."""
    dist.init_process_group("gloo")
    stage = StageSum(_TIMEOUT_S)
    stage.start([0, 0], dist.get_rank())
    counts = torch.ones(num_layers, num_experts, dtype=torch.int64)
    times = []
    for _ in range(_REDUCTIONS):
        dist.barrier()

        def reduce() -> None:
            stage.begin(counts)
            stage.result()

        times.append(milliseconds(reduce))
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(times))
    dist.destroy_process_group()


def measure_sum(num_layers: int, num_experts: int) -> Rows:
    """Time the sum over a stage."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        run_ranks(
            reduce_on_rank, 2, str(path), num_layers, num_experts, log_dir=Path(folder)
        ).check()
        times = json.loads(path.read_text())
    num_bytes = num_layers * num_experts * 8
    return {f"sum over two ranks of {num_bytes / 1000:.0f} kB": times}


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repetitions", type=int, default=21)
    options = parse_options(parser, layers=2, experts=128, tokens=64, repetitions=1)
    torch.set_num_threads(1)
    count = options.repetitions
    sums = measure_sum(options.layers, options.experts)
    counting = measure_counting(options.layers, options.experts, options.tokens, count)
    selection = measure_selection(options.layers, options.experts, count)
    per_token = median(next(iter(counting.values()))) * 1e6 / options.tokens / options.layers
    conditions = (
        f"{os.cpu_count()} cores, one thread; median (range) of {count}. "
        f"Python {platform.python_version()}, torch {torch.__version__}."
    )
    parts = [conditions, "Counting", table(counting, has_goal=False)]
    parts += [f"That is {per_token:.0f} ns per token and layer."]
    parts += ["Sum over the stage, alongside the optimizer step", table(sums, has_goal=False)]
    parts += ["Selection, training thread", table(selection, has_goal=True)]
    show(parts, options.output)


if __name__ == "__main__":
    main()
