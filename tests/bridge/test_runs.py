"""Jobs under Megatron-Bridge write what they do, are refused before any work, and continue where they were.

Those that die are in test_restarts.py and test_repairs.py.
"""

from collections.abc import Sequence

import pytest
from megatron.training import training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from moe_ft.loop.refusing import EXIT_CORRUPTION, EXIT_REFUSED
from tests.bridge.jobs import EP2, RestartedJob, train_protected
from tests.harness import run_with_restarts
from tests.jobs import NUM_REPAIRED, fault_flags

ITERATIONS = range(1, NUM_REPAIRED + 1)


def test_event_log_and_tensorboard_have_the_same_losses_and_numbers_of_snapshots(
    restarted: RestartedJob,
) -> None:
    board = restarted.folder / "board"
    own = (f"logger.tensorboard_dir={board}", "logger.tensorboard_log_interval=1")
    restarted.set_model(2, EP2, *own)
    restarted.run().check()
    read = EventAccumulator(str(board))
    read.Reload()
    losses = {each.step: each.value for each in read.Scalars("lm loss")}
    lines = restarted.events("iteration", 1)
    assert [line["iteration"] for line in lines] == list(ITERATIONS)
    for line in lines:
        assert line["loss"] == pytest.approx(losses[line["iteration"]])
        assert line["num_tokens"] == 8 * 32
    numbers = {name for name in read.Tags()["scalars"] if name.startswith("moe-ft/")}
    assert numbers
    (start,) = restarted.events("start")
    assert start["megatron_bridge"] == "0.6.2"


@pytest.mark.parametrize(
    "strategy",
    [("--moe-ft-interval", "5"), ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")],
    ids=["dense", "sparse"],
)
def test_job_that_is_told_to_end_continues_in_the_iteration_in_which_it_was(
    restarted: RestartedJob, strategy: Sequence[str]
) -> None:
    flags = ("--moe-ft-breakpoints", *strategy, *fault_flags(["terminate:0@5:backward"]))
    results = run_with_restarts(
        restarted.flags(*flags),
        2,
        log_dir=restarted.folder,
        max_restarts=1,
        train=restarted.train,
    )
    assert len(results) == 2
    results[-1].check()
    for rank in range(2):
        (recovery,) = restarted.events("recovery", rank)
        assert (recovery["target_iteration"], recovery["replayed_iterations"]) in ((5, 0), (6, 0))
    assert restarted.digests() == restarted.reference()


def train_beside_another_loop(words: Sequence[str]) -> None:
    """Run the script where the loop of Megatron-LM is not the one that moe_ft knows."""
    training.train_step = lambda batch: None
    train_protected(words)


def test_loop_of_megatron_lm_need_not_fit(restarted: RestartedJob) -> None:
    restarted.set_model(2, EP2)
    restarted.train = train_beside_another_loop
    restarted.run().check()
    assert restarted.digests() == restarted.reference()


@pytest.mark.parametrize(
    ("flags", "overrides", "problem"),
    [
        (("--moe-ft-strategi", "dense"), (), "--moe-ft-strategi"),
        (("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "5"), (), "--moe-ft-k-snapshot"),
        ((), ("+moe_ft.strategy=sparse",), "+moe_ft.strategy=sparse would be ignored"),
        ((), ("dataset.dataloader_type=external",), "dataset.dataloader_type=external is not"),
        ((), ("optimizer.optimizer_cuda_graph=true",), "optimizer.optimizer_cuda_graph=true is"),
    ],
    ids=["unknown flag", "more experts than there are", "override", "data", "flag as a field"],
)
def test_settings_that_cannot_work_are_refused_with_one_line(
    restarted: RestartedJob, flags: Sequence[str], overrides: Sequence[str], problem: str
) -> None:
    restarted.set_model(2, EP2, *overrides)
    result = restarted.run(*flags)
    assert result.exit_codes[0] == EXIT_REFUSED, result.output(0)[-2000:]
    (line,) = [line for line in result.output(0).splitlines() if ": error: " in line]
    assert problem in line


def test_rank_that_computes_wrongly_is_named(restarted: RestartedJob) -> None:
    restarted.set_model(2, EP2)
    flip = ("--moe-ft-inject-fault", "flip:1@3:activation")
    result = restarted.run("--moe-ft-strategy", "none", "--moe-ft-check-iterations", "2", *flip)
    assert EXIT_CORRUPTION in result.exit_codes, result.output(0)
    assert [each["ranks"] for each in restarted.events("corruption")] == [[1]]
