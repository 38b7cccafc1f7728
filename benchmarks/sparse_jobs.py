"""Jobs of the stock training loop that several benchmarks measure: models, data, folders."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.conditions import ranks_on_cpu, versions
from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from tests.demo_model import layout_flags, model_flags
from tools.prepare_text import standard_library

NUM_RANKS = 2
DEADLINE_S = 500.0
LONGEST_WINDOW = 6

Changes = dict[str, str | int | float | bool]

MODELS: dict[str, Changes] = {
    "demo": {},
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

    def flags(self, model: str, data: Sequence[str], num_iterations: int) -> list[str]:
        """Return the flags of a model, with two expert-parallel ranks and an event log."""
        return [
            *model_flags(**MODELS[model], train_iters=num_iterations),
            *layout_flags({"ep": NUM_RANKS}),
            *data,
            *("--moe-ft-event-log", str(self.events)),
        ]

    def strategy_flags(self, strategy: str, window: int | None = None) -> list[str]:
        """Return the flags of a strategy with a memory tier only; `sparse` takes a window or finds it."""
        flags = ["--moe-ft-strategy", strategy, "--moe-ft-memory-dir", str(self.memory)]
        flags += ["--moe-ft-job-id", "benchmark", "--moe-ft-fault-report-grace-s", "0.5"]
        if strategy == "sparse":
            most = ["auto", "--moe-ft-max-window", str(LONGEST_WINDOW)]
            flags += ["--moe-ft-window", *(most if window is None else [str(window)])]
        return flags


@contextmanager
def job_folder(folder: Path) -> Iterator[JobFolder]:
    """Provide a job's folders, and remove them with what was left in them."""
    log = Path(tempfile.mkdtemp(prefix="run_", dir=folder))
    memory = Path(tempfile.mkdtemp(prefix="moe_ft_sparse_", dir="/dev/shm"))
    try:
        yield JobFolder(log=log, memory=memory)
    finally:
        shutil.rmtree(log, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)


def write_data(folder: Path) -> list[str]:
    """Write a data set of text and return the flags that name it."""
    write_dataset(TextSource(paths=standard_library()), folder / "text")
    data = ["--data-path", str(folder / "text"), "--split", "100,0,0"]
    return [*data, "--data-cache-path", str(folder / "cache")]


def conditions() -> str:
    """Return under what the numbers are taken."""
    return f"{NUM_RANKS} ranks (ep {NUM_RANKS}) on {ranks_on_cpu()}. {versions()}."
