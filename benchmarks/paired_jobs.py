"""Cost of a flag to training: jobs with and without it take turns, on the CPU over gloo."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.output import spread
from benchmarks.sparse_jobs import Changes, JobFolder, job_folder
from tests.demo_model import model_flags
from tests.harness import Train, events, run_training

LARGE: Changes = {
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "moe_ffn_hidden_size": 1024,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "micro_batch_size": 2,
    "global_batch_size": 8,
}
FIRST_ITERATION = 3  # those before are slower in each process
COST_HEADERS = ("iteration without, s", "with, s", "overhead")
_DEADLINE_S = 600.0


def iteration_times(
    job: JobFolder,
    changes: Changes,
    num_ranks: int,
    num_iterations: int,
    flags: Sequence[str],
    train: Train | None = None,
) -> list[float]:
    """Train the demo model with strategy `dense`; return seconds of rank 0's iterations.

    Args:
        changes: to the model.
        flags: layout, data, and what else the job has.
        train: what ranks run in place of pretrain_gpt_moe.py.
    """
    words = [
        *model_flags(**{**changes, "train_iters": num_iterations}),
        *flags,
        *("--moe-ft-event-log", str(job.events)),
        *job.strategy_flags("dense"),
    ]
    run_training(
        words, num_ranks, log_dir=job.log / "logs", deadline_s=_DEADLINE_S, train=train
    ).check()
    return [line["iteration_s"] for line in events(job.events, 0, "iteration")][FIRST_ITERATION:]


def in_turns(
    folder: Path, num_pairs: int, train: Callable[[JobFolder, bool], float]
) -> tuple[list[float], list[float]]:
    """Return ``[pair]`` what jobs without the flag return, and those with it.

    Args:
        train: runs a job in its folder, with or without the flag.
    """
    results: dict[bool, list[float]] = {False: [], True: []}
    for number in range(num_pairs):
        for has_flag in (False, True) if number % 2 else (True, False):
            with job_folder(folder) as job:
                results[has_flag].append(train(job, has_flag))
    return results[False], results[True]


def cost_columns(without: Sequence[float], with_flag: Sequence[float]) -> tuple[str, ...]:
    """Return the columns of `COST_HEADERS`: iterations in seconds, and the quotients of pairs."""
    overhead = [after / before - 1 for before, after in zip(without, with_flag, strict=True)]
    return spread(without), spread(with_flag), spread(overhead, "+.1%")
