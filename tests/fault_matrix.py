"""Runs with faults, chosen so that every pair of circumstances occurs, and what must hold after each.

A case trains with checkpoints and faults, restarting as torchrun would. Each restart must recover the newest
state that is left, and the run must end with the digests of one that had neither. The cases are a pairwise
covering array over the factors below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_ft.faults import FAULT_PHASES, FaultKind, Phase
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, run_with_restarts
from tests.recoveries import Expected, RecoveryWatch

NUM_ITERATIONS = 7
FAULT_ITERATION = 3

LAYOUTS: dict[str, dict[str, int]] = {
    "pp2-ep2": {"pp": 2, "ep": 2},
    "ep2-dp2": {"ep": 2},
    "pp2-dp2": {"pp": 2},
    "tp2-ep2": {"tp": 2, "ep": 2},
    "pp2-ep2-dp2": {"pp": 2, "ep": 2},
}
_WORLD_SIZE = {"pp2-ep2-dp2": 8}
# An exception there ends no process.
BACKGROUND_ONLY = (Phase.SNAPSHOT, Phase.REPLICATE, Phase.PERSIST)
FAULTS = ("kill-one", "kill-two", "lose-node", "exception", "kill-twice")
FACTORS: dict[str, tuple[str, ...]] = {
    "layout": tuple(LAYOUTS),
    "fault": FAULTS,
    "phase": tuple(phase.value for phase in FAULT_PHASES if phase is not Phase.REPLAY),
    "optimizer": ("distributed", "replicated"),
    "precision": ("bf16", "fp16", "fp32"),
    "interval": ("1", "2"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run with faults; every field is a factor."""

    layout: str
    fault: str
    phase: str
    optimizer: str
    precision: str
    interval: str

    def __str__(self) -> str:
        return "_".join(self.values.values())

    @property
    def values(self) -> dict[str, str]:
        """The values by factor."""
        return asdict(self)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return _WORLD_SIZE.get(self.layout, 4)


def job_flags(case: Case, dataset_flags: list[str]) -> list[str]:
    """Return the flags that the run has with and without faults."""
    changes: dict[str, Any] = {"train_iters": NUM_ITERATIONS, "hidden_dropout": 0.1}
    changes["use_distributed_optimizer"] = case.optimizer == "distributed"
    changes["bf16"] = case.precision == "bf16"
    if case.precision == "fp16":
        changes |= {"fp16": True, "initial_loss_scale": 4096}
    layout = LAYOUTS[case.layout]
    if "tp" in layout:
        changes["sequence_parallel"] = True
    return [*model_flags(**changes), *layout_flags(layout), *dataset_flags]


def nodes_of(world_size: int) -> list[str]:
    """Return two nodes, each with every second rank: both hold ranks of every stage."""
    return [f"node{rank % 2}" for rank in range(world_size)]


def checkpoint_flags(memory_dir: Path, persist_dir: Path) -> list[str]:
    """Return flags that turn all three tiers on."""
    return [
        *("--moe-ft-strategy", "dense", "--moe-ft-job-id", "test"),
        *("--moe-ft-memory-dir", str(memory_dir)),
        *("--moe-ft-persist-dir", str(persist_dir), "--moe-ft-persist-interval", "2"),
        *("--moe-ft-fault-report-grace-s", "0.5"),
    ]


def fault_flags(case: Case) -> list[str]:
    """Return the flags that inflict the case's faults."""
    kind = {"lose-node": "lose-node", "exception": "exception"}.get(case.fault, "kill")
    is_recovery = case.phase == Phase.RECOVERY
    first, second = (1, 1) if is_recovery else (FAULT_ITERATION, FAULT_ITERATION + 2)
    faults = [f"{kind}:1@{first}:{case.phase}"]
    if case.fault == "kill-two":
        faults.append(f"kill:2@{first}:{case.phase}")
    if case.fault == "kill-twice":
        faults.append(f"kill:0@{second}:{case.phase}")
    if is_recovery:  # there must be something to recover from
        faults.append(f"kill:3@{FAULT_ITERATION}:backward")
    return [word for fault in faults for word in ("--moe-ft-inject-fault", fault)]


def run_case(
    case: Case, dataset_flags: list[str], folder: Path, memory_dir: Path
) -> list[Expected | None]:
    """Train with the case's faults until the run has ended; return what its restarts have recovered.

    Raises:
        AssertionError: if the run does not end by itself, no fault fired, or a rank has not recovered the
            newest state that was there from the nearest tier.
    """
    log = folder / "events"
    flags = [
        *job_flags(case, dataset_flags),
        *event_flags(log),
        *checkpoint_flags(memory_dir, folder / "storage"),
        *("--moe-ft-interval", case.interval),
        *fault_flags(case),
    ]
    nodes = nodes_of(case.world_size)
    watch = RecoveryWatch(
        log, case.world_size, memory_dir / "test", folder / "storage", lambda start: nodes
    )
    results = run_with_restarts(
        flags,
        case.world_size,
        log_dir=folder,
        max_restarts=5,
        nodes=lambda start: nodes,
        between=watch.look,
    )
    results[-1].check()
    recovered = watch.check(len(results))
    check_case(case, log, recovered)
    return recovered


def check_case(case: Case, log: Path, recovered: Sequence[Expected | None]) -> None:
    """Fail unless the faults fired, and each restart recovered what the case itself says that it must.

    Whatever was in memory between the starts: a snapshot is taken every `interval` iterations, and the first
    is complete long before the first fault. A slow machine may skip later ones.
    """
    fired = [
        line for rank in range(case.world_size) for line in events(log, rank, "fault_injected")
    ]
    assert any(line["phase"] == case.phase for line in fired), f"{case}: no fault fired"
    if case.fault == "exception" and case.phase in BACKGROUND_ONLY:
        assert not recovered, f"{case}: costs a snapshot or a checkpoint, and no restart"
        return
    assert recovered, f"{case}: no restart"
    for start, each in enumerate(recovered):
        assert each is not None, f"{case}: start {start + 1} began from nothing"
        before = [line for line in fired if line["incarnation"] == start]
        assert each.restored_iteration == each.target_iteration
        for line in before:
            assert each.target_iteration in possible_iterations(case, line), (case, each, line)
        is_lost = any(line["kind"] == FaultKind.LOSE_NODE for line in before)
        # Nodes take every second rank; that of rank 1 is lost.
        wanted = ["peer" if is_lost and rank % 2 else "memory" for rank in range(case.world_size)]
        assert list(each.tiers) == wanted, (case, each)


def possible_iterations(case: Case, fired: Mapping[str, Any]) -> range:
    """Return which states may be the newest complete one after a fault."""
    first, iteration = int(case.interval), int(fired["iteration"])
    if fired["phase"] == Phase.SNAPSHOT:
        return range(first, iteration)  # the one that is being taken is never complete
    if fired["phase"] == Phase.PERSIST:
        return range(iteration, NUM_ITERATIONS + 1)  # only what all ranks have is written
    return range(first, iteration + 1)


def describe(case: Case, recovered: Sequence[Expected | None]) -> str:
    """Return one line for the table of `make test-matrix`."""
    steps = [str(each) for each in recovered]
    return f"{case}: {'; '.join(steps) or 'no recovery needed'}"
