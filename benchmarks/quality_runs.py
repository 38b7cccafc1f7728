"""Runs of a small model that fail and recover: what training and validation losses say of what was recovered.

Trains a small MoE GPT with two ranks (expert parallelism 2) through the real training loop, kills it several
times in the same iterations, and lets it recover. All cases see the same seeds: a seed decides the first
weights and the order of the data, so that differences between cases are taken seed by seed. A run that is
complete is a line of JSON in the folder; runs that are there already are not repeated.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.conditions import versions
from benchmarks.output import parse_options
from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from tests.demo_model import layout_flags, model_flags
from tests.harness import Train, events, run_with_restarts
from tools.prepare_text import standard_library

NUM_RANKS = 2
REFERENCE = "no faults"  # the case that all others are compared with
NUM_BEFORE = 5  # iterations before a recovery that the jump is measured from
FIRST_SEED = 1234
_VALIDATION = re.compile(
    r"validation loss at .*?lm loss value: ([0-9.E+-]+|nan|inf)", re.IGNORECASE
)

MODEL: dict[str, str | int | float | bool] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "moe_ffn_hidden_size": 128,
    "num_experts": 8,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 8,
    "global_batch_size": 16,
    "lr": 3e-3,
    "min_lr": 3e-4,
    "lr_warmup_iters": 10,
    "lr_decay_style": "cosine",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Contents of snapshots, and the kind of faults.

    Attributes:
        flags: of moe_ft, with the interval between snapshots.
        fault: kind of the faults; empty for none.
        stores: whether checkpoints go to storage too.
        loses_all: whether both ranks are on the node that is lost, so that only storage is left.
        lr_factor: of the learning rate; hardly more than 1 it shows what any small change does to a run.
    """

    flags: tuple[str, ...] = ()
    fault: str = "kill"
    stores: bool = False
    loses_all: bool = False
    lr_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings that all runs share; `program` is what ranks run instead of pretrain_gpt_moe.py."""

    folder: Path
    data: tuple[str, ...]
    cases: Mapping[str, Case]
    num_iterations: int
    num_faults: int
    num_validations: int
    program: Train | None = None

    def faults(self, kind: str) -> list[str]:
        """Return the faults: equally far apart, the ranks in turn; none where ``kind`` is empty."""
        gap = self.num_iterations // (self.num_faults + 1)
        return [
            f"{kind}:{number % NUM_RANKS}@{number * gap}:backward"
            for number in range(1, self.num_faults + 1)
            if kind
        ]

    def flags(self, case: Case, seed: int, run: Path, memory: Path) -> list[str]:
        """Return the command line of a run."""
        changes = {
            **MODEL,
            "lr": float(MODEL["lr"]) * case.lr_factor,
            "seed": seed,
            "train_iters": self.num_iterations,
            "eval_iters": self.num_validations,
            "eval_interval": 100 * self.num_iterations,
        }
        memory_flags = ("--moe-ft-memory-dir", str(memory), "--moe-ft-job-id", "quality")
        return [
            *model_flags(**changes),
            *layout_flags({"ep": NUM_RANKS}),
            *self.data,
            *("--moe-ft-event-log", str(run / "events"), "--moe-ft-fault-report-grace-s", "0.5"),
            *case.flags,
            *(memory_flags if case.flags else ()),
            *(("--moe-ft-persist-dir", str(run / "storage")) if case.stores else ()),
            *(
                word
                for fault in self.faults(case.fault)
                for word in ("--moe-ft-inject-fault", fault)
            ),
        ]


def train(job: Job, name: str, seed: int) -> dict[str, Any]:
    """Train a case with a seed, over all its faults, and return what is kept of it."""
    case, start = job.cases[name], time.monotonic()
    run = Path(tempfile.mkdtemp(prefix="run_", dir=job.folder))
    memory = Path(tempfile.mkdtemp(prefix="moe_ft_quality_", dir="/dev/shm"))
    has_nodes = case.stores and not case.loses_all
    nodes = [f"node{rank if has_nodes else 0}" for rank in range(NUM_RANKS)]
    try:
        results = run_with_restarts(
            job.flags(case, seed, run, memory),
            NUM_RANKS,
            log_dir=run,
            max_restarts=job.num_faults,
            deadline_s=600,
            nodes=lambda start: nodes,
            train=job.program,
        )
        results[-1].check()
        validation = _VALIDATION.findall(results[-1].output(NUM_RANKS - 1))[-1]
        return {
            "case": name,
            "seed": seed,
            "iterations": job.num_iterations,
            "faults": job.faults(case.fault),
            "validation": float(validation),
            "seconds": time.monotonic() - start,
            **read_run(run / "events"),
        }
    finally:
        shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def read_run(folder: Path) -> dict[str, Any]:
    """Return the recoveries and the losses: by incarnation those of the last rank, by iteration."""
    losses: dict[int, dict[int, float]] = {}
    for line in events(folder, NUM_RANKS - 1, "iteration"):
        losses.setdefault(line["incarnation"], {})[line["iteration"]] = line["loss"]
    wanted = ("iteration", "plt", "total_plt", "k_snapshot", "sources", "repeated_tokens")
    recoveries = [{key: line.get(key) for key in wanted} for line in events(folder, 0, "recovery")]
    problems = [
        (line["event"], line["iteration"], line["reason"])
        for event in ("skipped", "degraded")
        for line in events(folder, 0, event)
    ]
    return {"losses": losses, "recoveries": recoveries, "problems": problems}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the runs that are complete; a torn last line is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def train_all(job: Job, names: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train what is not in the folder yet; return all runs."""
    path = job.folder / "runs.jsonl"
    for seed in seeds:
        for name in names:
            faults = job.faults(job.cases[name].fault)
            key = (name, seed, job.num_iterations, faults)
            done = [
                tuple(r[k] for k in ("case", "seed", "iterations", "faults"))
                for r in read_lines(path)
            ]
            if key in done:
                continue
            run = train(job, name, seed)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            print(
                f"seed {seed}, {name}: validation {run['validation']:.4f}, {run['seconds']:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return [
        run
        for run in read_lines(path)
        if run["seed"] in seeds and run["case"] in names and run["iterations"] == job.num_iterations
    ]


def final_losses(run: Mapping[str, Any]) -> dict[int, float]:
    """Return the training loss of every iteration, in the last attempt at it."""
    merged: dict[int, float] = {}
    for incarnation in sorted(run["losses"], key=int):
        merged |= {int(at): loss for at, loss in run["losses"][incarnation].items()}
    return merged


def jumps(run: Mapping[str, Any], reference: Mapping[str, Any]) -> Iterator[float]:
    """Yield the jump of the training loss at each recovery."""
    losses, without = final_losses(run), final_losses(reference)
    for recovery in run["recoveries"]:
        at = recovery["iteration"]
        before = [losses[i] - without[i] for i in range(at - NUM_BEFORE + 1, at + 1)]
        yield losses[at + 1] - without[at + 1] - fmean(before)


def spread(values: Sequence[float], form: str) -> str:
    """Return the mean and, in brackets, the range."""
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def conditions(job: Job, runs: Sequence[Mapping[str, Any]]) -> str:
    """Return under what the numbers were taken."""
    references = [run["validation"] for run in runs if run["case"] == REFERENCE]
    deviation = f"standard deviation {stdev(references):.4f}" if len(references) > 1 else "one seed"
    tokens = job.num_validations * int(MODEL["global_batch_size"]) * int(MODEL["seq_length"])
    minutes = sum(run["seconds"] for run in runs) / 60
    return (
        f"{len(references)} seeds; {job.num_iterations} iterations of {MODEL['global_batch_size']} x "
        f"{MODEL['seq_length']} tokens; validation over {tokens:,} tokens; faults "
        f"{', '.join(job.faults('kill'))}. No faults, over the seeds: {deviation}, range "
        f"{max(references) - min(references):.4f}. {len(runs)} runs, all together {minutes:.0f} min on "
        f"{os.cpu_count()} cores. {versions()}."
    )


def quality_options(description: str, *cases: str) -> argparse.Namespace:
    """Return the options, which all of these benchmarks have; --quick runs `cases` only."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "text",
        nargs="*",
        help="text files, or directories of them (default: the source of Python's standard library)",
    )
    parser.add_argument("--folder", type=Path, help="keeps the runs, to continue later")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--faults", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--validations", type=int, default=100, help="batches of the validation")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", default=[""], help="parts of names")
    options = parse_options(
        parser,
        text=[Path(__file__).parent],
        iterations=24,
        faults=1,
        seeds=1,
        validations=1,
        cases=cases,
    )
    if not (options.folder or options.quick):
        parser.error("--folder is missing: only --quick keeps no runs")
    return options


def run_cases(
    options: argparse.Namespace, cases: Mapping[str, Case], program: Train | None = None
) -> tuple[Job, list[str], list[dict[str, Any]]]:
    """Train what is missing.

    Returns:
        The job, the names of the chosen cases, and all their runs.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    if not options.folder:
        with tempfile.TemporaryDirectory(prefix="quality_") as name:
            options.folder = Path(name)
            return run_cases(options, cases, program)
    options.folder.mkdir(parents=True, exist_ok=True)
    prefix = options.folder.resolve() / "text"
    if not prefix.with_suffix(".idx").exists():
        write_dataset(TextSource(paths=tuple(options.text) or standard_library()), prefix)
    cache = options.folder.resolve() / "cache"
    job = Job(
        folder=options.folder.resolve(),
        data=("--data-path", str(prefix), "--data-cache-path", str(cache), "--split", "90,10,0"),
        cases=cases,
        num_iterations=options.iterations,
        num_faults=options.faults,
        num_validations=options.validations,
        program=program,
    )
    names = [name for name in cases if name == REFERENCE or any(t in name for t in options.cases)]
    return job, names, train_all(job, names, range(FIRST_SEED, FIRST_SEED + options.seeds))
