"""A loop on `megatron.core` alone is killed and recovers: examples/custom_loop.py, with each strategy."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.example_loop import run_example, run_up_to_the_end, run_with_overlap
from tests.harness import JobResult, events, run_ranks
from tests.pipelined_loop import run_pipelined
from tests.ports import free_port
from tests.settled import SETTLED
from tests.unit.source import ROOT

NUM_RANKS, KILL_AT = 2, 5
Digests = list[str]


def digests_in(outputs: Sequence[str]) -> Digests:
    """Return the digests that the ranks have printed, by rank."""
    found = dict(re.findall(r"^rank (\d) digest ([0-9a-f]{64})$", "\n".join(outputs), re.M))
    return [found[str(rank)] for rank in range(NUM_RANKS)]


def digests_of(result: JobResult) -> Digests:
    return digests_in([result.output(rank) for rank in range(NUM_RANKS)])


class ExampleJob:
    """The example with a memory directory and an event log of its own."""

    def __init__(self, folder: Path, memory_dir: Path) -> None:
        self.target: Callable[[list[str]], None] = run_example
        self.folder, self.events_dir = folder, folder / "events"
        self.words = [
            *("--event-log", str(self.events_dir)),
            *("--setting", f"memory_dir={memory_dir}", "--setting", "fault_report_grace_s=0.5"),
        ]

    def run(self, *settings: str, kill_at: int | None = None) -> JobResult:
        """Start the example once; rank 1 kills itself the first time that it comes to an iteration."""
        words = [*self.words, *(f"--setting={each}" for each in settings)]
        words += [] if kill_at is None else ["--kill-at", str(kill_at)]
        log_dir = self.folder / f"start_{len(list(self.folder.glob('start_*')))}"
        return run_ranks(self.target, NUM_RANKS, words, log_dir=log_dir)

    def run_with_a_kill(self, *settings: str) -> Digests:
        """Start the example, which is killed, and again; return the digests of the end."""
        killed = self.run(*settings, kill_at=KILL_AT)
        assert killed.exit_codes[1] == -9, killed.output(1)
        return digests_of(self.run(*settings, kill_at=KILL_AT).check())

    def recoveries(self) -> list[tuple[int, int, int, set[str]]]:
        """Return by rank what it has recovered: restored, target, lost tokens and tiers."""
        found = []
        for rank in range(NUM_RANKS):
            (line,) = events(self.events_dir, rank, "recovery")
            iterations = (line["restored_iteration"], line["target_iteration"])
            found.append((*iterations, line["lost_tokens"], set(line["sources"])))
        return found


@pytest.fixture
def example(tmp_path: Path, memory_dir: Path) -> ExampleJob:
    return ExampleJob(tmp_path, memory_dir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Digests:
    """Return the digests of the example without checkpoints and faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = run_ranks(run_example, NUM_RANKS, ["--setting=strategy=none"], log_dir=folder)
    return digests_of(result.check())


@pytest.mark.usefixtures("settled")
def test_killed_loop_replays_a_window_from_memory_and_ends_as_without_a_failure(
    example: ExampleJob, undisturbed: Digests
) -> None:
    assert example.run_with_a_kill("strategy=sparse", "window=3") == undisturbed
    assert example.recoveries() == [(1, 3, 0, {"memory"})] * NUM_RANKS


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
@pytest.mark.parametrize("target", [run_with_overlap, run_pipelined])
def test_replay_of_another_loop_ends_as_without_a_failure(
    target: Callable[[list[str]], None], example: ExampleJob
) -> None:
    example.target = target
    undisturbed = digests_of(example.run("strategy=none").check())
    assert example.run_with_a_kill("strategy=sparse", "window=3") == undisturbed
    assert example.recoveries() == [(1, 3, 0, {"memory"})] * NUM_RANKS


@pytest.mark.rest
def test_rank_at_the_end_of_its_training_leaves_a_breakpoint_if_another_has_died_there(
    example: ExampleJob, undisturbed: Digests
) -> None:
    example.target = run_up_to_the_end
    assert example.run("interval=5").exit_codes[1] == -9
    (left,) = events(example.events_dir, 0, "breakpoint")
    assert (left["iteration"], left["reason"], left["problem"]) == (8, "the end of training", "")
    example.target = run_example
    assert digests_of(example.run("interval=5").check()) == undisturbed
    assert example.recoveries() == [(5, 5, 0, {"memory"})] * NUM_RANKS  # rank 1 has nothing newer


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_killed_loop_recovers_a_dense_snapshot_and_ends_as_without_a_failure(
    example: ExampleJob, undisturbed: Digests
) -> None:
    assert example.run_with_a_kill() == undisturbed
    for restored, target, lost_tokens, tiers in example.recoveries():
        assert restored == target in (KILL_AT - 1, KILL_AT)
        assert (lost_tokens, tiers) == (0, {"memory"})


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_killed_loop_recovers_parts_of_its_experts_and_counts_the_tokens_that_it_lost(
    example: ExampleJob,
) -> None:
    example.run_with_a_kill("strategy=partial", "k_snapshot=1")
    one, other = example.recoveries()
    restored, target, lost_tokens, tiers = one
    assert one == other
    assert restored == target in (KILL_AT - 1, KILL_AT)
    # 128 tokens times top-2 in each of 2 layers and iteration; a quarter of the experts is new.
    assert 0 < lost_tokens < target * 128 * 2 * 2 * NUM_RANKS
    assert tiers == {"memory"}


@pytest.mark.rest
def test_restart_under_torchrun_recovers_from_storage_when_memory_is_lost(
    tmp_path: Path, memory_dir: Path, undisturbed: Digests
) -> None:
    words = [
        *("--event-log", str(tmp_path / "events"), "--kill-at", str(KILL_AT)),
        *(f"--setting=persist_dir={tmp_path / 'storage'}", "--setting=persist_interval=1"),
    ]
    outputs = []
    for start in range(2):
        # The second start has another memory directory, and so finds nothing in memory.
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)),
            *("--master-port", str(free_port()), "-m", "tests.example_loop", *words),
            f"--setting=memory_dir={memory_dir / str(start)}",
        ]
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
            SETTLED: "1",
        }
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        outputs.append(done.stdout)
        assert (done.returncode == 0) == (start == 1), done.stderr[-3000:]
    assert digests_in(outputs[1:]) == undisturbed
    for rank in range(NUM_RANKS):
        (line,) = events(tmp_path / "events", rank, "recovery")
        assert set(line["sources"]) == {"storage"}
        assert 1 <= line["target_iteration"] <= KILL_AT
