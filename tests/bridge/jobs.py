"""Jobs of tests that train with Megatron-Bridge, and how they end without moe_ft."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import override

import filelock

from megatron.fault_tolerance.launch.environment import prepare_environment
from moe_ft.cluster.forked_rank import run_script
from tests.harness import DEADLINE_S, Train, run_training
from tests.references import Digests, References

SCRIPT = Path(__file__).with_name("tiny_job.py")
NUM_RANKS = 2
EP2 = ("model.expert_model_parallel_size=2",)
PP2 = ("model.pipeline_model_parallel_size=2",)


def train_plain(words: Sequence[str]) -> None:
    """Run the script as Python does, where there may be no GPU."""
    prepare_environment()
    sys.argv = [str(SCRIPT), *words]
    run_script(sys.argv[0])


def read_digests(folder: Path, num_ranks: int) -> Digests:
    """Return the digests that the script has left."""
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return [(own, whole) for own, whole in found]


class PlainRuns(References):
    """Runs of the script without moe_ft."""

    @override
    def digests(
        self,
        flags: Sequence[str],
        world_size: int,
        train: Train | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Digests:
        folder = self._folder_of(flags, world_size, None)
        folder.mkdir(parents=True, exist_ok=True)
        known, words = folder / "digests", [str(folder / "digests"), *flags]
        with filelock.FileLock(folder / "lock"):
            if not known.exists():
                run_training(
                    words, world_size, log_dir=folder, train=train_plain, deadline_s=deadline_s
                ).check()
        return read_digests(known, world_size)
