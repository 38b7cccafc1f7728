"""Runs with faults and sparse windows, chosen so that every pair of circumstances occurs.

Each restart must recover the newest window that is left, and the run must end with the digests of a run that
took no checkpoints and had no fault. Whatever could make a replayed iteration compute something else is one
of the factors.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_ft.faults import FaultKind, Phase
from tests.demo_model import layout_flags, model_flags
from tests.faulty_runs import JOB_ID, fault_flags, faults_fired, run_until_it_ends
from tests.recoveries import Expected

NUM_ITERATIONS = 11
_BATCH = 16

LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "ep2-dp2": (4, {"ep": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "tp2-etp2-dp2": (4, {"tp": 2}),
    "tp4": (4, {"tp": 4}),
    "virtual-pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "pp2-ep2-dp2": (8, {"pp": 2, "ep": 2}),
    "tp2-pp2-ep2": (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
}
FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {"attention_dropout": 0.1},
    "expert-bias": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_aux_loss_coeff": 0,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": 64,
    },
    "ramp": {
        "calculate_per_token_loss": True,
        "global_batch_size": False,
        "step_batch_size_schedule": ("0:8 768:16 2816:32",),  # tokens: from iterations 3 and 7 on
    },
    "full-recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "moe_shared_expert_intermediate_size": 64,
    },
    "tied": {
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "recompute_granularity": "selective",
        "recompute_modules": "core_attn moe",
        "moe_layer_freq": 2,
    },
    "overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "no-experts": {
        "num_experts": False,
        "moe_ffn_hidden_size": False,
        "moe_router_topk": False,
        "moe_token_dispatcher_type": False,
        "moe_router_load_balancing_type": False,
        "moe_aux_loss_coeff": False,
    },
}
FAULTS: dict[str, tuple[str, ...]] = {
    "kill-backward": ("kill:1@{0}:backward",),
    # Two, because there is no step in an iteration whose gradients overflow.
    "kill-in-step": ("kill:2@{0}:in-step", "kill:2@{2}:in-step"),
    "kill-snapshot-twice": ("kill:1@{0}:snapshot", "kill:0@{1}:replicate"),
    "kill-in-recovery": ("kill:3@{0}:forward", "kill:1@1:recovery"),
    "kill-in-replay": ("kill:0@{0}:backward", "kill:2@1:replay"),
    "lose-node": ("lose-node:1@{0}:forward",),
    "lose-all-memory": ("kill:0@{0}:backward",),
}
FACTORS: dict[str, tuple[str, ...]] = {
    "layout": tuple(LAYOUTS),
    "feature": tuple(FEATURES),
    "fault": tuple(FAULTS),
    "window": ("1", "2", "3", "5", "auto"),
    "order": ("count", "soft-count", "decayed"),
    "precision": ("bf16", "fp16", "fp32"),
    "iteration": ("8", "9", "10"),
    "optimizer": ("distributed", "replicated"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseCase:
    """One run with a fault; every field is a factor."""

    layout: str
    feature: str
    fault: str
    window: str
    order: str
    precision: str
    iteration: str
    optimizer: str

    def __str__(self) -> str:
        return "_".join(self.values.values())

    @property
    def values(self) -> dict[str, str]:
        """The values by factor."""
        return asdict(self)

    @property
    def cost(self) -> int:
        """Relative time of a run: tensor-parallel ranks exchange most, and all share a few cores."""
        return self.world_size * LAYOUTS[self.layout][1].get("tp", 1)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return LAYOUTS[self.layout][0]


def job_flags(case: SparseCase, dataset_flags: Sequence[str]) -> list[str]:
    """Return the flags that the run has with and without checkpoints."""
    changes: dict[str, Any] = {"hidden_dropout": 0.1, "train_iters": NUM_ITERATIONS}
    changes |= {"clip_grad": 0.1, "global_batch_size": _BATCH}  # active in every iteration
    changes |= FEATURES[case.feature]
    changes["bf16"] = case.precision == "bf16"
    if case.precision == "fp16":  # the scale grows after two iterations, and overflows now and then
        scale = 2**5 if case.feature == "ramp" else 2**16  # losses per token are not averaged
        changes |= {"fp16": True, "initial_loss_scale": scale, "loss_scale_window": 2}
        changes |= {"min_loss_scale": 1, "hysteresis": 1}
    changes["use_distributed_optimizer"] = case.optimizer == "distributed"
    if case.optimizer == "replicated":
        changes.pop("overlap_param_gather", None)
    layout = dict(LAYOUTS[case.layout][1])
    if "tp" in layout and case.feature != "no-experts":  # dense models' local norms cannot do it
        changes["sequence_parallel"] = True
    if case.layout.startswith("virtual"):
        changes["num_layers_per_virtual_pipeline_stage"] = 1
    if case.feature == "no-experts":
        layout = {name: size for name, size in layout.items() if name not in ("ep", "etp")}
    return [*model_flags(**changes), *layout_flags(layout), *dataset_flags]


def checkpoint_flags(case: SparseCase) -> list[str]:
    """Return the flags of the checkpoints that the run takes; its order of units changes often."""
    return [
        *("--moe-ft-strategy", "sparse", "--moe-ft-persist-interval", "1"),
        *("--moe-ft-window", case.window, "--moe-ft-max-window", "4"),
        *("--moe-ft-unit-order", case.order, "--moe-ft-reorder-change", "0"),
    ]


def run_case(
    case: SparseCase, dataset_flags: Sequence[str], folder: Path, memory_dir: Path
) -> list[Expected | None]:
    """Train with the case's faults until the run has ended; return what its restarts have recovered.

    Raises:
        AssertionError: if the run does not end by itself, a fault did not fire, or a rank has not recovered
            the newest window that was there from the nearest tier.
    """
    first = int(case.iteration)
    faults = [text.format(first, first + 1, first - 1) for text in FAULTS[case.fault]]

    def between(start: int) -> None:
        if case.fault == "lose-all-memory" and start == 0:
            shutil.rmtree(memory_dir / JOB_ID)

    recovered = run_until_it_ends(
        [*job_flags(case, dataset_flags), *checkpoint_flags(case), *fault_flags(faults)],
        case.world_size,
        folder=folder,
        memory_dir=memory_dir,
        max_restarts=4,
        between=between,
    )
    check_case(case, len(faults), faults_fired(folder, case.world_size), recovered)
    return recovered


def check_case(
    case: SparseCase,
    num_faults: int,
    fired: Sequence[Mapping[str, Any]],
    recovered: Sequence[Expected | None],
) -> None:
    """Fail unless the faults fired, and each restart recovered what the case itself says that it must.

    This does not depend on what was left between the starts: the first window is complete long before the
    first fault.
    """
    may_not_replay = case.fault == "kill-in-replay" and case.window in ("1", "auto")
    may_overflow = case.fault == "kill-in-step" and case.precision == "fp16"
    missing = num_faults - len(fired)
    assert missing <= (may_not_replay or may_overflow), f"{case}: a fault did not fire"
    assert recovered, f"{case}: no restart"
    for start, each in enumerate(recovered):
        before = [line for line in fired if line["incarnation"] == start]
        if each is None:  # a slow writer had not written a window yet
            assert case.fault == "lose-all-memory", f"{case}: start {start + 1} began from nothing"
            continue
        length = each.target_iteration - each.restored_iteration + 1
        assert length in (range(1, 5) if case.window == "auto" else (int(case.window),)), each
        assert each.restored_iteration >= 1
        for line in before:
            if line["phase"] in (Phase.RECOVERY, Phase.REPLAY):  # nothing was trained
                last = getattr(recovered[start - 1], "target_iteration", 0)
                assert each.target_iteration == last, (case, each)
            else:  # a state of which a snapshot is being taken is never complete
                last = line["iteration"] - (line["phase"] == Phase.SNAPSHOT)
                assert each.target_iteration <= last, (case, each)
        assert set(each.tiers[::2]) == {tier_of_even_ranks(case, start)}, (case, each)
        is_lost = any(line["kind"] == FaultKind.LOSE_NODE for line in before)
        wanted = "peer" if is_lost else tier_of_even_ranks(case, start)
        assert set(each.tiers[1::2]) == {wanted}, (case, each)


def tier_of_even_ranks(case: SparseCase, start: int) -> str:
    """Return the tier from which the ranks recover whose node is not lost."""
    return "storage" if case.fault == "lose-all-memory" and start == 0 else "memory"
