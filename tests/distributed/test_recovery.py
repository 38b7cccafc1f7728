"""The tier, the iteration and the run that a start recovers from, and when it must not recover."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.demo_model import event_flags
from tests.harness import digests, run_training
from tests.jobs import NUM_ITERATIONS, NUM_RANKS, TWO_NODES, CheckpointJob, refusal

OVERHEAD_LIMIT = 0.05


def test_undisturbed_run_takes_every_snapshot_and_leaves_its_last_state_on_storage_alone(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    job.run(storage=True, nodes=TWO_NODES).check()
    for rank in range(NUM_RANKS):
        assert job.events("degraded", rank) == []
        taken = [line["iteration"] for line in job.events("snapshot", rank)]
        assert taken == sorted(set(taken))
        assert taken[-1] == NUM_ITERATIONS
        assert [line["iteration"] for line in job.events("replicate", rank)] == taken
        times = [(each["idle_s"], each["iteration_s"]) for each in job.events("iteration", rank)]
        assert all(0.0 < idle_s < iteration_s for idle_s, iteration_s in times)
        assert job.events("persist", rank)[-1]["iteration"] == NUM_ITERATIONS
    assert job.digests() == expected
    assert not (job.memory_dir / "test").exists()
    assert (job.storage / f"iter_{NUM_ITERATIONS:07d}" / "manifest.json").exists()
    assert not (job.storage / "moe_ft.lock").exists()
    line = refusal(job.run("--lr", "5e-4", storage=True))
    assert "--lr: 0.001 there, 0.0005 now. It continues with its own" in line


@pytest.mark.rest
def test_finished_run_that_is_started_again_trains_nothing_and_has_the_last_state(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    job.run(storage=True).check()
    job.resume(storage=True)
    assert job.recovered() == [(NUM_ITERATIONS, NUM_ITERATIONS)]
    for rank in range(NUM_RANKS):
        assert len(job.events("iteration", rank)) == NUM_ITERATIONS
        assert len(job.events("state_digest", rank)) == 2
    assert job.digests() == expected


@pytest.mark.rest
def test_newest_state_wins_over_load_unless_the_user_says_so(
    job: CheckpointJob, expected: list[tuple[str, str]]
) -> None:
    saved = str(job.folder / "megatron")
    stock = [
        "--save",
        saved,
        "--save-interval",
        "2",
        "--load",
        saved,
        "--ckpt-format",
        "torch_dist",
    ]
    job.run(*stock, "--exit-interval", "3", storage=True).check()
    job.run(*stock, "--exit-interval", "4", storage=True).check()
    assert job.recovered() == [(3, 3)]
    result = job.run(*stock, "--moe-ft-recover-from", "load", storage=True).check()
    assert "Megatron keeps one random state for all expert-parallel ranks" in result.output(0)
    assert job.recovered() == [(3, 3)]
    assert job.events("start")[2]["iteration"] == 4
    # Stock --load gives all expert-parallel ranks one tracker state, so weights and moments are compared.
    assert [digest for digest, _ in job.digests()] == [digest for digest, _ in expected]


def test_automatic_interval_follows_from_measurements_and_is_the_same_on_all_ranks(
    job: CheckpointJob,
) -> None:
    board = job.folder / "tensorboard"
    flags = ["--moe-ft-interval", "auto", "--train-iters", "9", "--tensorboard-dir", str(board)]
    flags += ("--moe-ft-overhead-limit", str(OVERHEAD_LIMIT))
    job.run(*flags, "--exit-interval", "9").check()
    chosen = [job.events("interval", rank)[0] for rank in range(NUM_RANKS)]
    measured = ("interval", "iteration_s", "overhead_s", "completion_s")
    own, other = ([line[name] for name in measured] for line in chosen)
    assert own == other
    interval, iteration_s, overhead_s, completion_s = own
    least_s = max(overhead_s / OVERHEAD_LIMIT, completion_s, iteration_s)
    # The smallest number of iterations that take as long.
    assert interval - 1 < least_s / iteration_s <= interval
    assert (
        job.events("snapshot")[0]["iteration"] == 5
    )  # after two warm-up and three quiet iterations
    tags = EventAccumulator(str(board)).Reload().Tags()["scalars"]
    assert {"moe-ft/stall_s", "moe-ft/snapshot/seconds", "moe-ft/interval/interval"} <= set(tags)


@pytest.mark.rest
def test_run_whose_data_are_listed_in_a_file_and_whose_batch_ramps_up_is_recovered(
    job: CheckpointJob,
) -> None:
    words, path, log = job.base, job.folder / "data.txt", job.folder / "without"
    place = words.index("--data-path")
    path.write_text(words[place + 1])
    words[place : place + 2] = ["--data-args-path", str(path)]
    ramp = ("--rampup-batch-size", "8", "4", "64")
    run_training([*words, *ramp, *event_flags(log)], NUM_RANKS, log_dir=log).check()
    job.run_with_faults("kill:1@4:before-step", flags=ramp)
    ((restored, _),) = job.recovered()
    assert restored in range(2, 5)
    assert job.digests() == digests(log, NUM_RANKS)
