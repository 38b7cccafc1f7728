"""Somebody's batch script, with the lines that add moe_ft, goes on after failures and time limits.

They are examples/slurm/add_to_yours.sbatch and the one for srun without torchrun; the script that they
train knows nothing of moe_ft.
"""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import override

import pytest

from tests.own_scripts import BASE_FLAGS, run_own
from tests.references import Digests, References
from tests.slurm.cluster import ROOT, Cluster
from tests.slurm.job import NUM_RANKS, SlurmJob

SLURM = Path("examples/slurm")
NUM_ITERATIONS = 120


class YourJob(SlurmJob):
    """Job of one of the two scripts, with a rank on each of two nodes."""

    def __init__(self, cluster: Cluster, folder: Path, memory_dir: Path, script: str) -> None:
        super().__init__(cluster, ["--data-path", "none"], folder, memory_dir)
        self._script = str(SLURM / script)

    @override
    def submit(
        self, *flags: str, nodes: int = 2, options: Sequence[str] = (), **variables: str
    ) -> None:
        environment = {
            "RUN_DIR": str(self.folder),
            "MEMORY_DIRS": str(self.memory_dir),
            "PATH": f"{Path(sys.executable).parent}:{self.cluster.environment['PATH']}",
            "TRAIN_NODES": str(NUM_RANKS),
            "TRAIN_ITERATIONS": str(NUM_ITERATIONS),
            "GPUS": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONWARNINGS": "ignore",
            **variables,
        }
        self.job_id = self.cluster.call(
            *("env", *(f"{name}={value}" for name, value in environment.items())),
            *("sbatch", "--parsable", f"--output={self.log}", f"--nodes={nodes}"),
            *("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", *options),
            *(self._script, "--moe-ft-memory-dir", str(self.memory_dir)),
            *("--moe-ft-state-digest", "--moe-ft-persist-interval", "1000", *flags),
        )


def reference(references: References, script: str) -> Digests:
    """Return the digests of the run of a script when nothing disturbs it."""
    found = re.search(r"^FLAGS=\(\n.*?^\)$", (ROOT / SLURM / script).read_text(), re.M | re.S)
    assert found is not None
    shown = subprocess.run(
        ["bash", "-c", f'{found[0]}\nprintf "%s\\n" "${{FLAGS[@]}}"'],
        env={"TRAIN_ITERATIONS": str(NUM_ITERATIONS)},
        capture_output=True,
        text=True,
        check=True,
    )
    flags = shown.stdout.split()
    assert tuple(flags[:2]) == BASE_FLAGS
    return references.digests(flags[2:], NUM_RANKS, run_own)


@pytest.mark.rest
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("script", ["add_to_yours.sbatch", "add_to_yours_srun.sbatch"])
def test_your_script_goes_on_after_a_killed_rank_and_saves_before_the_time_limit(
    script: str, cluster: Cluster, tmp_path: Path, memory_dir: Path, shared_folder: Path
) -> None:
    job = YourJob(cluster, tmp_path / "run", memory_dir, script)
    job.submit("--moe-ft-inject-fault", "kill:1@12")
    job.wait_for_iteration(18, start=1 if script == "add_to_yours.sbatch" else 2)
    job.cancel("--batch", "--signal=USR1")
    job.wait_for_line("SIGUSR1: the job goes back to the queue")
    job.release()
    assert job.wait_for_end() == "COMPLETED 0:0"
    *_, killed, requeued = job.targets()
    assert 10 <= killed <= 12 and 18 <= requeued < NUM_ITERATIONS
    assert job.tiers(0)[0] == {"memory"}
    assert job.tiers(-1) == [{"storage"}] * 2
    assert job.stored() == [requeued, NUM_ITERATIONS]
    assert job.digests() == reference(References(shared_folder / "references"), script)


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_node_on_which_two_starts_fail_is_not_given_to_the_job_again(
    cluster: Cluster, tmp_path: Path, memory_dir: Path, shared_folder: Path
) -> None:
    script = "add_to_yours_srun.sbatch"
    job = YourJob(cluster, tmp_path / "run", memory_dir, script)
    flag = "--moe-ft-inject-fault"
    job.submit(flag, "kill:1@12", flag, "kill:1@20")
    job.wait_for_line("node2 is excluded from now on")
    job.wait_for_line("it waits for nodes other than node2")
    job.release()
    assert job.wait_for_end() == "COMPLETED 0:0"
    assert job.said("start 0 on node1 node3")
    assert job.digests() == reference(References(shared_folder / "references"), script)


@pytest.mark.rest
@pytest.mark.timeout(1500)
def test_refused_flag_ends_your_job_at_its_first_start(
    cluster: Cluster, tmp_path: Path, memory_dir: Path
) -> None:
    job = YourJob(cluster, tmp_path / "run", memory_dir, "add_to_yours.sbatch")
    job.submit("--moe-ft-interval", "0")
    assert job.wait_for_end() == "FAILED 2:0"
    assert not job.said("start again")
