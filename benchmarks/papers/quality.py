"""Validation loss of a small model through faults, by what was recovered, against runs without faults.

    python -m benchmarks.papers.quality SUITE [DIR_OR_FILES ...] --folder DIR [--output FILE.md]
    python -m benchmarks.papers.quality --quick

Trains a small MoE GPT with two ranks (expert parallelism 2) through the real training loop, kills it several
times in the same iterations, and lets it recover. All cases see the same seeds: a seed decides the first
weights and the order of the data, so that differences between cases are taken seed by seed. A run that is
complete is a line of JSON in the folder; runs that are there already are not repeated. Suites:

partial    partial snapshots, MoC-System's Fig. 5 and 14
selective  `selective` by both rules, beside `partial`; four faults. All cases save two experts of a rank
covers     what partial checkpoints leave out of an expert, MoC-System's W, O and WO (Fig. 14a, Table 3).
           Users have no such choice: the strategy `covers` is registered here alone. It is `partial`, except
           for the parts of an expert that rotate; others are in every snapshot and checkpoint. W: master
           weights rotate (compute weights are a cast of them), O: moments do, WO: both. "storage": both ranks
           lose their memory in each fault, snapshots hold 2 of 8 experts, checkpoints 1, as 4 and 1 of 16 in
           the paper; in "WO-2L" one rank loses it. "memory": processes die, snapshots of 1 expert stay
lossy      dense snapshots, in which moments or masters are kept as --moe-ft-state-dtype says

validation   the loss after the last iteration, over the same samples for all cases of a seed
plt          proportion of lost tokens of all recoveries together, as the last recovery reports it
skipped      snapshots that were due and not taken, all seeds together
jump         how far the training loss of the first iteration after a recovery lies above the one without
             faults, minus the same distance in the iterations before the recovery
peak         the same for the worst of the ten iterations after it
harmless     the mean of the validation loss lies within what a learning rate changed by 0.1 % does, and no
             peak is more than twice the largest that this change has at the same iterations
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, override

import pretrain_gpt_moe
from benchmarks.jobs import DEADLINE_S, Changes, write_data
from benchmarks.output import conditions, markdown_table, parse_options, show
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import ConfigPart as Options
from moe_ft.config.fields import setting
from moe_ft.strategies import registry
from moe_ft.strategies.partial.plan import Partial
from moe_ft.strategies.partial.selection import PartialConfig
from moe_ft.units import UnitId, UnitKind, UnitPart
from tests.demo_model import layout_flags, model_flags
from tests.harness import Train, events, run_with_restarts

NUM_RANKS = 2
REFERENCE = "no faults"  # the case that all others are compared with
CONTROL = "no faults, lr x 1.001"  # shows what any small change does to a run
NUM_BEFORE, NUM_AFTER = 5, 10  # iterations around a recovery that jumps and peaks are measured from
FIRST_SEED = 1234
PLT_LIMIT = 0.0375
_VALIDATION = re.compile(
    r"validation loss at .*?lm loss value: ([0-9.E+-]+|nan|inf)", re.IGNORECASE
)

MODEL: Changes = {
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

Run = Mapping[str, Any]
Row = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Contents of snapshots, and the kind of faults.

    Attributes:
        flags: of moe_ft, with the interval between snapshots.
        fault: kind of the faults; empty for none.
        stores: whether checkpoints go to storage too.
        loses_all: whether both ranks are on the node that is lost, so that only storage is left.
    """

    flags: tuple[str, ...] = ()
    fault: str = "kill"
    stores: bool = False
    loses_all: bool = False
    lr_factor: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Suite:
    """Cases that are compared, besides `REFERENCE` and `CONTROL`; ``program`` is what ranks run."""

    cases: Mapping[str, Case]
    num_faults: int = 3
    program: Train | None = None

    def __getitem__(self, name: str) -> Case:
        return {**_WITHOUT, **self.cases}[name]

    @property
    def names(self) -> list[str]:
        """Names of all cases."""
        return [*_WITHOUT, *self.cases]


# --- cases

_WITHOUT = {REFERENCE: Case(fault=""), CONTROL: Case(fault="", lr_factor=1.001)}


def of_strategy(strategy: str, interval: int, **flags: object) -> tuple[str, ...]:
    """Return the flags of a strategy."""
    words = ["--moe-ft-strategy", strategy, "--moe-ft-interval", f"{interval}"]
    for name, value in flags.items():
        words += [f"--moe-ft-{name.replace('_', '-')}", *([] if value is True else [f"{value}"])]
    return tuple(words)


def partial(interval: int, k: int, **flags: object) -> tuple[str, ...]:
    """Return the flags of a partial strategy."""
    return of_strategy("partial", interval, k_snapshot=k, k_persist=1, **flags)


_STORAGE = {"replication_factor": 0, "persist_interval": 1}
_PARTIAL = Suite(
    cases={
        "full, interval 1": Case(flags=of_strategy("dense", 1)),
        **{
            f"K={k}, interval {interval}": Case(flags=partial(interval, k))
            for interval in (1, 8)
            for k in (4, 2, 1)
        },
        "Dynamic-K from 1, interval 1": Case(flags=partial(1, 1, dynamic_k=True)),
        "load-aware K=1, interval 8": Case(flags=partial(8, 1, selection="load-aware")),
        "nodes, K=4 and 1, interval 2": Case(
            flags=partial(2, 4, **_STORAGE), fault="lose-node", stores=True
        ),
    }
)

_BUDGET = "1198848"  # of a rank of that model: the state outside experts, and two experts
_SELECTIVE = Suite(
    cases={
        "partial, K=1": Case(flags=partial(4, 1)),
        **{
            f"selective, {name}": Case(
                flags=of_strategy("selective", 4, local_budget=_BUDGET, selective_rule=rule)
            )
            for name, rule in (("Algorithm 1", "paper"), ("tokens x age", "age"))
        },
    },
    num_faults=4,
)

_CHOICES = (
    "master=split",
    *(f"exp_avg={each}" for each in ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")),
    *(f"exp_avg={each}" for each in ("fp8-e4m3-block", "fp8-e5m2-block", "fp8-e4m3-block-pow2")),
    *(f"exp_avg_sq={each}" for each in ("bf16", "fp16", "fp8-e4m3", "fp8-e5m2")),
    *(f"exp_avg_sq={each}" for each in ("fp8-e4m3-block", "fp8-e5m2-block")),
    *(f"master={each}" for each in ("bf16", "fp16", "fp8-e4m3-block")),
    "exp_avg=bf16,exp_avg_sq=bf16",
    "exp_avg=fp8-e4m3-block,exp_avg_sq=bf16",
    "master=fp16,exp_avg=fp8-e4m3-block,exp_avg_sq=bf16",
)
_DENSE = ("--moe-ft-strategy", "dense")
_LOSSY = Suite(
    cases={
        "exact": Case(flags=_DENSE),
        **{
            choice: Case(flags=(*_DENSE, "--moe-ft-allow-lossy", "--moe-ft-state-dtype", choice))
            for choice in _CHOICES
        },
    }
)

_ROTATING = {
    "W": (UnitPart.WEIGHTS,),
    "O": (UnitPart.MOMENTS,),
    "WO": (UnitPart.WEIGHTS, UnitPart.MOMENTS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CoversConfig(Options):
    """Parts of an expert that rotate, and how many experts at a time."""

    covers: str = setting("WO", "parts of an expert that rotate", choices=tuple(_ROTATING))
    covers_k_snapshot: int = setting(1, "experts per MoE layer in each snapshot")
    covers_k_persist: int = setting(1, "experts per MoE layer in each checkpoint on storage")


@dataclass(frozen=True, kw_only=True)
class Covers(Partial):
    """`partial` with other parts of experts that rotate."""

    @override
    def options_in(self, config: MoeFtConfig) -> PartialConfig:
        own: CoversConfig = super().options_in(config)
        return PartialConfig(k_snapshot=f"{own.covers_k_snapshot}", k_persist=own.covers_k_persist)

    @override
    def division(self, config: MoeFtConfig) -> str:
        return f"--moe-ft-covers {self._covers(config)}"

    @override
    def divide(
        self, units: Iterable[UnitId], config: MoeFtConfig
    ) -> tuple[list[UnitId], list[UnitId]]:
        always, rotating = list[UnitId](), list[UnitId]()
        parts = _ROTATING[self._covers(config)]
        for unit in units:
            if unit.kind is not UnitKind.EXPERT:
                always.append(unit)
            elif len(parts) == 2:
                rotating.append(unit)
            else:
                for part in (UnitPart.WEIGHTS, UnitPart.MOMENTS):
                    (rotating if part in parts else always).append(replace(unit, part=part))
        return always, rotating

    def _covers(self, config: MoeFtConfig) -> str:
        own: CoversConfig = super().options_in(config)
        return own.covers


def train_covers(flags: list[str]) -> None:
    """Train with the strategy `covers` among those that can be chosen."""
    registry.register(
        Covers(name="covers", options=CoversConfig, is_exact=False, leaves_out_frozen=True)
    )
    pretrain_gpt_moe.main(flags)


def _covering(covers: str, interval: int, k: int, **flags: object) -> tuple[str, ...]:
    return of_strategy("covers", interval, covers=covers, covers_k_snapshot=k, **flags)


_COVERS = Suite(
    cases={
        **{
            f"{covers}, storage": Case(
                flags=_covering(covers, 2, 2, **_STORAGE),
                fault="lose-node",
                stores=True,
                loses_all=True,
            )
            for covers in _ROTATING
        },
        "WO-2L, storage": Case(
            flags=_covering("WO", 2, 2, **_STORAGE), fault="lose-node", stores=True
        ),
        **{
            f"{covers}, memory, K=1, interval 8": Case(flags=_covering(covers, 8, 1))
            for covers in _ROTATING
        },
    },
    program=train_covers,
)
SUITES = {"partial": _PARTIAL, "selective": _SELECTIVE, "covers": _COVERS, "lossy": _LOSSY}


# --- runs


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings that all runs share."""

    folder: Path
    suite: Suite
    num_iterations: int
    num_faults: int
    num_validations: int
    data: Sequence[str] = field(default=())

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
        flags = [*model_flags(**changes), *layout_flags({"ep": NUM_RANKS}), *self.data, *case.flags]
        flags += ["--moe-ft-event-log", str(run / "events"), "--moe-ft-fault-report-grace-s", "0.5"]
        if case.flags:
            flags += ["--moe-ft-memory-dir", str(memory), "--moe-ft-job-id", "quality"]
        if case.stores:
            flags += ["--moe-ft-persist-dir", str(run / "storage")]
        for fault in self.faults(case.fault):
            flags += ["--moe-ft-inject-fault", fault]
        return flags

    def train(self, name: str, seed: int) -> dict[str, Any]:
        """Train a case with a seed, over all its faults, and return what is kept of it."""
        case, start = self.suite[name], time.monotonic()
        run = Path(tempfile.mkdtemp(prefix="run_", dir=self.folder))
        memory = Path(tempfile.mkdtemp(prefix="moe_ft_quality_", dir="/dev/shm"))
        has_nodes = case.stores and not case.loses_all
        nodes = [f"node{rank if has_nodes else 0}" for rank in range(NUM_RANKS)]
        try:
            last = run_with_restarts(
                self.flags(case, seed, run, memory),
                NUM_RANKS,
                log_dir=run,
                max_restarts=self.num_faults,
                deadline_s=DEADLINE_S,
                nodes=lambda start: nodes,
                train=self.suite.program,
            )[-1].check()
            return {
                "case": name,
                "seed": seed,
                "iterations": self.num_iterations,
                "faults": self.faults(case.fault),
                "validation": float(_VALIDATION.findall(last.output(NUM_RANKS - 1))[-1]),
                "seconds": time.monotonic() - start,
                **read_run(run / "events"),
            }
        finally:
            shutil.rmtree(run, ignore_errors=True)
            shutil.rmtree(memory, ignore_errors=True)

    def is_of(self, run: Run, name: str, seed: int) -> bool:
        """Return whether a run is that of a case and a seed."""
        wanted = (name, seed, self.num_iterations, self.faults(self.suite[name].fault))
        return wanted == tuple(run[key] for key in ("case", "seed", "iterations", "faults"))


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


def train_missing(
    path: Path,
    keys: Iterable[tuple[str, int]],
    is_of: Callable[[Run, str, int], bool],
    train: Callable[[str, int], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Train what is not in a file yet, by case and seed; return the runs that were asked for."""
    keys = [*keys]
    for name, seed in keys:
        if not any(is_of(run, name, seed) for run in read_lines(path)):
            run = train(name, seed)
            with path.open("a") as file:
                file.write(json.dumps(run) + "\n")
            print(f"seed {seed}, {name}", file=sys.stderr, flush=True)
    return [run for run in read_lines(path) if any(is_of(run, *key) for key in keys)]


# --- tables


def final_losses(run: Run) -> dict[int, float]:
    """Return the training loss of every iteration, in the last attempt at it."""
    merged: dict[int, float] = {}
    for incarnation in sorted(run["losses"], key=int):
        merged |= {int(at): loss for at, loss in run["losses"][incarnation].items()}
    return merged


def highest(run: Run, reference: Run, at: Sequence[int], num_after: int) -> list[float]:
    """Return how far the loss after each of some iterations lies above the one without faults, at most."""
    losses, without = final_losses(run), final_losses(reference)
    above = {each: losses[each] - without[each] for each in losses if each in without}
    return [
        max(above[i] for i in range(start + 1, min(start + num_after, max(above)) + 1))
        - fmean(above[i] for i in range(start - NUM_BEFORE + 1, start + 1))
        for start in at
    ]


def range_of(values: Sequence[float], form: str) -> str:
    """Return the mean and, in brackets, the range; '-' for nothing."""
    if not values:
        return "-"
    return f"{fmean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def plt_of(run: Run) -> float:
    """Return the PLT of a run, 0 where nothing can be lost."""
    recoveries = run["recoveries"]
    return (recoveries[-1]["total_plt"] or 0.0) if recoveries else 0.0


class Compared:
    """Runs beside those without faults, seed by seed."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._references = {run["seed"]: run for run in runs if run["case"] == REFERENCE}
        self.runs = [run for run in runs if run["seed"] in self._references]

    def of(self, name: str) -> list[Run]:
        """Return the runs of a case."""
        return [run for run in self.runs if run["case"] == name]

    def differences(self, runs: Sequence[Run]) -> list[float]:
        """Return validation losses minus those without faults."""
        return [run["validation"] - self._references[run["seed"]]["validation"] for run in runs]

    def highest(self, run: Run, num_after: int, at: Sequence[int] | None = None) -> list[float]:
        """Return jumps or peaks of a run, after its recoveries or other iterations."""
        starts = [each["iteration"] for each in run["recoveries"]] if at is None else at
        return highest(run, self._references[run["seed"]], starts, num_after)

    def cells(self, name: str) -> Row:
        """Return the columns of a case that all tables have: loss, difference, jump."""
        found = self.of(name)
        jumped = [each for run in found for each in self.highest(run, 1)]
        return (
            range_of([run["validation"] for run in found], ".4f"),
            "-" if name == REFERENCE else range_of(self.differences(found), "+.4f"),
            range_of(jumped, "+.3f"),
        )

    def case_row(self, name: str) -> Row:
        """Return the row of a case of partial snapshots."""
        found = self.of(name)
        jumped = [each for run in found for each in self.highest(run, 1)]
        k_at_end = {run["recoveries"][-1]["k_snapshot"] or 0 for run in found if run["recoveries"]}
        return (
            name,
            str(len(jumped) // len(found)),
            ", ".join(f"{100 * plt_of(run):.2f}" for run in found),
            *self.cells(name),
            f"{max(jumped):+.3f}" if jumped else "-",
            ", ".join(str(k) for k in sorted(k_at_end) if k) or "-",
            str(sum(len(run["problems"]) for run in found)),
        )

    def group_rows(self) -> Iterator[Row]:
        """Yield a row for the lossy runs on either side of the paper's limit."""
        edges = (0.0, 0.01, PLT_LIMIT, 0.1, 1.0)
        for low, high in zip(edges, edges[1:], strict=False):
            found = [run for run in self.runs if low < plt_of(run) <= high]
            differences = self.differences(found)
            if differences:
                yield (
                    f"{100 * low:g} to {100 * high:g}",
                    str(len(found)),
                    range_of(differences, "+.4f"),
                    f"{sum(difference > 0 for difference in differences)} of {len(found)}",
                )

    def lossy_rows(self, names: Sequence[str]) -> Iterator[Row]:
        """Yield a row for each case of state in fewer bits."""
        controls = self.of(CONTROL)
        at = sorted({each["iteration"] for run in self.runs for each in run["recoveries"]})
        # Where recoveries went on from differs by an iteration or so from run to run.
        of_controls = [peak for run in controls for peak in self.highest(run, NUM_AFTER, at)]
        limit = max(map(abs, self.differences(controls)))
        for name in names:
            found = self.of(name)
            peaked = [peak for run in found for peak in self.highest(run, NUM_AFTER)]
            is_harmless = fmean(self.differences(found)) <= limit and (
                not peaked or max(peaked) <= 2 * max(of_controls)
            )
            yield (
                name,
                f"{num_bytes(name):.2f}",
                *self.cells(name),
                f"{max(peaked):+.3f}" if peaked else "-",
                ("yes" if is_harmless else "NO") if peaked else "-",
            )


def num_bytes(choice: str) -> float:
    """Return the bytes of master and moments of a parameter."""
    sizes = {"exact": 4.0, "split": 4.125, "bf16": 2.0, "fp16": 2.0}
    named = dict(each.split("=") for each in choice.split(",") if "=" in each)
    kinds = [named.get(part, "exact") for part in ("master", "exp_avg", "exp_avg_sq")]
    return sum(sizes.get(kind, 1 + 4 / 128 * kind.count("block")) for kind in kinds)


_LOSS_HEADERS = ("validation loss", "minus no faults", "jump of the training loss")
CASE_HEADERS = (
    *("case", "recoveries", "PLT %, by seed", *_LOSS_HEADERS),
    *("largest jump", "K at the end", "skipped"),
)
GROUP_HEADERS = ("PLT %", "runs", "validation loss minus no faults", "worse than no faults")
LOSSY_HEADERS = (
    *("case", "bytes of a parameter", *_LOSS_HEADERS),
    *("largest peak in 10 iterations", "harmless"),
)


def tables(suite: str, names: Sequence[str], runs: Sequence[Run]) -> list[str]:
    """Return the tables of a suite."""
    compared = Compared(runs)
    names = [name for name in names if compared.of(name)]
    if suite == "lossy":
        return [markdown_table(compared.lossy_rows(names), LOSSY_HEADERS)]
    found = [markdown_table(map(compared.case_row, names), CASE_HEADERS)]
    if suite == "partial":
        found.append(markdown_table(compared.group_rows(), GROUP_HEADERS))
    return found


def described(job: Job, runs: Sequence[Run]) -> str:
    """Return under what the numbers were taken."""
    references = [run["validation"] for run in runs if run["case"] == REFERENCE]
    deviation = f"standard deviation {stdev(references):.4f}" if len(references) > 1 else "one seed"
    tokens = job.num_validations * int(MODEL["global_batch_size"]) * int(MODEL["seq_length"])
    minutes = sum(run["seconds"] for run in runs) / 60
    return conditions(
        f"{len(references)} seeds; {job.num_iterations} iterations of {MODEL['global_batch_size']} x "
        f"{MODEL['seq_length']} tokens; validation over {tokens:,} tokens; faults "
        f"{', '.join(job.faults('kill'))}. No faults, over the seeds: {deviation}, range "
        f"{max(references) - min(references):.4f}. {len(runs)} runs, all together {minutes:.0f} min."
    )


def main() -> None:
    """Train what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", nargs="?", choices=SUITES, default="partial")
    parser.add_argument("text", nargs="*", help="files, or folders of them; the standard library")
    parser.add_argument("--folder", type=Path, help="keeps the runs, to continue later")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--faults", type=int, help="3, or as many as the suite has")
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
        cases=["K=1, interval 1", "x 1.001", "bf16,", "W, storage", "age"],
    )
    if not (options.folder or options.quick):
        parser.error("--folder is missing: only --quick keeps no runs")
    os.environ["OMP_NUM_THREADS"] = "1"
    suite = SUITES[options.suite]
    with tempfile.TemporaryDirectory(prefix="quality_") as name:
        folder = (options.folder or Path(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        job = Job(
            folder=folder,
            suite=suite,
            num_iterations=options.iterations,
            num_faults=options.faults or suite.num_faults,
            num_validations=options.validations,
            data=write_data(folder, options.text, "90,10,0"),
        )
        names = [
            each
            for each in suite.names
            if each == REFERENCE or any(text in each for text in options.cases)
        ]
        seeds = range(FIRST_SEED, FIRST_SEED + options.seeds)
        keys = [(name, seed) for seed in seeds for name in names]
        runs = train_missing(folder / "runs.jsonl", keys, job.is_of, job.train)
    show([described(job, runs), *tables(options.suite, names, runs)], options.output)


if __name__ == "__main__":
    main()
