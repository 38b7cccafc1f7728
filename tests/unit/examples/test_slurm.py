"""The batch script acts on exit codes, and the epilog spares what may be continued.

SLURM's commands are stand-ins here; tests/slurm has the real ones.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from moe_ft.engine.memory.job_directory import entered_job
from tests.unit.examples.model_files import FOLDER, ROOT

SLURM = ROOT / "examples" / "slurm"
COMMANDS = {
    # Each start of the ranks takes the next exit code; all nodes are healthy; nothing else does anything.
    "srun": """case "$*" in
        *getsockname*) [ ! -e port ] || cat port ;;
        *pretrain_gpt_moe.py*|*bridge_recipe.py*)
            echo "MASTER_PORT=$MASTER_PORT; ranks: $*"
            code=$(head -n 1 codes)
            sed -i 1d codes
            exit "$code" ;;
        *is_living*) echo is_living node1 ;;
        *"--nodelist node1 bash"*" rescue 77 --to $RUN_DIR/states --wait"*) echo rescued ;;
    esac""",
    "scontrol": """case "$1 $2" in
        "show hostnames") echo node1 ;;
        "show node") echo "NodeName=node1 NodeAddr=127.0.0.1 Port=1" ;;
        "requeue "*) echo requeued && kill -KILL "$PPID" ;;
    esac""",
    "squeue": '[ ! -e queue ] && echo "slurm_load_jobs error" >&2 && exit 1; cat queue',
    # The time limit comes near in a pause of 601 s.
    "sleep": '[ "$1" != 601 ] || kill -USR1 "$PPID"; PATH=/usr/bin:/bin exec sleep "$1"',
    "python": f'[[ $1 != */last_start.py ]] || exec {sys.executable} "$@"',
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the variables of a job of one node, number 77, whose commands are stand-ins."""
    (tmp_path / "bin").mkdir()
    for name, body in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text(f'#!/usr/bin/env bash\ncd "{tmp_path}" || exit 1\n{body}\n')
        path.chmod(0o700)
    return {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "bin" / "python"),
        "ROOT": str(ROOT),
        "MODEL": f"{FOLDER}/small_cpu.sh",
        "DATA_PREFIX": "none",
        "RUN_DIR": str(tmp_path / "run"),
        "MEMORY_DIR": str(tmp_path / "memory"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NAME": "moe_ft",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_NODELIST": "node1",
        "SLURMD_NODENAME": "node1",
        "PAUSE_SECONDS": "0",
    }


@pytest.fixture
def submit(environment: dict[str, str], tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Return what runs the batch script with ranks that end so, and returns its exit code and output."""

    def run(
        *codes: int | str, script: str = "pretrain_moe.sbatch", **variables: str
    ) -> tuple[int, str]:
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        log = tmp_path / "log"
        with log.open("w") as output:
            job = subprocess.Popen(
                ["bash", SLURM / script],
                env={**environment, **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = job.wait(120)
            finally:  # as SLURM ends what a job leaves
                with suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
        left = (tmp_path / "codes").read_text()
        assert not left, f"these starts did not happen: {left}\n{log.read_text()}"
        return code, log.read_text()

    return run


Submit = Callable[..., tuple[int, str]]


def test_refused_flags_end_the_job_without_a_restart_or_a_requeue(submit: Submit) -> None:
    code, said = submit(2, MAX_RESTARTS="5")
    assert code == 2
    assert "requeued" not in said and "start 1" not in said
    assert said.index("rescued") < said.index("RUN_NAME=77 sbatch --job-name 77")


def test_ranks_meet_at_a_port_that_their_first_node_has_drawn_or_at_one_that_nobody_knows(
    submit: Submit, tmp_path: Path
) -> None:
    found = [submit(0)[1].partition("MASTER_PORT=")[2].split(";")[0] for _ in range(3)]
    assert len({*found}) > 1, "the same job has had the same port each time"
    (tmp_path / "port").write_text("31234\n")
    assert "MASTER_PORT=31234;" in submit(0)[1]


def test_recipe_of_bridge_has_flags_in_front_and_its_overrides_after_it(submit: Submit) -> None:
    code, said = submit(3, 0, script="bridge_recipe.sbatch")
    assert code == 0
    lines = [line for line in said.splitlines() if "ranks: " in line]
    assert len(lines) == 2
    for line in lines:
        launch, _, script = line.partition(" -- ")
        assert "python -m moe_ft launch --status" in launch and "--moe-ft-strategy dense" in launch
        assert script.startswith("examples/bridge_recipe.py olmoe_7b")
        assert script.endswith("train.exit_signal_handler=true train.exit_signal=10")


@pytest.mark.parametrize("code", [3, 4])
def test_failure_of_storage_restarts_the_ranks_after_a_pause(submit: Submit, code: int) -> None:
    ended, said = submit(code, code, 0)
    assert ended == 0 and "rescued" not in said
    assert said.count("the ranks start again in 0 s") == 2
    assert f"exit code {code} (storage " in said


@pytest.mark.parametrize("code", [3, 4])
def test_failure_of_storage_that_lasts_returns_the_job_to_the_queue(
    submit: Submit, code: int
) -> None:
    _, said = submit(code, code, MAX_RESTARTS="1")
    assert "MAX_RESTARTS=1 is reached: the job goes back to the queue\nrequeued" in said
    assert "rescued" not in said


def test_job_that_may_not_return_to_the_queue_rescues_its_memory_and_says_how_to_continue(
    submit: Submit,
) -> None:
    code, said = submit(3, MAX_RESTARTS="0", MAX_REQUEUES="0")
    assert code == 1
    order = ["it was there 0 times", "rescued", "RUN_NAME=77 sbatch --job-name 77"]
    assert sorted(order, key=said.index) == order


def test_time_limit_in_a_pause_requeues_while_storage_does_not_answer(submit: Submit) -> None:
    _, said = submit(4, 4, PAUSE_SECONDS="601")
    assert "SIGUSR1: the job goes back to the queue\nrequeued" in said


def test_other_failures_restart_the_ranks_and_end_the_job_after_the_last(submit: Submit) -> None:
    code, said = submit(137, 1, MAX_RESTARTS="1")
    assert code == 1
    assert "exit code 137, and no iteration beyond 0 was finished (1 of 4): the ranks start" in said
    assert "MAX_RESTARTS=1 is reached" in said and "requeued" not in said
    assert "rescued" in said
    _, said = submit(1, MAX_RESTARTS="0", STRATEGY="none")
    assert "rescue" not in said, "there is nothing in memory"


def test_name_of_a_run_that_is_not_the_jobs_is_refused_before_anything_starts(
    submit: Submit,
) -> None:
    code, said = submit(RUN_NAME="2024")
    assert code == 2
    assert "RUN_NAME=2024 must be the job's name too, which is moe_ft" in said
    assert "--job-name 2024" in said


def clean(environment: dict[str, str], queue: str | None, **variables: str) -> None:
    """Run the epilog; None for a SLURM that does not answer."""
    memory = Path(environment["MEMORY_DIR"])
    if queue is not None:
        (memory.parent / "queue").write_text(queue)
    given = {"MEMORY_DIRS": str(memory), "PYTHON": sys.executable, **variables}
    subprocess.run([SLURM / "epilog.sh"], env={**environment, **given}, check=True, timeout=120)


def make_memory(environment: dict[str, str], run: str, minutes: int = 90) -> Path:
    """Make the memory of a dead run that last changed so long ago."""
    directory = Path(environment["MEMORY_DIR"]) / run
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    with entered_job(directory, 5.0):
        (directory / "node1" / "rank_00000").mkdir(parents=True, mode=0o700)
    aged = ["find", str(directory), "-exec", "touch", "-d", f"{minutes} minutes ago", "{}", "+"]
    subprocess.run(aged, check=True)
    return directory


def left(environment: dict[str, str]) -> set[str]:
    return {path.name for path in Path(environment["MEMORY_DIR"]).iterdir()}


def test_epilog_keeps_memory_of_runs_in_the_queue_however_long_they_wait(
    environment: dict[str, str],
) -> None:
    states = ("PENDING", "RUNNING", "COMPLETING", "REQUEUE_HOLD", "SUSPENDED")
    queue = "2024 CANCELLED other\n80 PENDING 2024\n"
    queue += "".join(
        f"{n} {state} moe_ft\n9{n} {state} {state}_1\n" for n, state in enumerate(states)
    )
    runs = {"2024", *map(str, range(len(states))), *(f"{state}_1" for state in states)}
    for run in runs:
        make_memory(environment, run)
    clean(environment, queue)
    clean(environment, "")  # SLURM no longer knows them: KEEP_MINUTES begin only now
    assert left(environment) == runs


def test_epilog_keeps_memory_of_jobs_that_failed_until_their_time_is_over(
    environment: dict[str, str],
) -> None:
    states = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED")
    for number in range(len(states)):
        make_memory(environment, str(number), minutes=30)
    make_memory(environment, "unknown", minutes=90)
    queue = "".join(f"{number} {state} moe_ft\n" for number, state in enumerate(states))
    clean(environment, queue)
    assert left(environment) == set(map(str, range(len(states))))


def test_epilog_removes_at_once_what_a_cancelled_job_without_a_name_has_left(
    environment: dict[str, str],
) -> None:
    for run in ("75", "76", "pretrain"):
        make_memory(environment, run, minutes=0)
    clean(environment, "75 COMPLETED moe_ft\n76 CANCELLED pretrain\n")
    assert left(environment) == {"pretrain"}


def test_epilog_keeps_everything_while_slurm_does_not_answer(environment: dict[str, str]) -> None:
    memory = make_memory(environment, "pretrain")
    clean(environment, None)
    assert memory.exists()


def test_epilog_of_a_batch_script_keeps_the_memory_of_its_own_run(
    environment: dict[str, str],
) -> None:
    memory = make_memory(environment, "2024")
    clean(environment, "2024 CANCELLED other\n", RUN_NAME="2024")
    assert memory.exists()
