"""Cost of lossy recoveries to a model: validation loss with partial snapshots and faults, against none.

    python -m benchmarks.partial_quality [DIR_OR_FILES ...] --folder DIR [--output FILE.md]
    python -m benchmarks.partial_quality --quick

The runs are benchmarks/quality_runs.py's.

validation   the loss after the last iteration, over the same samples for all cases of a seed
plt          proportion of lost tokens of all recoveries together, as the last recovery reports it
skipped      snapshots that were due and not taken, all seeds together
jump         how far the training loss of the first iteration after a recovery lies above the one without
             faults, minus the same distance in the iterations before the recovery
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.output import markdown_table, show
from benchmarks.quality_runs import (
    REFERENCE,
    Case,
    conditions,
    jumps,
    quality_options,
    run_cases,
    spread,
)

PLT_LIMIT = 0.0375


def partial(interval: int, k: int, *more: str) -> tuple[str, ...]:
    """Return the flags of a partial strategy."""
    every = ("--moe-ft-interval", str(interval), "--moe-ft-k-snapshot", str(k))
    return ("--moe-ft-strategy", "partial", *every, "--moe-ft-k-persist", "1", *more)


NODES = ("--moe-ft-replication-factor", "0", "--moe-ft-persist-interval", "1")
CASES: dict[str, Case] = {
    "no faults": Case(fault=""),
    "no faults, lr x 1.001": Case(fault="", lr_factor=1.001),
    "full, interval 1": Case(flags=("--moe-ft-strategy", "dense", "--moe-ft-interval", "1")),
    "K=4, interval 1": Case(flags=partial(1, 4)),
    "K=2, interval 1": Case(flags=partial(1, 2)),
    "K=1, interval 1": Case(flags=partial(1, 1)),
    "K=4, interval 8": Case(flags=partial(8, 4)),
    "K=2, interval 8": Case(flags=partial(8, 2)),
    "K=1, interval 8": Case(flags=partial(8, 1)),
    "Dynamic-K from 1, interval 1": Case(flags=partial(1, 1, "--moe-ft-dynamic-k")),
    "load-aware K=1, interval 8": Case(flags=partial(8, 1, "--moe-ft-selection", "load-aware")),
    "nodes, K=4 and 1, interval 2": Case(
        flags=partial(2, 4, *NODES), fault="lose-node", stores=True
    ),
}


def plt_of(run: Mapping[str, Any]) -> float:
    """Return the PLT of a run, 0 where nothing can be lost."""
    recoveries = run["recoveries"]
    return (recoveries[-1]["total_plt"] or 0.0) if recoveries else 0.0


def case_rows(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case."""
    references = {run["seed"]: run for run in runs if run["case"] == REFERENCE}
    for name in names:
        found = [run for run in runs if run["case"] == name and run["seed"] in references]
        if not found:
            continue
        differences = [run["validation"] - references[run["seed"]]["validation"] for run in found]
        jumped = [jump for run in found for jump in jumps(run, references[run["seed"]])]
        k_at_end = sorted(
            {r["recoveries"][-1]["k_snapshot"] or 0 for r in found if r["recoveries"]}
        )
        yield (
            name,
            str(len(jumped) // len(found)),
            ", ".join(f"{100 * plt_of(run):.2f}" for run in found),
            spread([run["validation"] for run in found], ".4f"),
            "-" if name == REFERENCE else spread(differences, "+.4f"),
            spread(jumped, "+.3f") if jumped else "-",
            f"{max(jumped):+.3f}" if jumped else "-",
            ", ".join(str(k) for k in k_at_end if k) or "-",
            str(sum(len(run["problems"]) for run in found)),
        )


CASE_HEADERS = (
    "case",
    "recoveries",
    "PLT %, by seed",
    "validation loss",
    "minus no faults",
    "jump of the training loss",
    "largest jump",
    "K at the end",
    "skipped",
)


def group_rows(runs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for the lossy runs on either side of the paper's limit."""
    references = {run["seed"]: run["validation"] for run in runs if run["case"] == REFERENCE}
    lossy = [run for run in runs if plt_of(run) > 0 and run["seed"] in references]
    edges = (0.0, 0.01, PLT_LIMIT, 0.1, 1.0)
    for low, high in zip(edges, edges[1:], strict=False):
        found = [run for run in lossy if low < plt_of(run) <= high]
        differences = [run["validation"] - references[run["seed"]] for run in found]
        if differences:
            yield (
                f"{100 * low:g} to {100 * high:g}",
                str(len(found)),
                spread(differences, "+.4f"),
                f"{sum(difference > 0 for difference in differences)} of {len(found)}",
            )


GROUP_HEADERS = ("PLT %", "runs", "validation loss minus no faults", "worse than no faults")


def main() -> None:
    """Train what is missing, and print the tables."""
    options = quality_options(__doc__.splitlines()[0], "K=1, interval 1")
    job, names, runs = run_cases(options, CASES)
    show(
        [
            conditions(job, runs),
            markdown_table(case_rows(runs, names), CASE_HEADERS),
            markdown_table(group_rows(runs), GROUP_HEADERS),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
