"""Checks against silent corruption: what they cost, what they find, and how often they are wrong.

    python -m benchmarks.corruption_checks [--pairs N] [--iterations N] [--flips N] [--clean N]
        [--parts cost flips clean] [--quick] [--output FILE.md]

cost    jobs with and without a check take turns, as in flag_costs.py
flips   one bit flips on a rank in three: in a job without a check, in one that repeats every second
        iteration, and in one that compares weights every second iteration. "in the end" is whether the state
        of the job without a check ended with other bits: what would have been saved
clean   iterations of runs of the covering array (tests/covering_array.txt), without faults, all checked in
        both ways, and how many of their runs were ended by a check
"""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.flag_costs import FLAGS, HEADERS, cost_rows
from benchmarks.jobs import DEADLINE_S, data_folder
from benchmarks.output import conditions, markdown_table, read_options, show
from moe_ft.loop.refusing import EXIT_CORRUPTION
from tests.covering_array import Case, case_of, runs
from tests.demo_model import event_flags, model_flags
from tests.faulty_case import job_flags
from tests.harness import digests, events, run_training
from tests.references import Place, References

_ITERATIONS, _WEIGHTS = "--moe-ft-check-iterations", "--moe-ft-check-weights"
_NUM_RANKS = 3
_EVERY = 2
_TARGETS = ("weights", "gradients", "activation", "moment")
_BITS = {"weights": (6, 0), "gradients": (22, 0), "activation": (6, 0), "moment": (22, 0)}


def flips(num_flips: int, folder: Path) -> str:
    """Return the table of what finds a flipped bit, and how late."""
    rows = []
    flags = model_flags(global_batch_size=12, train_iters=8, mock_data=True, hidden_dropout=0.1)
    expected = References(folder / "references").digests(flags, _NUM_RANKS)
    for target in _TARGETS:
        for bit in _BITS[target]:
            for number in range(num_flips):
                fault = f"flip:{number % _NUM_RANKS}@{3 + number % 4}:{target}:{bit}"
                plain = _flip(flags, fault, (), folder)
                found = [
                    _flip(flags, fault, (f, str(_EVERY)), folder) for f in (_ITERATIONS, _WEIGHTS)
                ]
                where = events(plain, number % _NUM_RANKS, "fault_injected")[0]
                ends = digests(plain, _NUM_RANKS) != expected
                late = [_found(each, where["iteration"], number % _NUM_RANKS) for each in found]
                rows.append(
                    (target, where["parameter"], bit, *late, "other bits" if ends else "same")
                )
    return markdown_table(
        rows, ("target", "of", "bit", "iteration check", "weights check", "in the end")
    )


def _flip(flags: Sequence[str], fault: str, check: Sequence[str], folder: Path) -> Path:
    """Run a job with a fault, and return its event log."""
    place = Path(tempfile.mkdtemp(dir=folder))
    words = [*flags, *event_flags(place / "events"), "--moe-ft-inject-fault", fault, *check]
    result = run_training(words, _NUM_RANKS, log_dir=place, deadline_s=DEADLINE_S)
    assert {*result.exit_codes} == {0} or EXIT_CORRUPTION in result.exit_codes, result.output(0)
    return place / "events"


def _found(log: Path, flipped_in: int, rank: int) -> str:
    """Return who was named, and how many iterations after the flip."""
    lines = events(log, 0, "corruption")
    if not lines:
        return "not found"
    (line,) = lines
    named = f"rank {' or '.join(map(str, line['ranks']))}"
    right = "" if rank in line["ranks"] else " (wrong)"
    return f"{named}{right}, {line['iteration'] - flipped_in} later"


def clean_cases() -> Iterator[Case]:
    """Yield runs of the covering array that differ in what they train."""
    known = set()
    for run in [*runs("test"), *runs("test-all")]:
        case = case_of(run)
        what = (case.layout, case.precision, case.optimizer, case.model, case.feature)
        if case.feature != "slots" and what not in known:
            known.add(what)
            yield case


def clean(num_iterations: int, data: Sequence[str], folder: Path) -> str:
    """Return the table of runs without faults, until so many iterations were checked."""
    counts: dict[str, list[int]] = {}
    with_splits = [*data, "--split", "90,5,5"]  # some evaluate
    place = Place(with_splits, folder, folder, References(folder / "references"))
    cases = [*clean_cases()]
    each = max(8, -(-num_iterations // len(cases)))
    for case in cases:
        log = Path(tempfile.mkdtemp(dir=folder))
        words = [
            *job_flags(case, place),
            *event_flags(log / "events"),
            _ITERATIONS,
            "1",
            _WEIGHTS,
            "1",
        ]
        if "--train-iters" in words:
            words[words.index("--train-iters") + 1] = str(each)
        result = run_training(words, case.world_size, log_dir=log, deadline_s=DEADLINE_S)
        count = counts.setdefault(case.layout, [0, 0, 0])
        count[0] += 1
        count[1] += len({line["iteration"] for line in events(log / "events", 0, "iteration")})
        count[2] += len(events(log / "events", 0, "corruption"))
        assert {*result.exit_codes} == {0} or EXIT_CORRUPTION in result.exit_codes, result.output(0)
        if sum(done for _, done, _ in counts.values()) >= num_iterations:
            break
    rows = [(layout, *count) for layout, count in counts.items()]
    rows.append(("all", *map(sum, zip(*counts.values(), strict=True))))
    return markdown_table(rows, ("layout", "runs", "checked iterations", "false alarms"))


def main() -> None:
    """Measure, and print the tables."""
    options = read_options(
        pairs=(3, 1),
        iterations=(19, 7, "of each job that is timed"),
        flips=(3, 1, "of each target and bit"),
        clean=(10_000, 8, "iterations without a fault"),
        parts=(["cost", "flips", "clean"],),
    )
    parts = [conditions(f"{options.pairs} pairs of {options.iterations} iterations.")]
    with data_folder() as (folder, data):
        given = FLAGS["checks"], data, folder, options.pairs, options.iterations
        measured = {
            "cost": lambda: markdown_table(cost_rows(*given), HEADERS),
            "flips": lambda: flips(options.flips, folder),
            "clean": lambda: clean(options.clean, data, folder),
        }
        for part in options.parts:
            parts.append(measured[part]())
            print(parts[-1], file=sys.stderr, flush=True)  # a later one may fail
    show(parts, options.output)


if __name__ == "__main__":
    main()
