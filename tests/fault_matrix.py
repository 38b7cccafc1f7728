"""Runs with faults and dense checkpoints, chosen so that every pair of circumstances occurs.

Each restart must recover the newest state that is left, and the run must end with the digests of a run that
had neither checkpoints nor faults. The cases are a pairwise covering array over the factors below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_ft.faults import FAULT_PHASES, FaultKind, Phase
from tests.demo_model import layout_flags, model_flags
from tests.faulty_runs import fault_flags, faults_fired, run_until_it_ends
from tests.recoveries import Expected

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
# An exception in one of these ends no process.
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


def checkpoint_flags(case: Case) -> list[str]:
    """Return the flags of the checkpoints that the run takes."""
    return [
        *("--moe-ft-strategy", "dense", "--moe-ft-interval", case.interval),
        *("--moe-ft-persist-interval", "2"),
    ]


def faults_of(case: Case) -> list[str]:
    """Return the faults of the case, as --moe-ft-inject-fault takes them."""
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
    return faults


def run_case(
    case: Case, dataset_flags: list[str], folder: Path, memory_dir: Path
) -> list[Expected | None]:
    """Train with the case's faults until the run has ended; return what its restarts have recovered.

    Raises:
        AssertionError: if the run does not end by itself, no fault fired, or a rank has not recovered the
            newest state that was left from the nearest tier.
    """
    flags = [
        *job_flags(case, dataset_flags),
        *checkpoint_flags(case),
        *fault_flags(faults_of(case)),
    ]
    recovered = run_until_it_ends(
        flags, case.world_size, folder=folder, memory_dir=memory_dir, max_restarts=5
    )
    check_case(case, faults_fired(folder, case.world_size), recovered)
    return recovered


def check_case(
    case: Case, fired: Sequence[Mapping[str, Any]], recovered: Sequence[Expected | None]
) -> None:
    """Fail unless faults fired, and each restart recovered what the case itself says that it must.

    This does not depend on what was left between the starts: a snapshot is taken every `interval` iterations,
    and the first is complete long before the first fault. A slow machine may skip later ones.
    """
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
        # The node of rank 1 is lost, and every second rank is on it.
        wanted = ["peer" if is_lost and rank % 2 else "memory" for rank in range(case.world_size)]
        assert list(each.tiers) == wanted, (case, each)


def possible_iterations(case: Case, fired: Mapping[str, Any]) -> range:
    """Return the iterations whose state may be the newest complete one after a fault."""
    first, iteration = int(case.interval), int(fired["iteration"])
    if fired["phase"] == Phase.SNAPSHOT:
        return range(first, iteration)  # the one that is being taken is never complete
    if fired["phase"] == Phase.PERSIST:
        return range(iteration, NUM_ITERATIONS + 1)  # only what all ranks have is written
    return range(first, iteration + 1)
