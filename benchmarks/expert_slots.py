"""Slots of experts in training, beside stock expert parallelism: dropped tokens, loss, and load of the ranks.

    python -m benchmarks.expert_slots --folder DIR [--iterations N] [--seeds N] [--output FILE.md]
    python -m benchmarks.expert_slots --skews --folder DIR [--iterations N] [--output FILE.md]
    python -m benchmarks.expert_slots --quick

Trains a small MoE GPT of 16 experts, top-1, on 8 ranks of 4 slots: the setting of SYMI at demo scale. With
capacity factor 1 it counts dropped tokens, without it those of the busiest rank. Nothing is timed. A seed
decides the first weights and the order of the data of all cases. Runs that are complete stay in the folder,
and are not repeated.

With --skews routers draw experts of a popularity from 1:1 to 8:1 instead, 8 experts on 4 ranks, and each rank
counts the tokens that its experts have got from Megatron's dispatcher.

Source of the setting: SYMI, section 6 (16 experts, 4 slots a rank, top-1, capacity factor 1).
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.router import TopKRouter
from megatron.training import get_args

import pretrain_gpt_moe
from benchmarks.conditions import versions
from benchmarks.expert_placement import Shape, eplb
from benchmarks.output import markdown_table, parse_options, show
from benchmarks.quality_runs import read_lines
from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from moe_ft.planning.slot_tables import Table, first_table, imbalance, replicas_of, skewed
from moe_ft.planning.token_shares import Numbers, share_of
from tests.demo_model import layout_flags, model_flags
from tests.harness import events, run_ranks, run_training
from tools.prepare_text import standard_library

SKEWED_EXPERTS, SKEWED_RANKS, SKEWS = 8, 4, (1, 2, 4, 8)
NUM_RANKS, NUM_EXPERTS, NUM_SLOTS, NUM_LAST = 8, 16, 4, 20
FIRST_SEED = 1234
MODEL: dict[str, str | int | float | bool] = {
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
    folder.mkdir(parents=True, exist_ok=True)
    prefix, path = folder / "text", folder / "runs.jsonl"
    if not prefix.with_suffix(".idx").exists():
        write_dataset(TextSource(paths=tuple(map(str, texts)) or standard_library()), prefix)
    data = ("--data-path", str(prefix), "--data-cache-path", str(folder / "cache"))
    for seed in seeds:
        for name in names:
            key = (name, seed, length)
            done = [(run["case"], run["seed"], run["iterations"]) for run in read_lines(path)]
            if key not in done:
                run = train(folder, (*data, "--split", "100,0,0"), name, seed, length)
                with path.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(f"seed {seed}, {name}: loss {run['loss']:.4f}", file=sys.stderr, flush=True)
    found = read_lines(path)
    return [run for run in found if run["seed"] in seeds and run["iterations"] == length]


def dispatch(flags: list[str], folder: str, length: int) -> None:
    """Train on this rank with routers that draw; write ``[iteration]`` tokens that experts here have got."""
    counts = np.zeros(length * len(SKEWS), dtype=np.int64)
    rank = int(os.environ["RANK"])
    generator = torch.Generator().manual_seed(FIRST_SEED + rank)
    original = SequentialMLP.forward

    def draw(router: Any, tokens: torch.Tensor) -> torch.Tensor:
        ratio = SKEWS[get_args().curr_iteration // length]
        shares = torch.tensor(skewed(SKEWED_EXPERTS, ratio, is_one_hot=False)).log()
        chance = torch.rand((*tokens.shape[:-1], len(shares)), generator=generator)
        kept: torch.Tensor = 0 * router.weight.sum()  # the optimizer has its gradient
        return shares - (-chance.log()).log() + kept  # the largest is drawn so

    def forward(experts: Any, tokens: torch.Tensor, counted: torch.Tensor, *args: Any) -> Any:
        counts[get_args().curr_iteration] += int(counted.sum())
        return original(experts, tokens, counted, *args)

    with (
        patch.object(TopKRouter, "gating", draw),
        patch.object(SequentialMLP, "forward", forward),
    ):
        pretrain_gpt_moe.main(flags)
    np.save(Path(folder) / f"counts_{rank}.npy", counts)


def dispatched(folder: Path, num_slots: int, length: int) -> tuple[Numbers, Numbers]:
    """Return ``[iteration, rank]`` tokens, and ``[iteration, expert]``; 0 slots: stock Megatron."""
    kept = folder / f"skews_{num_slots}_{length}.npz"
    if kept.exists():
        with np.load(kept) as file:
            return file["received"], file["loads"]
    changes: dict[str, Any] = {"num_experts": SKEWED_EXPERTS, "micro_batch_size": 16}
    changes |= {"num_layers": 1, "global_batch_size": 64, "train_iters": length * len(SKEWS)}
    layout = {} if num_slots else {"ep": SKEWED_RANKS}
    if num_slots:
        changes |= {"moe_ft_expert_slots": num_slots, "moe_ft_rebalance_interval": 1}
    run = Path(tempfile.mkdtemp(prefix="skews_", dir=folder))
    flags = [*model_flags(**{**MODEL, **changes}), *layout_flags(layout), "--mock-data"]
    flags += ["--moe-ft-event-log", str(run / "events"), "--moe-ft-router-log"]
    try:
        run_ranks(dispatch, SKEWED_RANKS, flags, str(run), length, log_dir=run).check()
        received = [np.load(run / f"counts_{rank}.npy") for rank in range(SKEWED_RANKS)]
        sent = [
            [
                next(iter(line["tokens"].values()))
                for line in events(run / "events", rank, "router_load")
            ]
            for rank in range(SKEWED_RANKS)
        ]
        found = np.stack(received, axis=1), np.array(sent).sum(axis=0)
        np.savez(kept, received=found[0], loads=found[1])
        return found
    finally:
        shutil.rmtree(run, ignore_errors=True)


def skew_rows(folder: Path, slots: Sequence[int], length: int) -> list[list[str]]:
    """Return a row for each skew: tokens of the busiest rank over the mean, without slots and with some.

    The first iterations of a skew are left out: their tables follow from the one before.
    """
    rows = [[f"{ratio}:1"] for ratio in SKEWS]
    for number in (0, *slots):
        received, loads = dispatched(folder, number, length)
        busiest = received.max(axis=1) / received.mean(axis=1)
        for place, row in enumerate(rows):
            found = range(place * length + 2, (place + 1) * length)
            row.append(f"{np.mean(busiest[found]):.2f}")
            if number:
                shape = Shape(SKEWED_RANKS, number)
                peers = [
                    imbalance(eplb(loads[each - 1].tolist(), shape), loads[each].tolist())
                    for each in found
                ]
                row[-1] += f" ({np.mean(peers):.2f})"
    return rows


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
    parser.add_argument(
        "--skews", action="store_true", help="made-up loads, counted where they arrive"
    )
    parser.add_argument("--cases", nargs="+", metavar="TEXT", default=[""], help="parts of names")
    options = parse_options(
        parser, text=[Path(__file__).parent], iterations=NUM_LAST + 4, seeds=1, cases=["slots, cap"]
    )
    if not (options.folder or options.quick):
        parser.error("--folder is missing: only --quick keeps no runs")
    with tempfile.TemporaryDirectory(prefix="slots_") as name:
        folder = (options.folder or Path(name)).resolve()
        if options.skews or options.quick:
            folder.mkdir(parents=True, exist_ok=True)
            slots = (2,) if options.quick else (2, 3, 4)
            length = 3 if options.quick else options.iterations // len(SKEWS)
            rows = skew_rows(folder, slots, length)
            conditions = (
                f"{SKEWED_EXPERTS} experts, top-1, on {SKEWED_RANKS} ranks; {length} iterations a skew, "
                f"the first 2 left out, of 64 x {MODEL['seq_length']} tokens; a new table every iteration. "
                f"Tokens of the busiest rank over the mean. {versions()}."
            )
            headers = ("skew", "stock EP", *(f"slots, c = {each} (EPLB)" for each in slots))
            if not options.quick:
                show([conditions, markdown_table(rows, headers)], options.output)
                return
        names = [each for each in CASES if any(text in each for text in options.cases)]
        seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
        runs = train_all(folder, options.text, names, seeds, options.iterations)
    headers = (
        *("case", f"dropped, first {NUM_LAST}", f"dropped, last {NUM_LAST}"),
        *(f"loss, last {NUM_LAST}", "busiest rank over the mean"),
    )
    known = [each for each in CASES if any(run["case"] == each for run in runs)]
    conditions = (
        f"{options.seeds} seeds; {options.iterations} iterations of {MODEL['global_batch_size']} x "
        f"{MODEL['seq_length']} tokens; 2 layers of {NUM_EXPERTS} experts, top-1, on {NUM_RANKS} ranks of "
        f"{NUM_SLOTS} slots. Loss: mean (range of the seeds); busiest rank: mean (95th percentile) over "
        f"layers and iterations after the first {NUM_LAST}. {versions()}."
    )
    table = markdown_table([row_of(each, runs) for each in known], headers)
    show([conditions, table], options.output)


if __name__ == "__main__":
    main()
