"""Jobs of tests that train with Megatron-Bridge: those of tests/jobs.py with another script."""

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, override

import filelock

from megatron.fault_tolerance.launch.environment import prepare_environment
from moe_ft.cluster.forked_rank import run_script
from moe_ft.commands import run
from tests.demo_model import event_flags
from tests.harness import DEADLINE_S, Train, run_training
from tests.jobs import DENSE, NUM_REPAIRED, CheckpointJob, Job, RepairedJob, fault_flags
from tests.kept_job import KeptResult, run_kept
from tests.kept_nodes import KeptNodes
from tests.references import Digests, References

SCRIPT = Path(__file__).with_name("tiny_job.py")
PROTECTED = SCRIPT.with_name("protected_job.py")
EP2: Mapping[str, int] = {"ep": 2}
PP2: Mapping[str, int] = {"pp": 2}
EVALUATION = ("validation.eval_iters=2", "validation.eval_interval=3")
OVERLAP = ("ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true")
_SIZES = {
    "pp": "model.pipeline_model_parallel_size",
    "vpp": "model.virtual_pipeline_model_parallel_size",
    "ep": "model.expert_model_parallel_size",
}


def train_plain(words: Sequence[str]) -> None:
    """Run the script as Python does, where there may be no GPU."""
    prepare_environment()
    sys.argv = [str(SCRIPT), *words]
    run_script(sys.argv[0])


def train_protected(words: Sequence[str]) -> None:
    """Run `moe_ft run` with flags in front of the script."""
    run.run_script(words)


def train_in_context(words: Sequence[str]) -> None:
    """Run the script that protects itself, with the flags and the arguments of the other one."""
    end = words.index("--")
    assert words[end + 1] == str(SCRIPT)
    sys.argv = [str(PROTECTED), *words[: end + 1], *words[end + 2 :]]
    sys.path.insert(0, str(PROTECTED.parent))
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


class _BridgeJob(Job):
    """Job of the script.

    Attributes:
        base: its overrides.
    """

    num_iterations = NUM_REPAIRED

    @override
    def set_model(
        self, num_ranks: int, layout: Mapping[str, int], *flags: str, **changes: Any
    ) -> None:
        self.num_ranks = num_ranks
        self.base = [*(f"{_SIZES[name]}={size}" for name, size in layout.items()), *flags]
        self.train = train_protected

    @override
    def digests(self) -> Digests:
        return read_digests(self.folder / "digests", self.num_ranks)

    def words(self, *flags: str) -> list[str]:
        """Return moe_ft's flags, and the script with its own words."""
        return [
            *event_flags(self.events_dir),
            *("--moe-ft-memory-dir", str(self.memory_dir)),
            *flags,
            *("--", str(SCRIPT), str(self.folder / "digests"), *self.base),
        ]


class RestartedJob(_BridgeJob, CheckpointJob):
    """Job whose ranks all start again after a death."""

    @override
    def flags(self, *flags: str, storage: bool = False) -> list[str]:
        tiers = ["--moe-ft-persist-dir", str(self.storage), "--moe-ft-persist-interval", "2"]
        return self.words(
            *("--moe-ft-job-id", "test", "--moe-ft-fault-report-grace-s", "0.5"),
            *("--moe-ft-strategy", *DENSE),
            *(tiers if storage else ()),
            *flags,
        )


class ReplacedJob(_BridgeJob, RepairedJob):
    """Job under `moe_ft keep` whose dead ranks are replaced in place."""

    @override
    def flags(
        self,
        faults: Sequence[str],
        strategy: Sequence[str],
        layout: Mapping[str, int],
        extra: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
    ) -> list[str]:
        self.set_model(self.num_ranks, layout, *extra)
        return self.words(
            *("--moe-ft-repair", "auto", "--moe-ft-strategy", *strategy),
            *("--moe-ft-fault-report-grace-s", "0.2"),
            *fault_flags(faults),
        )

    @override
    def run(
        self,
        *faults: str,
        strategy: Sequence[str] = DENSE,
        layout: Mapping[str, int] = EP2,
        num_ranks: int = 2,
        extra: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> KeptResult:
        self.num_ranks = num_ranks
        words = ["moe_ft", "run", *self.flags(faults, strategy, layout, extra)]
        log = self.folder / "log"
        return run_kept(words, num_ranks, log=log, script="-m", **options).check()

    def on_nodes(self, num_nodes: int, *flags: str) -> KeptNodes:
        """Return nodes of a rank each, with 40 iterations; more than these are spares."""
        self.num_ranks = num_nodes
        words = self.flags((), (*DENSE, *flags), EP2, ("train.train_iters=40",))
        return KeptNodes(
            self.folder, ["-m", "moe_ft", "run", *words], num_nodes=num_nodes, ranks_per_node=1
        )

    def lose(self, nodes: KeptNodes, name: str) -> None:
        """Lose a node with its memory, once the job trains."""
        self.wait_for_iteration(4)
        nodes.kill(name)
        for path in self.memory_dir.glob(f"*/{name}"):
            shutil.rmtree(path)
