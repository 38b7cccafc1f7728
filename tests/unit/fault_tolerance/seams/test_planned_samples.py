"""Samples that the planned run reads and that an iteration leaves out, compared with Megatron's loop."""

from argparse import Namespace
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as calculators
from megatron.training import global_vars

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop, planned_samples, samples_of


@pytest.fixture(autouse=True)
def calculator() -> Iterator[None]:
    yield
    calculators.destroy_num_microbatches_calculator()


def loop(num_iterations: int) -> int:
    """Return the samples that Megatron's loop consumes, as its own calculator says."""
    consumed = 0
    for _ in range(num_iterations):
        calculators.update_num_microbatches(consumed, consistency_check=False)
        consumed += calculators.get_current_running_global_batch_size()
    return consumed


def flags(**changes: object) -> Namespace:
    """Make Megatron's arguments, and its calculator from them."""
    known: dict[str, object] = {
        "train_iters": 10,
        "train_samples": None,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "data_parallel_size": 2,
        "decrease_batch_size_if_needed": False,
        "step_batch_size_schedule": None,
        "seq_length": 32,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    args = Namespace(**{**known, **changes})
    calculators.init_num_microbatches_calculator(
        rank=1,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    return args


@pytest.mark.parametrize("num_iterations", [1, 3, 4, 10, 100])
def test_run_with_a_schedule_of_batch_sizes_reads_what_the_loop_reads(num_iterations: int) -> None:
    schedule = "0:8 768:16 2816:32"  # in tokens; the batch that passes a threshold is not cut
    args = flags(train_iters=num_iterations, step_batch_size_schedule=schedule)
    assert planned_samples(args) == loop(num_iterations)


def test_run_whose_batches_are_smaller_than_asked_for_reads_what_the_loop_reads() -> None:
    args = flags(global_batch_size=11, decrease_batch_size_if_needed=True)
    assert planned_samples(args) == loop(10) == 80


def test_run_given_in_samples_reads_whole_batches_only() -> None:
    assert planned_samples(flags(train_samples=85, train_iters=85 // 8)) == loop(10) == 80


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40)), max_size=5), st.integers(0, 60))
def test_samples_of_any_schedule_are_those_of_its_iterations_one_by_one(
    steps: list[tuple[int, int]], num_iterations: int
) -> None:
    schedule, start = [(0, 7)], 0
    for length, batch_size in steps:  # short ones are jumped over by a large batch
        start += length
        schedule.append((start, batch_size))
    consumed = 0
    for _ in range(num_iterations):
        consumed += [size for start, size in schedule if start <= consumed][-1]
    assert samples_of(schedule, num_iterations) == consumed


@pytest.mark.parametrize(("num_samples", "expected"), [(8, 3 + 3), (0, 3)])
def test_samples_that_an_iteration_left_out_are_in_its_record_also_before_the_loop_adds_them(
    num_samples: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = flags(global_batch_size=11, decrease_batch_size_if_needed=True, skipped_train_samples=3)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    assert MegatronLoop().counters(num_samples).skipped_train_samples == expected
