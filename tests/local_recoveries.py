"""Jobs in which single stages recover: a layout, faults, and the stages that must run iterations again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.demo_model import event_flags, layout_flags, model_flags, world_size_of
from tests.faulty_runs import fault_flags, faults_fired
from tests.harness import JobResult, Train, events, run_with_restarts

NUM_ITERATIONS = 12
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
DENSE = ("--moe-ft-strategy", "dense", "--moe-ft-interval", "4")
LOGGED = ("--moe-ft-upstream-log", "--moe-ft-breakpoints")
ALL: tuple[int, ...] = ()  # stages of a recovery in which all go back
NOBODY = None  # every rank continues from its breakpoint


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, the faults of a run, and the stages that each recovery must run again.

    Attributes:
        stages: ``[recovery]`` stages that run iterations again alone, `ALL`, or `NOBODY`.
        changes: of the flags of the small model.
        nodes: ``[start][rank]`` the node of each rank; the last one is that of all later starts.
    """

    layout: Mapping[str, int]
    faults: Sequence[str]
    stages: Sequence[Sequence[int] | None]
    strategy: Sequence[str] = SPARSE
    flags: Sequence[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    recovery: str = "local"
    nodes: Sequence[Sequence[str]] = ()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return world_size_of(self.layout)

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of a rank."""
        return rank * self.layout["pp"] // self.world_size

    def base(self, dataset_flags: Sequence[str]) -> list[str]:
        """Return the flags of the run without checkpoints."""
        layout = {name: size for name, size in self.layout.items() if name != "dp"}
        changes = {
            "train_iters": NUM_ITERATIONS,
            "hidden_dropout": 0.1,
            "lr_decay_style": "linear",
            **self.changes,
        }
        return [*model_flags(**changes), *layout_flags(layout), *self.flags, *dataset_flags]

    def flags_of(self, base: Sequence[str], folder: Path, memory_dir: Path) -> list[str]:
        """Return the flags of the run with checkpoints and faults."""
        return [
            *(*base, *event_flags(folder / "events"), *self.strategy, *LOGGED),
            *("--moe-ft-recovery", self.recovery),
            *("--moe-ft-job-id", "test", "--moe-ft-memory-dir", str(memory_dir)),
            *fault_flags(self.faults),
        ]

    def run(
        self,
        base: Sequence[str],
        folder: Path,
        memory_dir: Path,
        between: Callable[[int], None] | None = None,
        num_failures: int = 0,
        train: Train | None = None,
    ) -> list[JobResult]:
        """Run the job, starting it again after each fault and some more failures; see `run_with_restarts`."""
        return run_with_restarts(
            self.flags_of(base, folder, memory_dir),
            self.world_size,
            log_dir=folder / "logs",
            max_restarts=len(self.faults) + num_failures,
            nodes=self._nodes if self.nodes else None,
            between=between,
            train=train,
        )

    def _nodes(self, start: int) -> Sequence[str]:
        return self.nodes[min(start, len(self.nodes) - 1)]

    def check(self, folder: Path) -> None:
        """Check that all faults have fired, and which stages each recovery has run again."""
        assert len(faults_fired(folder, self.world_size)) == len(self.faults)
        for rank in range(self.world_size):
            found = events(folder / "events", rank, "recovery")
            scopes = ["local" if each else "global" for each in self.stages]
            assert [each["scope"] for each in found] == scopes, found
            for each, stages in zip(found, self.stages, strict=True):
                has_replayed = each["replayed_iterations"] > 0
                if stages == ALL:
                    assert has_replayed
                    assert bool(each["reason"]) == (self.recovery != "global")
                    continue
                assert has_replayed == (self.stage_of(rank) in (stages or ())), each
                assert not stages or each["stages"] == list(stages)


PP2, PP3, PP4 = {"pp": 2, "ep": 2}, {"pp": 3}, {"pp": 4}
