"""Jobs that benchmarks measure: models, data, folders, and how they are started and timed."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.output import ROOT
from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from moe_ft.events import event_path
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events
from tests.ports import free_port
from tests.waiting import wait_for
from tools.prepare_text import standard_library

NUM_RANKS = 2
DEADLINE_S = 600.0
LONGEST_WINDOW = 6
SCRIPT = "pretrain_gpt_moe.py"
TAIL_CHARACTERS = 3000
_END_S = 60.0  # longer than torchrun gives its ranks to end

Changes = dict[str, str | int | float | bool]

MODELS: dict[str, Changes] = {
    "demo": {},
    "larger": {
        "hidden_size": 512,
        "ffn_hidden_size": 1024,
        "moe_ffn_hidden_size": 1024,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "micro_batch_size": 2,
        "global_batch_size": 8,
    },
    "64 experts": {
        "num_layers": 4,
        "hidden_size": 256,
        "ffn_hidden_size": 256,
        "moe_ffn_hidden_size": 256,
        "num_experts": 64,
        "seq_length": 32,
        "max_position_embeddings": 32,
        "micro_batch_size": 1,
        "global_batch_size": NUM_RANKS,
    },
    "compute-bound": {
        "num_layers": 2,
        "hidden_size": 1024,
        "ffn_hidden_size": 2048,
        "moe_ffn_hidden_size": 2048,
        "num_experts": 4,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "micro_batch_size": 4,
        "global_batch_size": 4 * NUM_RANKS,
    },
    # That of examples/quickstart.sh, without its batches and norms: layouts need smaller ones.
    "quickstart sizes": {
        "hidden_size": 128,
        "ffn_hidden_size": 256,
        "moe_ffn_hidden_size": 256,
        "num_experts": 8,
        "seq_length": 128,
        "max_position_embeddings": 128,
    },
}
MODELS["quickstart"] = {
    **MODELS["quickstart sizes"],
    "micro_batch_size": 4,
    "normalization": "RMSNorm",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFolder:
    """Folders of one job: `log` on disk, with its events, and `memory` on tmpfs."""

    log: Path
    memory: Path

    @property
    def events(self) -> Path:
        """Of the event log."""
        return self.log / "events"

    @property
    def memory_flags(self) -> tuple[str, ...]:
        """Flags of the memory tier."""
        return ("--moe-ft-memory-dir", str(self.memory), "--moe-ft-job-id", "benchmark")

    def words(
        self,
        data: Sequence[str],
        layout: Mapping[str, int],
        flags: Sequence[str],
        changes: Mapping[str, str | float | bool],
    ) -> list[str]:
        """Return the flags of a job in this folder, with an event log, digests and a memory tier.

        Args:
            changes: to the demo model of the tests.
        """
        return [
            *(*model_flags(**changes), *layout_flags(layout), *data, *event_flags(self.events)),
            *(*self.memory_flags, *flags),
        ]

    def logged(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind that a rank has logged so far."""
        has_begun = event_path(self.events, rank).exists()
        return events(self.events, rank, kind) if has_begun else []

    def wait_for_iterations(self, num_ranks: int, since_s: float, number: int) -> float:
        """Wait until ranks have finished so many iterations since a time; return that of the last rank."""

        def found() -> float | None:
            times = [
                [each["time"] for each in self.logged(rank, "iteration") if each["time"] > since_s]
                for rank in range(num_ranks)
            ]
            is_met = min(map(len, times)) >= number
            return max(each[number - 1] for each in times) if is_met else None

        what = f"{number} iterations of {num_ranks} ranks"
        return wait_for(found, what, DEADLINE_S, poll_s=0.5)

    def strategy_flags(self, strategy: str, window: int | None = None) -> list[str]:
        """Return the flags of a strategy with a memory tier only; `sparse` takes a window or finds it."""
        flags = ["--moe-ft-strategy", strategy, *self.memory_flags]
        flags += ["--moe-ft-fault-report-grace-s", "0.5"]
        if strategy == "sparse":
            most = ["auto", "--moe-ft-max-window", str(LONGEST_WINDOW)]
            flags += ["--moe-ft-window", *(most if window is None else [str(window)])]
        return flags


@contextmanager
def job_folder(folder: Path) -> Iterator[JobFolder]:
    """Provide a job's folders, and remove them with what was left in them."""
    log = Path(tempfile.mkdtemp(prefix="run_", dir=folder))
    memory = Path(tempfile.mkdtemp(prefix="moe_ft_benchmark_", dir="/dev/shm"))
    try:
        yield JobFolder(log=log, memory=memory)
    finally:
        shutil.rmtree(log, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


@contextmanager
def data_folder() -> Iterator[tuple[Path, list[str]]]:
    """Provide a folder for jobs, and the flags that name a data set of text in it."""
    with tempfile.TemporaryDirectory(prefix="benchmark_") as name:
        yield Path(name), write_data(Path(name))


def write_data(folder: Path, texts: Sequence[str | Path] = (), split: str = "100,0,0") -> list[str]:
    """Write a data set of text, by default the standard library; return the flags that name it."""
    prefix = folder / "text"
    if not prefix.with_suffix(".idx").exists():
        write_dataset(TextSource(paths=tuple(map(str, texts)) or standard_library()), prefix)
    data = ["--data-path", str(prefix), "--split", split]
    return [*data, "--data-cache-path", str(folder / "cache")]


def run_under_torchrun(
    words: Sequence[str],
    num_ranks: int,
    *,
    max_restarts: int,
    log_path: Path,
    keeps: bool = False,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Run a job on the CPU, all ranks of which torchrun starts again when one dies, until it ends by itself.

    Args:
        words: what follows torchrun's own options: the script or `-m` and a module, with their arguments.
        num_ranks: of the job, all on this machine.
        max_restarts: how often torchrun starts all ranks again.
        log_path: gets the output of torchrun and of the ranks.
        keeps: whether torchrun starts `moe_ft keep`, which forks the ranks.

    Raises:
        AssertionError: if the job fails, or takes longer than the deadline; with what moe_ft said and the
            end of its output.
    """
    keep = ("-m", "moe_ft", "keep", "--ranks-per-node", str(num_ranks), "--") if keeps else ()
    num_processes = "1" if keeps else str(num_ranks)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", num_processes),
        *("--max-restarts", str(max_restarts), "--rdzv-backend", "c10d"),
        *("--rdzv-id", "benchmark", "--rdzv-endpoint", f"localhost:{free_port()}", *keep, *words),
    ]
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONWARNINGS": "ignore"}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log_path.open("w") as log:
        agent = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            code = agent.wait(deadline_s)
        except BaseException as error:
            agent.terminate()  # it ends its ranks
            agent.wait(_END_S)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = -1
    if code:
        output = log_path.read_text(errors="replace")
        said = "\n".join(line for line in output.splitlines() if "moe_ft: " in line)
        how = "did not end in time" if code == -1 else f"ended with code {code}"
        raise AssertionError(f"the job {how}\n{said}\n...\n{output[-TAIL_CHARACTERS:]}")
