"""Jobs that load data with six processes a rank, as public recipes do: repairs, signals, and their deaths.

None of these processes outlives its rank, or the iterator that has started it, or keeps a file of the job.
"""

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe_ft.processes import has_ended
from tests.harness import DEADLINE_S
from tests.jobs import SPARSE, RepairedJob
from tests.kept_job import ROOT, KeptAgent

SIX = ("--num-workers", "6")
SCRIPT = str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_watching_loaders.py")


def noted(job: RepairedJob, rank: int) -> list[dict[str, Any]]:
    """Return what the script has noted of a rank."""
    text = (job.folder / f"loaders_{rank}").read_text()
    return [json.loads(line) for line in text.splitlines()]


def holders(*folders: Path) -> dict[int, list[str]]:
    """Return the files below folders that other processes have open or mapped, by process."""
    found: dict[int, list[str]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            paths = {line.split(maxsplit=5)[5] for line in lines if line.count(" /")}
            descriptors = Path(f"/proc/{process.pid}/fd")
            paths |= {os.readlink(descriptors / name) for name in os.listdir(descriptors)}
            held = [each for each in paths if each.startswith(tuple(map(str, folders)))]
            if held and process.pid != os.getpid():
                found[process.pid] = held
    return found


def check_nothing_is_left(job: RepairedJob) -> None:
    """Check that all processes that ranks have noted have ended, and that nobody has files of the job."""
    all_noted = {
        pid
        for rank in range(job.num_ranks)
        for each in noted(job, rank)
        for pid in (each["rank"], *each["loaders"])
    }
    left = [pid for pid in all_noted if not has_ended(pid)]
    assert left == []
    assert holders(job.folder, job.memory_dir) == {}


# Python 3.12.1 once ended a rank here by a SIGSEGV in its garbage collector, after a SystemError of BytesIO.
@pytest.mark.rest
def test_replaced_rank_and_survivor_load_with_six_new_processes_and_leave_none(
    repaired: RepairedJob,
) -> None:
    repaired.run(
        "kill:1@4:in-step",
        strategy=SPARSE,
        layout={"ep": 2},
        num_ranks=2,
        extra=SIX,
        script=SCRIPT,
        env={"LOADERS_DIR": str(repaired.folder)},
    )
    repaired.check([1], [4], [{3}])
    for rank in range(2):
        lines = noted(repaired, rank)
        # Megatron has six for training, evaluations and tests each, whether it evaluates or not.
        assert [len(each["loaders"]) for each in lines] == [18] * len(lines)
        replaced = {*lines[0]["loaders"]} - {*lines[-1]["loaders"]}
        assert len(replaced) == (18 if rank == 1 else 6), "those of training read from elsewhere"
        assert (lines[0]["rank"] == lines[-1]["rank"]) == (rank == 0)
    check_nothing_is_left(repaired)


@pytest.mark.rest
def test_job_whose_every_process_gets_sigterm_saves_its_state_and_continues_from_there(
    repaired: RepairedJob,
) -> None:
    repaired.num_ranks = 2
    changes = {"train_iters": 40}
    flags = repaired.flags((), ("dense", "--moe-ft-breakpoints"), {"ep": 2}, SIX, changes)
    words = ["--ranks-per-node", "2", "--", SCRIPT, *flags]
    env = {"TORCHELASTIC_RUN_ID": "kept", "LOADERS_DIR": str(repaired.folder)}
    agent = KeptAgent(words, repaired.folder / "log", env)
    try:
        repaired.wait_for_iteration(3)
        for each in agent.processes():  # as SLURM does
            each.send_signal(signal.SIGTERM)
        assert agent.wait() != 0
        check_nothing_is_left(repaired)
        points = [repaired.events("breakpoint", rank)[-1]["iteration"] for rank in range(2)]
        again = KeptAgent(words, repaired.folder / "log", env)
        try:
            assert again.wait(DEADLINE_S) == 0, (repaired.folder / "log").read_text()[-3000:]
        finally:
            again.kill()
    finally:
        agent.kill()
    targets = [repaired.events("recovery", rank)[-1]["target_iteration"] for rank in range(2)]
    assert targets == [max(points)] * 2
    assert repaired.digests() == repaired.reference()
    check_nothing_is_left(repaired)


@pytest.mark.rest
def test_death_of_a_process_that_loads_data_is_named_and_the_job_starts_again(
    repaired: RepairedJob,
) -> None:
    result = repaired.run(
        layout={"ep": 2},
        num_ranks=2,
        extra=SIX,
        script=SCRIPT,
        env={"LOADERS_DIR": str(repaired.folder), "KILL_LOADER": "1@4"},
        max_restarts=1,
    )
    assert result.num_restarts == 1
    assert re.search(r"DataLoader worker \(pid\(?s?\)? \d+\)", result.log.read_text())
    assert repaired.digests() == repaired.reference()
    check_nothing_is_left(repaired)
