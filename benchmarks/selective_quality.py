"""Validation loss of a small model through four faults: `selective` by both rules, `partial`, and none.

    python -m benchmarks.selective_quality [DIR_OR_FILES ...] --folder DIR [--output FILE.md]
    python -m benchmarks.selective_quality --quick

The runs are benchmarks/quality_runs.py's, with four faults unless told otherwise, and the columns those of
benchmarks/partial_quality.py. All cases save two experts of a rank in a snapshot, of 16.
"""

from benchmarks.output import markdown_table, show
from benchmarks.partial_quality import CASE_HEADERS, case_rows, partial
from benchmarks.quality_runs import Case, conditions, quality_options, run_cases

INTERVAL = 4
_BUDGET = "1198848"  # of a rank of that model: the state outside experts, and two experts


def selective(rule: str, *more: str) -> tuple[str, ...]:
    """Return the flags of the strategy with a rule."""
    budget = ("--moe-ft-local-budget", _BUDGET, "--moe-ft-selective-rule", rule)
    every = ("--moe-ft-interval", str(INTERVAL))
    return ("--moe-ft-strategy", "selective", *every, *budget, *more)


CASES: dict[str, Case] = {
    "no faults": Case(fault=""),
    "no faults, lr x 1.001": Case(fault="", lr_factor=1.001),
    "partial, K=1": Case(flags=partial(INTERVAL, 1)),
    "selective, Algorithm 1": Case(flags=selective("paper")),
    "selective, tokens x age": Case(flags=selective("age")),
}


def main() -> None:
    """Train what is missing, and print the table."""
    options = quality_options(__doc__.splitlines()[0], "tokens x age")
    job, names, runs = run_cases(options, CASES)
    show(
        [conditions(job, runs), markdown_table(case_rows(runs, names), CASE_HEADERS)],
        options.output,
    )


if __name__ == "__main__":
    main()
