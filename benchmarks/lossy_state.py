"""Cost of recoveries from state in fewer bits: validation loss against runs without faults.

    python -m benchmarks.lossy_state [DIR_OR_FILES ...] --folder DIR [--output FILE.md]
    python -m benchmarks.lossy_state --quick

The runs are benchmarks/quality_runs.py's: three recoveries each from dense snapshots of every iteration, in
which moments or masters are kept as --moe-ft-state-dtype says, and everything else as it is.

validation   the loss after the last iteration, over the same samples for all cases of a seed
jump         how far the training loss of the first iteration after a recovery lies above the one without
             faults, minus the same distance in the iterations before the recovery
peak         the same for the worst of the ten iterations after it
harmless     the mean of the validation loss lies within what a learning rate changed by 0.1 % does, and no
             peak is more than twice the largest that this change has at the same iterations
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.output import markdown_table, show
from benchmarks.quality_runs import (
    NUM_BEFORE,
    REFERENCE,
    Case,
    conditions,
    final_losses,
    jumps,
    quality_options,
    run_cases,
    spread,
)

_NUM_AFTER = 10
CONTROL = "no faults, lr x 1.001"
EXACT = "exact"
_BYTES = {"exact": 4.0, "split": 4.125, "bf16": 2.0, "fp16": 2.0}


def lossy(choice: str) -> Case:
    """Return dense snapshots in formats."""
    flags = ("--moe-ft-strategy", "dense", "--moe-ft-allow-lossy", "--moe-ft-state-dtype", choice)
    return Case(flags=flags)


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
CASES: dict[str, Case] = {
    REFERENCE: Case(fault=""),
    CONTROL: Case(fault="", lr_factor=1.001),
    EXACT: Case(flags=("--moe-ft-strategy", "dense")),
    **{choice: lossy(choice) for choice in _CHOICES},
}
HEADERS = (
    "case",
    "bytes of a parameter",
    "validation loss",
    "minus no faults",
    "jump of the training loss",
    "largest peak in 10 iterations",
    "harmless",
)


def num_bytes(choice: str) -> float:
    """Return the bytes of master and moments of a parameter."""
    named = dict(each.split("=") for each in choice.split(",") if "=" in each)
    kinds = [named.get(part, "exact") for part in ("master", "exp_avg", "exp_avg_sq")]
    return sum(_BYTES.get(kind, 1 + 4 / 128 * kind.count("block")) for kind in kinds)


def peaks(run: Mapping[str, Any], reference: Mapping[str, Any], at: Sequence[int]) -> list[float]:
    """Return the worst training loss behind each of some iterations."""
    losses, without = final_losses(run), final_losses(reference)
    found = []
    for start in at:
        before = fmean(losses[i] - without[i] for i in range(start - NUM_BEFORE + 1, start + 1))
        behind = range(start + 1, min(start + _NUM_AFTER, max(losses)) + 1)
        found.append(max(losses[i] - without[i] for i in behind) - before)
    return found


def rows(runs: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each case."""
    references = {run["seed"]: run for run in runs if run["case"] == REFERENCE}
    controls = [run for run in runs if run["case"] == CONTROL]
    at = sorted({each["iteration"] for run in runs for each in run["recoveries"]})
    # Where recoveries went on from differs by an iteration or so from run to run.
    limit_of_peaks = 2 * max(
        peak for run in controls for peak in peaks(run, references[run["seed"]], at)
    )
    limit = max(abs(run["validation"] - references[run["seed"]]["validation"]) for run in controls)
    for name in names:
        found = [run for run in runs if run["case"] == name and run["seed"] in references]
        if not found:
            continue
        differences = [run["validation"] - references[run["seed"]]["validation"] for run in found]
        jumped = [jump for run in found for jump in jumps(run, references[run["seed"]])]
        peaked = [
            peak
            for run in found
            for peak in peaks(
                run, references[run["seed"]], [each["iteration"] for each in run["recoveries"]]
            )
        ]
        is_harmless = fmean(differences) <= limit and (not peaked or max(peaked) <= limit_of_peaks)
        yield (
            name,
            f"{num_bytes(name):.2f}",
            spread([run["validation"] for run in found], ".4f"),
            "-" if name == REFERENCE else spread(differences, "+.4f"),
            spread(jumped, "+.3f") if jumped else "-",
            f"{max(peaked):+.3f}" if peaked else "-",
            ("yes" if is_harmless else "NO") if peaked else "-",
        )


def main() -> None:
    """Train what is missing, and print the table."""
    options = quality_options(__doc__.splitlines()[0], CONTROL, "exp_avg=bf16,")
    job, names, runs = run_cases(options, CASES)
    table = markdown_table(rows(runs, names), HEADERS)
    show([conditions(job, runs), table], options.output)


if __name__ == "__main__":
    main()
