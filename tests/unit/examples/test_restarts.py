"""Batch scripts wait, give up and exclude nodes as their starts go.

SLURM's commands are stand-ins here, and so are ranks; tests/slurm has the real ones. What follows from exit
codes is in test_slurm.py.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.slurm.last_start import failed_nodes, newest_iteration
from tests.unit.examples.model_files import ROOT

Named = tuple[str, dict[str, object]]  # event and its fields
LIBRARY = ROOT / "examples" / "slurm" / "restarts.sh"
COMMANDS = {
    # Each start takes the next line of `starts`: the exit code, the iteration, and the node to blame, or -.
    "srun": """case "$*" in
        *" keep "*)
            read -r code status <starts
            sed -i 1d starts
            [ "$status" = - ] || { echo "$status" && echo n3 && echo n1; } >run/status.new
            [ "$status" = - ] || mv run/status.new run/status
            exit "$code" ;;
        *is_living*) for node in $(<living); do echo "is_living $node"; done ;;
        "ranks "*)
            read -r code iteration node <starts
            sed -i 1d starts
            echo "ran on ${SLURM_HOSTFILE:+$(paste -s -d , "$SLURM_HOSTFILE")}"
            printf '{"time": %d, "event": "iteration", "iteration": %d}\\n' \
                "$(date +%s)" "$iteration" >>run/events/rank_00000.jsonl
            [ "$node" = - ] || echo "srun: error: $node: task 1: Segmentation fault" >&2
            exit "$code" ;;
    esac""",
    "scontrol": """case "$1 $2" in
        "show hostnames") tr ' ' '\\n' <allocated ;;
        "show job") echo "JobId=77 ExcNodeList=n8 Features=(null)" ;;
        "show node") echo "NodeName=$3 NodeAddr=$3 Port=1" ;;
        "requeue "*) echo requeued ;;
        "update "*) echo "update $*" && kill -KILL "$PPID" ;;
    esac""",
    "squeue": "",
    "sleep": 'echo "slept $1"',
}


@dataclass
class Job:
    """Job of three nodes, of which two train, with stand-ins for everything that is not the library."""

    folder: Path

    def run(
        self, *starts: str, job: int = 77, command: str = "ranks --flags", **variables: str
    ) -> str:
        """Run the batch script with ranks that end so; return what it prints."""
        (self.folder / "starts").write_text("".join(f"{start}\n" for start in starts))
        log = self.folder / "log"
        given = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "RUN_DIR": str(self.folder / "run"),
            "SLURM_JOB_ID": str(job),
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURMD_NODENAME": "n1",
            "TRAIN_NODES": "2",
        }
        given |= variables
        words = ["bash", "-c", f"set -euo pipefail; . {LIBRARY}; with_restarts srun {command}"]
        with log.open("w") as output:
            process = subprocess.Popen(
                words, env=given, stdout=output, stderr=output, start_new_session=True
            )
            try:
                self.code = process.wait(120)
            finally:  # as SLURM ends what a job leaves
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        said = log.read_text()
        left = (self.folder / "starts").read_text()
        assert not left, f"these starts did not happen: {left}\n{said}"
        return said


@pytest.fixture
def job(tmp_path: Path) -> Job:
    for folder in ("bin", "run", "run/events"):
        (tmp_path / folder).mkdir()
    for name, body in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\ncd "{tmp_path}" || exit 1\n{body}\n')
        path.chmod(0o700)
    (tmp_path / "allocated").write_text("n1 n2 n3")
    (tmp_path / "living").write_text("n1 n2 n3")
    return Job(tmp_path)


def pauses(said: str) -> list[str]:
    return [line.removeprefix("slept ") for line in said.splitlines() if line.startswith("slept ")]


def test_start_in_vain_is_followed_by_a_pause_that_doubles_and_the_last_by_the_end(
    job: Job,
) -> None:
    said = job.run("1 10 -", "1 10 -", "1 12 -", *["1 12 -"] * 3, MAX_VAIN_STARTS="3")
    assert job.code == 1
    # The first start and the third have brought training further.
    assert pauses(said) == ["60", "60", "120"]
    assert "3 starts in a row have finished no iteration beyond 12: MAX_VAIN_STARTS=3" in said


def test_starts_in_vain_are_counted_on_after_a_requeue_and_anew_in_another_job(job: Job) -> None:
    job.run("1 0 -", "1 0 -", MAX_VAIN_STARTS="2")
    said = job.run("1 0 -", MAX_VAIN_STARTS="3", SLURM_RESTART_COUNT="1")
    assert "3 starts in a row" in said
    assert "2 starts in a row" in job.run("1 0 -", "1 0 -", job=78, MAX_VAIN_STARTS="2")


def test_refused_flags_and_failures_of_storage_are_not_starts_in_vain(job: Job) -> None:
    said = job.run("3 0 -", "4 0 -", "4 0 -", "2 0 -", MAX_VAIN_STARTS="1")
    assert job.code == 2
    assert pauses(said) == ["60"] * 3


def test_node_on_which_starts_fail_twice_in_an_hour_gives_its_place_to_a_spare(job: Job) -> None:
    said = job.run("139 5 n2", "139 6 n2", "0 9 -")
    assert "failed on n2 (the first task to end: Segmentation fault), failure 2 there" in said
    assert "n2 is excluded from now on. To let it back in, remove its line from" in said
    assert "n3 replaces n2" in said
    assert "ran on n1,n3" in said.splitlines()
    assert (job.folder / "run" / "excluded_nodes").read_text().startswith("n2 ")


def test_nodes_that_were_excluded_in_vain_are_let_back_in_at_the_end(job: Job) -> None:
    (job.folder / "run" / "excluded_nodes").write_text("n9 1000000000 long ago\n")
    said = job.run("139 0 n2", "139 0 n2", "139 0 n3", MAX_VAIN_STARTS="3")
    assert "n2: no longer excluded, since starts without it have failed too" in said
    assert (job.folder / "run" / "excluded_nodes").read_text() == "n9 1000000000 long ago\n"


def test_excluded_node_without_a_spare_is_left_out_when_the_job_returns_from_the_queue(
    job: Job,
) -> None:
    (job.folder / "living").write_text("n1 n2")
    said = job.run("139 5 n2", "139 6 n2")
    assert "fewer than 2 nodes are left: the job goes back to the queue\nrequeued\n" in said
    assert "update JobId=77 ExcNodeList=n2,n8" in said, "n8 is that of sbatch --exclude"
    # SLURM gives it again: it is used, rather than to go back and forth.
    said = job.run("0 9 -", SLURM_RESTART_COUNT="1")
    assert "SLURM has given no other nodes than n2, which the job uses again" in said
    # A person lets it back in.
    (job.folder / "run" / "excluded_nodes").write_text("")
    assert "excluded" not in job.run("0 9 -", job=78)


def test_agents_that_report_decide_the_exit_code_and_the_nodes_and_else_srun_does(
    job: Job,
) -> None:
    agents = "python -m moe_ft keep --"
    # srun fails because of a node that is lost; training is over all the same.
    said = job.run("1 0", command=agents)
    assert job.code == 0 and "start 0 on n1 n2, with 1 spares" in said
    assert (job.folder / "run" / "nodes").read_text() == "n3\nn1\n"
    job.run("2 -", command=agents)
    assert job.code == 2, "no agent has run"


def test_failures_more_than_an_hour_apart_exclude_no_node(job: Job) -> None:
    (job.folder / "run" / "node_failures").write_text("n2 1000000000 long ago\n")
    said = job.run("139 5 n2", "0 9 -")
    assert "failure 1 there within an hour" in said and "excluded" not in said


def test_starts_that_fail_on_more_than_half_of_the_nodes_blame_none(job: Job) -> None:
    words: list[Named] = [("stopped", {"reason": "SIGTERM", "silent_ranks": [0, 1]})]
    write_events(job.folder / "run" / "events", {2: words}, world_size=3)
    said = job.run("1 5 -", "0 6 -", TRAIN_NODES="3")
    assert "failed on" not in said


def write_events(folder: Path, by_rank: dict[int, Sequence[Named]], *, world_size: int = 4) -> None:
    """Write event logs of a start at second 2,000,000,000, each event a second after the one before."""
    for rank, events in by_rank.items():
        lines: list[Named] = [("start", {"world_size": world_size}), *events]
        with (folder / f"rank_{rank:05d}.jsonl").open("a") as file:
            for second, (event, fields) in enumerate(lines):
                line = {
                    "event": event,
                    "time": 2e9 + second + rank / 10,
                    "incarnation": 3,
                    **fields,
                }
                file.write(json.dumps(line) + "\n")
            file.write('{"event": "iter')


LOST: Named = ("stopped", {"reason": "connection lost", "silent_ranks": []})
TOLD: Named = ("stopped", {"reason": "SIGTERM: told to end", "silent_ranks": None})
OWN: Named = ("stopped", {"reason": "CUDA error: ECC", "silent_ranks": []})
WORKED: Named = ("iteration", {"iteration": 7})


@pytest.mark.parametrize(
    ("by_rank", "blamed"),
    [
        pytest.param(
            {0: [("stopped", {"reason": "x", "silent_ranks": [2]})], 1: [TOLD]}, {1}, id="died"
        ),
        pytest.param(
            {0: [("stopped", {"reason": "x", "silent_ranks": [1]})], 1: [TOLD]}, {}, id="late"
        ),
        pytest.param({0: [WORKED, LOST], 1: [TOLD], 2: [OWN], 3: [WORKED, TOLD]}, {1}, id="error"),
        pytest.param({0: [OWN], 1: [OWN], 2: [OWN], 3: [OWN]}, {}, id="program"),
        pytest.param({0: [WORKED, LOST], 3: [("hang", {"section": "iteration"})]}, {1}, id="hang"),
        pytest.param({0: [TOLD], 1: [TOLD], 2: [TOLD], 3: [TOLD]}, {}, id="ended from outside"),
        pytest.param({}, {}, id="no events"),
    ],
)
def test_node_to_blame_is_that_of_the_rank_that_failed_first(
    by_rank: dict[int, Sequence[Named]], blamed: set[int], tmp_path: Path
) -> None:
    write_events(tmp_path, by_rank)
    assert failed_nodes(tmp_path, 2e9, num_nodes=2).keys() == set(blamed)
    assert not failed_nodes(tmp_path, 2e9 + 60, num_nodes=2), "these are events of an older start"


def test_newest_iteration_is_that_of_the_events_or_what_megatron_has_saved(tmp_path: Path) -> None:
    assert newest_iteration(tmp_path, tmp_path) == 0
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("500\n")
    assert newest_iteration(tmp_path, tmp_path) == 500
    write_events(tmp_path, {0: [WORKED, LOST]})
    assert newest_iteration(tmp_path, tmp_path) == 7


def test_check_of_a_node_asks_dcgm_where_its_daemon_runs_and_else_the_driver(
    tmp_path: Path,
) -> None:
    def check(**commands: str) -> bool:
        for name in ("nvidia-smi", "dcgmi"):
            (tmp_path / name).unlink(missing_ok=True)
        for name, body in commands.items():
            path = tmp_path / name.replace("_", "-")
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o700)
        # The function alone: the file wants a job.
        words = (
            f"eval \"$(sed -n '/^check_node()/,/^}}/p' {LIBRARY})\"; PATH={tmp_path}; check_node"
        )
        return subprocess.run(["/bin/bash", "-c", words], check=False).returncode == 0

    works = '[ "$1" = discovery ] || [ "$1 $2 $3" = "diag --run 1" ]'
    assert check()
    assert check(nvidia_smi="exit 0")
    assert not check(nvidia_smi="exit 1")
    assert check(nvidia_smi="exit 0", dcgmi="exit 1"), "its daemon does not run"
    assert check(nvidia_smi="exit 0", dcgmi=works)
    assert not check(nvidia_smi="exit 0", dcgmi='[ "$1" = discovery ]')
