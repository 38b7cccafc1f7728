"""Jobs that tests submit with examples/slurm/pretrain_moe.sbatch: the small model on CPUs, made smaller."""

import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from moe_ft.events import event_path, read_progress
from tests.harness import digests, events
from tests.references import Digests, References
from tests.slurm.cluster import ROOT, Cluster
from tests.waiting import wait_for

SCRIPT = "examples/slurm/pretrain_moe.sbatch"
MODEL = "examples/slurm/models/small_cpu.sh"
NUM_RANKS = 2
NUM_ITERATIONS = 36
DEADLINE_S = (
    400.0  # for anything that a job does; imports alone take minutes on a machine that is busy
)
_POLL_S = 0.1
SMALLER = (
    *("--hidden-size", "64", "--ffn-hidden-size", "64", "--moe-ffn-hidden-size", "64"),
    *("--num-experts", "4", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "2", "--hidden-dropout", "0.1", "--eval-iters", "0"),
    *("--split", "80,10,10", "--log-interval", "20"),
)


class SlurmJob:
    """Run of training, in one SLURM job or in several.

    Attributes:
        folder: RUN_DIR.
        log: what the jobs print.
        job_id: of the job that was submitted last.
    """

    def __init__(
        self, cluster: Cluster, dataset_flags: Sequence[str], folder: Path, memory_dir: Path
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.cluster, self.folder, self.memory_dir = cluster, folder, memory_dir
        self.log = folder / "job.log"
        self.job_id = ""
        self._data_prefix = dataset_flags[dataset_flags.index("--data-path") + 1]

    def submit(
        self, *flags: str, nodes: int = 2, options: Sequence[str] = (), **variables: str
    ) -> None:
        """Submit a job.

        Args:
            options: of sbatch.
            variables: of the batch script, instead of its own.
        """
        extra = [*SMALLER, "--moe-ft-state-digest", "--moe-ft-persist-interval", "1000"]
        environment = {
            "RUN_DIR": str(self.folder),
            "DATA_PREFIX": self._data_prefix,
            "MODEL": MODEL,
            **({} if "SPARES" in variables else {"TRAIN_NODES": str(NUM_RANKS)}),
            "TRAIN_ITERATIONS": str(NUM_ITERATIONS),
            "EXTRA_FLAGS": " ".join([*extra, *flags]),
            "MEMORY_DIR": str(self.memory_dir),
            "PYTHONWARNINGS": "ignore",
            "CUDA_VISIBLE_DEVICES": "",
            **variables,
        }
        words = [
            *("env", *(f"{name}={value}" for name, value in environment.items())),
            *("sbatch", "--parsable", f"--output={self.log}", f"--nodes={nodes}"),
            *("--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", *options, SCRIPT),
        ]
        self.job_id = self.cluster.call(*words)

    def cancel(self, *options: str) -> None:
        self.cluster.call("scancel", *options, self.job_id)

    def wait_for_line(self, words: str, count: int = 1) -> None:
        """Wait until the log has some words in ``count`` lines."""
        wait_for(
            lambda: self.log.exists() and self.log.read_text().count(words) >= count,
            f"'{words}' in {self.log}",
            DEADLINE_S,
            _POLL_S,
        )

    def wait_for_iteration(self, iteration: int, start: int) -> None:
        """Wait until rank 0 has trained an iteration in a start, counted from 1."""

        def is_there() -> bool:
            progress = read_progress(self.events_dir, 0)
            has_started = len(self.events("start")) >= start
            return has_started and progress is not None and progress.iteration >= iteration

        wait_for(is_there, f"iteration {iteration} of {self.log}", DEADLINE_S, _POLL_S)

    def shown(self) -> dict[str, str]:
        shown = self.cluster.call("scontrol", "show", "job", self.job_id, "--oneliner")
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait_for_end(self) -> str:
        """Wait until the job is over; return its state and exit code, such as COMPLETED 0:0."""

        def state() -> str:
            fields = self.shown()
            is_over = fields["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")
            return f"{fields['JobState']} {fields['ExitCode']}" if is_over else ""

        return wait_for(state, f"the end of job {self.job_id}, {self.log}", DEADLINE_S, _POLL_S)

    def release(self) -> None:
        """Start a job at once that went back to the queue; SLURM would wait for two minutes."""
        command = ["scontrol", "update", f"JobId={self.job_id}", "StartTime=now"]

        def is_released() -> bool:
            shown = self.cluster.call("scontrol", "show", "job", self.job_id)
            if "JobState=PENDING" not in shown:
                return False
            return not subprocess.run(
                command, env=self.cluster.environment, capture_output=True
            ).returncode

        wait_for(is_released, f"job {self.job_id} in the queue", DEADLINE_S, _POLL_S)

    def lose_node(self, node: str) -> None:
        """Take a node away, with all that runs on it and with its memory."""
        self.cluster.kill_node(node)
        shutil.rmtree(self.memory_dir / self.job_id / node)

    def said(self, words: str) -> bool:
        return words in self.log.read_text()

    def signal_ranks(self, number: signal.Signals) -> None:
        for process in self.cluster.processes():
            with suppress(psutil.Error):
                variables = process.environ()
                is_own = variables.get("SLURM_JOB_ID") == self.job_id and "RANK" in variables
                if is_own and "pretrain_gpt_moe.py" in " ".join(process.cmdline()):
                    process.send_signal(number)

    @property
    def events_dir(self) -> Path:
        return self.folder / "events"

    def events(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        has_begun = event_path(self.events_dir, rank).exists()
        return events(self.events_dir, rank, event) if has_begun else []

    def tiers(self, recovery: int) -> list[set[str]]:
        """Return ``[rank]`` the tiers that a recovery, counted from 0, has read."""
        return [
            set(self.events("recovery", rank)[recovery]["sources"]) for rank in range(NUM_RANKS)
        ]

    def targets(self) -> list[int]:
        """Return the iterations that the starts have continued from; fail if the ranks differ."""
        found = [
            [line["target_iteration"] for line in self.events("recovery", rank)]
            for rank in range(NUM_RANKS)
        ]
        assert found[0] == found[1]
        return found[0]

    def stored(self) -> list[int]:
        """Return the iterations of the checkpoints on storage, ascending."""
        manifests = (self.folder / "states").glob("iter_*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("iter_")) for path in manifests)

    def digests(self) -> Digests:
        return digests(self.events_dir, NUM_RANKS)


def reference(
    references: References, dataset_flags: Sequence[str], num_iterations: int = NUM_ITERATIONS
) -> Digests:
    """Return the digests of the run of all jobs here when nothing disturbs it."""
    script = (
        f'. {shlex.quote(MODEL)}; printf "%s\\n" "${{MODEL_FLAGS[@]}}" "${{TRAINING_FLAGS[@]}}"'
    )
    script += ' "${LAYOUT_FLAGS[@]}" "${TOKENIZER_FLAGS[@]}"'
    shown = subprocess.run(
        ["bash", "-c", script],
        env={"TRAIN_ITERATIONS": str(num_iterations)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return references.digests([*shown.stdout.split(), *dataset_flags, *SMALLER], NUM_RANKS)
