"""Slots of experts in training, beside stock expert parallelism: dropped tokens, loss, and load of the ranks.

    python -m benchmarks.papers.expert_slots --folder DIR [--iterations N] [--seeds N] [--output FILE.md]
    python -m benchmarks.papers.expert_slots --quick

Trains a small MoE GPT of 16 experts, top-1, on 8 ranks of 4 slots: the setting of SYMI at demo scale. With
capacity factor 1 it counts dropped tokens, without it those of the busiest rank. Nothing is timed. A seed
decides the first weights and the order of the data of all cases. Runs that are complete stay in the folder,
and are not repeated.

Source of the setting: SYMI, section 6 (16 experts, 4 slots a rank, top-1, capacity factor 1).
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.jobs import Changes, write_data
from benchmarks.output import conditions, markdown_table, parse_options, show
from benchmarks.papers.quality import FIRST_SEED, train_missing
from moe_ft.planning.slot_tables import Numbers, Table, first_table, replicas_of, share_of
from tests.demo_model import layout_flags, model_flags
from tests.harness import events, run_training

NUM_RANKS, NUM_EXPERTS, NUM_SLOTS, NUM_LAST = 8, 16, 4, 20
MODEL: Changes = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_experts": NUM_EXPERTS,
    "moe_router_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_aux_loss_coeff": 1e-2,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 4,
    "global_batch_size": 32,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_iters": 10,
    "lr_decay_style": "cosine",
}
_SLOTS = {"moe_ft_expert_slots": NUM_SLOTS, "moe_ft_rebalance_interval": 1}
_CAPACITY = {"moe_expert_capacity_factor": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "stock EP, capacity factor 1": _CAPACITY,
    "slots, capacity factor 1": _CAPACITY | _SLOTS,
    "stock EP, no token dropped": {},
    "slots, no token dropped": _SLOTS,
}


def train(folder: Path, data: Sequence[str], name: str, seed: int, length: int) -> dict[str, Any]:
    """Train a case with a seed, and return what is kept of it."""
    changes = CASES[name]
    has_slots = "moe_ft_expert_slots" in changes
    run = Path(tempfile.mkdtemp(prefix="run_", dir=folder))
    flags = [
        *model_flags(**MODEL, **changes, seed=seed, train_iters=length),
        *layout_flags({} if has_slots else {"ep": NUM_RANKS}),
        *data,
        *("--moe-ft-event-log", str(run / "events"), "--moe-ft-router-log"),
    ]
    try:
        run_training(flags, NUM_RANKS, log_dir=run, deadline_s=900).check()
        losses = [line["loss"] for line in events(run / "events", NUM_RANKS - 1, "iteration")]
        return {
            "case": name,
            "seed": seed,
            "iterations": length,
            "loss": fmean(losses[-NUM_LAST:]),
            **read_loads(run / "events", has_slots=has_slots),
        }
    finally:
        shutil.rmtree(run, ignore_errors=True)


def read_loads(folder: Path, *, has_slots: bool) -> dict[str, Any]:
    """Return the share of tokens that were dropped, and ``[iteration][layer]`` busiest rank over the mean."""
    of_ranks = [events(folder, rank, "router_load") for rank in range(NUM_RANKS)]
    changes = {line["iteration"]: line["layers"] for line in events(folder, 0, "slot_table")}
    num_slots = NUM_SLOTS if has_slots else NUM_EXPERTS // NUM_RANKS
    first = first_table(NUM_EXPERTS, NUM_RANKS, num_slots, 1)
    tables: dict[str, Table] = dict.fromkeys(of_ranks[0][0]["tokens"], first)
    kept, busiest = [], []
    for lines in zip(*of_ranks, strict=True):
        row = []
        for layer, table in tables.items():
            tokens = np.array([line["tokens"][layer] for line in lines], dtype=np.int64)
            kept.append(int(tokens.sum()))
            row.append(_busiest(tokens, table))
        busiest.append(row)
        tables |= {
            layer: tuple(map(tuple, new["table"]))
            for layer, new in changes.get(lines[0]["iteration"], {}).items()
        }
    routed = int(MODEL["global_batch_size"]) * int(MODEL["seq_length"])
    return {"dropped": [1 - each / routed for each in kept], "busiest": busiest}


def _busiest(tokens: Numbers, table: Table) -> float:
    """Return the tokens of the busiest rank over the mean, of ``[source, expert]`` tokens."""
    _, received = share_of(tokens, replicas_of(table, NUM_EXPERTS), 0)
    return float(received.max() / received.mean())


def train_all(
    folder: Path, texts: Sequence[Path], names: Sequence[str], seeds: Sequence[int], length: int
) -> list[dict[str, Any]]:
    """Train what is not in the folder yet; return all runs."""
    os.environ["OMP_NUM_THREADS"] = "1"
    data = write_data(folder, texts)

    def is_of(run: Mapping[str, Any], name: str, seed: int) -> bool:
        return (run["case"], run["seed"], run["iterations"]) == (name, seed, length)

    keys = [(name, seed) for seed in seeds for name in names]
    return train_missing(
        folder / "runs.jsonl",
        keys,
        is_of,
        lambda name, seed: train(folder, data, name, seed, length),
    )


def row_of(name: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the row of a case: dropped tokens early and late, loss, and the busiest rank."""
    own = [run for run in runs if run["case"] == name]
    cells = []
    for part in (slice(None, NUM_LAST), slice(-NUM_LAST, None)):
        layers = slice(*(each and 2 * each for each in (part.start, part.stop)))  # two a step
        cells.append(f"{fmean(fmean(run['dropped'][layers]) for run in own):.1%}")
    losses = [run["loss"] for run in own]
    cells.append(f"{fmean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})")
    ratios = np.array([run["busiest"][NUM_LAST:] for run in own])
    cells.append(f"{ratios.mean():.2f} ({np.percentile(ratios, 95):.2f})")
    return [name, *cells]


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", nargs="*", type=Path, help="default: Python's standard library")
    parser.add_argument("--folder", type=Path, help="keeps the runs, to continue later")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--cases", nargs="+", metavar="TEXT", default=[""], help="parts of names")
    options = parse_options(
        parser, text=[Path(__file__).parent], iterations=NUM_LAST + 4, seeds=1, cases=["slots, cap"]
    )
    if not (options.folder or options.quick):
        parser.error("--folder is missing: only --quick keeps no runs")
    with tempfile.TemporaryDirectory(prefix="slots_") as name:
        folder = (options.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        names = [each for each in CASES if any(text in each for text in options.cases)]
        seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
        runs = train_all(folder, options.text, names, seeds, options.iterations)
    headers = (
        *("case", f"dropped, first {NUM_LAST}", f"dropped, last {NUM_LAST}"),
        *(f"loss, last {NUM_LAST}", "busiest rank over the mean"),
    )
    known = [each for each in CASES if any(run["case"] == each for run in runs)]
    about = conditions(
        f"{options.seeds} seeds; {options.iterations} iterations of {MODEL['global_batch_size']} x "
        f"{MODEL['seq_length']} tokens; 2 layers of {NUM_EXPERTS} experts, top-1, on {NUM_RANKS} ranks of "
        f"{NUM_SLOTS} slots. Loss: mean (range of the seeds); busiest rank: mean (95th percentile) over "
        f"layers and iterations after the first {NUM_LAST}."
    )
    table = markdown_table([row_of(each, runs) for each in known], headers)
    show([about, table], options.output)


if __name__ == "__main__":
    main()
