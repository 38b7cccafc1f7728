"""Jobs in which single stages recover: a layout, faults, and the stages that must run iterations again."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretrain_gpt_moe
from megatron.fault_tolerance.program import forward_step
from moe_ft.faults import FaultSpec
from moe_ft.loop.faults import Faults
from moe_ft.loop.listeners import Listeners
from moe_ft.loop.training_loop import LoopParts
from tests.demo_model import event_flags, layout_flags, model_flags, world_size_of
from tests.harness import JobResult, Train, digests, events, run_with_restarts
from tests.jobs import fault_flags
from tests.references import Place
from tests.waiting import wait_for

NUM_ITERATIONS = 12
SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3")
DENSE = ("--moe-ft-strategy", "dense", "--moe-ft-interval", "4")
LOGGED = ("--moe-ft-upstream-log", "--moe-ft-breakpoints")
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
BIASED = ("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid")
ALL: tuple[int, ...] = ()  # stages of a recovery in which all go back
PP2, PP4 = {"pp": 2, "ep": 2}, {"pp": 4}
# The scale grows until gradients overflow, again and again: some steps are skipped.
FP16: dict[str, Any] = {
    "flags": ("--fp16", "--initial-loss-scale", "1048576", "--loss-scale-window", "2"),
    "changes": {"bf16": False, "hysteresis": 1},
}
TWO_STAGES_PER_NODE = [
    ("node0", "node0", "node1", "node1"),
    ("node2", "node2", "node1", "node1"),
]
_LENGTHS = (32, 16, 24, 8)  # of the micro-batches of an iteration


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, the faults of a run, and the stages that each recovery must run again.

    Attributes:
        stages: ``[recovery]`` stages that run iterations again alone, or `ALL`.
        changes: of the flags of the small model.
        nodes: ``[start][rank]`` the node of each rank; the last one is that of all later starts.
        train: instead of the program, also for the run without faults.
    """

    layout: Mapping[str, int] = field(default_factory=lambda: PP2)
    faults: Sequence[str] = ("kill:1@5:backward", "kill:2@9:before-step")
    stages: Sequence[Sequence[int]] = ((0,), (1,))
    strategy: Sequence[str] = SPARSE
    flags: Sequence[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    recovery: str = "local"
    nodes: Sequence[Sequence[str]] = ()
    train: Train | None = None

    @property
    def world_size(self) -> int:
        return world_size_of(self.layout)

    def stage_of(self, rank: int) -> int:
        return rank * self.layout["pp"] // self.world_size

    def base(self, place: Place) -> list[str]:
        """Return the flags of the run without checkpoints."""
        layout = {name: size for name, size in self.layout.items() if name != "dp"}
        changes = {
            "train_iters": NUM_ITERATIONS,
            "hidden_dropout": 0.1,
            "lr_decay_style": "linear",
            **self.changes,
        }
        return [*model_flags(**changes), *layout_flags(layout), *self.flags, *place.dataset_flags]

    def flags_of(self, place: Place) -> list[str]:
        """Return the flags of the run with checkpoints and faults."""
        return [
            *(*self.base(place), *event_flags(place.folder / "events"), *self.strategy, *LOGGED),
            *("--moe-ft-recovery", self.recovery),
            *("--moe-ft-job-id", "test", "--moe-ft-memory-dir", str(place.memory_dir)),
            *fault_flags(self.faults),
        ]

    def run(
        self, place: Place, between: Callable[[int], None] | None = None, train: Train | None = None
    ) -> JobResult:
        """Run the job, starting it again after each fault; check all that must be so, return its last start.

        Args:
            train: instead of the program in the run with faults.
        """
        result = run_with_restarts(
            self.flags_of(place),
            self.world_size,
            log_dir=place.folder / "logs",
            max_restarts=len(self.faults),
            nodes=self._nodes if self.nodes else None,
            between=between,
            train=train or self.train or train_and_die_together,
        )[-1]
        result.check()
        self.check(place)
        return result

    def _nodes(self, start: int) -> Sequence[str]:
        return self.nodes[min(start, len(self.nodes) - 1)]

    def check(self, place: Place) -> None:
        """Check that all faults have fired, and which stages each recovery has run again."""
        log, ranks = place.folder / "events", range(self.world_size)
        fired = [each for rank in ranks for each in events(log, rank, "fault_injected")]
        assert len(fired) == len(self.faults)
        for rank in ranks:
            found = events(place.folder / "events", rank, "recovery")
            scopes = ["local" if each else "global" for each in self.stages]
            assert [each["scope"] for each in found] == scopes, found
            for each, stages in zip(found, self.stages, strict=True):
                has_replayed = each["replayed_iterations"] > 0
                if stages == ALL:
                    assert has_replayed
                    assert each["reason"]
                    continue
                assert has_replayed == (self.stage_of(rank) in stages), each
                assert each["stages"] == list(stages)

    def check_end(self, place: Place) -> None:
        """Check that the run has ended in the state of one without faults, and left no memory."""
        assert not list(place.memory_dir.glob("test/*/rank_*"))
        wanted = place.references.digests(self.base(place), self.world_size, self.train)
        assert digests(place.folder / "events", self.world_size) == wanted


def train_and_die_together(flags: list[str]) -> None:
    """Train; ranks that die at one moment of an iteration wait for each other. Runs on every rank."""
    ranks, inflict = range(int(os.environ["WORLD_SIZE"])), Faults._inflict
    log = Path(flags[flags.index("--moe-ft-event-log") + 1])

    def have_all_fired(moment: str) -> bool:
        fired = [each for rank in ranks for each in events(log, rank, "fault_injected")]
        found = [each for each in fired if moment == f"@{each['iteration']}:{each['phase']}"]
        return len(found) == sum(word.endswith(moment) for word in flags)

    def inflict_together(faults: Faults, fault: FaultSpec) -> None:
        moment = f"@{fault.iteration}:{fault.phase}"
        wait_for(lambda: have_all_fired(moment), f"the faults {moment}")
        inflict(faults, fault)

    Faults._inflict = inflict_together  # type: ignore[assignment,method-assign]  # here only
    pretrain_gpt_moe.main(flags)


def train_with_lengths(flags: list[str]) -> None:
    """Train with sequences of several lengths, the same in every iteration. Runs on every rank."""
    read, lengths = forward_step._read_batch, itertools.cycle(_LENGTHS)

    def read_part(*args: Any) -> dict[str, Any]:
        batch, length = read(*args), next(lengths)
        cut = {name: each if each is None else each[:, :length] for name, each in batch.items()}
        if cut["attention_mask"] is not None:
            cut["attention_mask"] = batch["attention_mask"][:, :, :length, :length]
        return cut

    forward_step._read_batch = read_part  # type: ignore[assignment]
    begin = Listeners.begin_training

    def begin_training(self: Any, parts: LoopParts) -> None:
        parts.config.variable_seq_lengths = True  # no flag of Megatron sets it for a GPT
        begin(self, parts)

    Listeners.begin_training = begin_training
    pretrain_gpt_moe.main(flags)
