"""Host memory of two replicas, with one region and with two at each peer.

    python -m benchmarks.replica_regions [--rounds N] [--iterations N] [--quick] [--output FILE.md]

Four ranks on four nodes of one machine train a small model, dense, with two replicas and a snapshot in every
iteration. The jobs take turns, round after round. "memory" are the bytes of a rank's own regions and of the
replicas that it keeps, for each parameter that it saves; "sent" what a rank sends in an iteration;
"complete" the share of iterations of which a snapshot was taken. Median (range) of the jobs.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conditions import conditions
from benchmarks.gradient_replicas import watched
from benchmarks.output import markdown_table, parse_options, show, spread
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, run_training

_NUM_RANKS = 4
_NODES = [f"n{rank}" for rank in range(_NUM_RANKS)]
_REGIONS = ("1", "2")
_STATE_BYTES = 12  # of a parameter: its master and two moments
_COMMAND = "python -m benchmarks.replica_regions"


def train(regions: str, num_iterations: int, folder: Path) -> dict[str, float]:
    """Train once with so many regions at each peer; return what the columns of the table show."""
    sizes = {"train_iters": num_iterations, "hidden_size": 128, "moe_ffn_hidden_size": 256}
    flags = [
        *(*model_flags(**sizes, mock_data=True), *layout_flags({"ep": 2})),
        *(
            *event_flags(folder / "events"),
            "--moe-ft-strategy",
            "dense",
            "--moe-ft-job-id",
            "bench",
        ),
        *("--moe-ft-memory-dir", str(folder / "memory"), "--moe-ft-replica-regions", regions),
    ]
    with watched(folder / "memory") as seen:
        run_training(flags, _NUM_RANKS, log_dir=folder / "log", nodes=_NODES).check()
    ranks = range(_NUM_RANKS)
    taken, sent, ended = (
        [line for rank in ranks for line in events(folder / "events", rank, name)]
        for name in ("snapshot", "replicate", "iteration")
    )
    saved_bytes = sum(line["bytes"] for line in taken) / len(taken)
    return {
        "memory": seen["memory"] / _NUM_RANKS / (saved_bytes / _STATE_BYTES),
        "megabytes": seen["memory"] / 1e6,
        "process": seen["process"] / 1e6,
        "sent": sum(line["state_bytes"] for line in sent) / len(ended) / 1e6,
        "complete": 100 * len(taken) / len(ended),
        "stall": 1000 * sum(line["stall_s"] for line in ended) / len(ended),
        "iteration": 1000 * sum(line["iteration_s"] for line in ended) / len(ended),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Run the jobs and print the table."""
    parser = argparse.ArgumentParser(prog=_COMMAND)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=30, help="of a job")
    options = parse_options(parser, words, rounds=1, iterations=8)
    found: dict[str, list[dict[str, float]]] = {regions: [] for regions in _REGIONS}
    for _ in range(options.rounds):
        for regions, runs in found.items():
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                runs.append(train(regions, options.iterations, Path(folder)))
    columns = {
        "memory": "memory, bytes per parameter",
        "megabytes": "all ranks, MB",
        "process": "largest process, MB",
        "sent": "sent, MB",
        "complete": "complete, %",
        "stall": "stall, ms",
        "iteration": "iteration, ms",
    }
    rows = [
        (regions, *(spread([each[key] for each in runs], ".1f") for key in columns))
        for regions, runs in found.items()
    ]
    say = conditions("4 ranks (ep 2), each on a node of its own; all nodes are this machine.")
    show([say, markdown_table(rows, ["regions", *columns.values()])], options.output)


if __name__ == "__main__":
    main()
