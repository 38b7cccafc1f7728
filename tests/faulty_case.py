"""Runs of the covering array: their flags, their faults, and the checks of what their restarts recover.

A run of an exact strategy ends with the digests of a run that took no checkpoints and had no fault. One that
loses tokens loses those that the routing log says. Each restart recovers the newest state that was left, from
the nearest tier (recoveries.py), and also what the case itself says that it must.
"""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from moe_ft.faults import Phase
from tests.covering_array import (
    LAYOUTS,
    LEFT,
    NUM_EXPERTS,
    NUM_ITERATIONS,
    ORDERS,
    PACKINGS,
    STRATEGIES,
    Case,
    Fault,
    is_in_recovery,
)
from tests.demo_model import DEEPSEEK, NO_EXPERTS, RERUNS, event_flags, layout_flags, model_flags
from tests.harness import events
from tests.jobs import CheckpointJob, fault_flags
from tests.kept_job import run_kept
from tests.partial_runs import check_losses
from tests.recoveries import Expected
from tests.references import Place

_BATCH, _LENGTH = 8, 32
Changes = dict[str, Any]
_MODELS: dict[str, Changes] = {
    "moe": {},
    "expert-bias": {
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_aux_loss_coeff": 0,
        "moe_router_load_balancing_type": "none",
        "moe_shared_expert_intermediate_size": 64,
    },
    "tied": {
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "moe_layer_freq": 2,
    },
    "no-experts": {**NO_EXPERTS},
    # All but one layer have experts, and so has the one that predicts a second token.
    "deepseek": {
        **DEEPSEEK,
        "num_layers": 4,
        "moe_layer_freq": "([0]+[1]*3)",
        "mtp_loss_scaling_factor": 0.3,
        "moe_router_bias_update_rate": 0.01,
        "moe_router_topk_scaling_factor": 2.5,
    },
    # With many flags that no other model here sets.
    "grouped-query": {
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 8,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "norm_epsilon": 1e-6,
        "rotary_base": 500000,
        "rotary_percent": 0.5,
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": True,
        "moe_z_loss_coeff": 1e-3,
        "moe_expert_capacity_factor": 1.0,
        "moe_token_drop_policy": "position",
        "attention_softmax_in_fp32": True,
        "accumulate_allreduce_grads_in_fp32": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
        "eod_mask_loss": True,
        "adam_beta2": 0.95,
        "weight_decay": 0.1,
        "lr_decay_style": "cosine",
        "dataloader_type": "cyclic",
        "no_data_sharding": True,
        "train_iters": False,
        "train_samples": NUM_ITERATIONS * _BATCH,
    },
}
_FEATURES: dict[str, Changes] = {
    "dropout": {"attention_dropout": 0.1},
    "ramp": {
        "calculate_per_token_loss": True,
        "global_batch_size": False,
        "step_batch_size_schedule": (f"0:{_BATCH} {4 * _BATCH * _LENGTH}:{2 * _BATCH}",),
    },
    "recompute": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "selective": {"recompute_granularity": "selective", "recompute_modules": "core_attn moe"},
    "overlap": {
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "ddp_bucket_size": 20000,
    },
    # The jitter of the router draws random numbers in evaluation too. State 6 is evaluated, and the iteration
    # that would lead to state 7 is skipped.
    "evaluation": {
        "eval_iters": 1,
        "eval_interval": 3,
        "iterations_to_skip": 7,
        "moe_input_jitter_eps": 0.01,
    },
    "reruns": {},
    # A rank that is a stage of its own has all experts.
    "slots": {"moe_ft_expert_slots": NUM_EXPERTS, "moe_ft_rebalance_interval": 1},
}


def job_flags(case: Case, place: Place) -> list[str]:
    """Return the flags that the run has with and without checkpoints."""
    changes: Changes = {"hidden_dropout": 0.1, "train_iters": NUM_ITERATIONS}
    changes |= {"clip_grad": 0.1, "global_batch_size": _BATCH}  # active in every iteration
    changes |= _MODELS[case.model] | _FEATURES[case.feature] | _precision(case)
    changes["use_distributed_optimizer"] = case.optimizer == "distributed"
    if case.optimizer == "replicated":
        changes.pop("overlap_param_gather", None)
    layout = dict(LAYOUTS[case.layout][1])
    if case.model == "no-experts":
        layout = {name: size for name, size in layout.items() if name not in ("ep", "etp")}
        changes.pop("moe_input_jitter_eps", None)
        if case.feature == "selective":
            changes["recompute_modules"] = "core_attn"
    elif case.feature == "slots":
        layout = {name: size for name, size in layout.items() if name != "ep"} | {"etp": 1}
    if (
        case.model != "no-experts" and "tp" in layout
    ):  # the local norms of a model without experts cannot do it
        changes["sequence_parallel"] = True
    if case.layout.startswith("virtual"):
        changes["num_layers_per_virtual_pipeline_stage"] = 1
        changes.pop("iterations_to_skip", None)
    further = RERUNS if case.feature == "reruns" else ()
    return [*model_flags(**changes), *layout_flags(layout), *further, *place.dataset_flags]


def _precision(case: Case) -> Changes:
    if case.precision != "fp16":
        return {"bf16": case.precision == "bf16"}
    of_steps = {Phase.BEFORE_STEP, Phase.IN_STEP}
    is_calm = case.family in ("partial", "selective") or any(
        fault.phase in of_steps for fault in case.faults
    )
    if is_calm:  # an iteration whose gradients overflow has no optimizer step
        return {"bf16": False, "fp16": True, "initial_loss_scale": 4096}
    # The scale grows after two iterations and overflows now and then. Losses per token are not averaged.
    scale = 2**5 if case.feature == "ramp" else 2**16
    overflowing = {"loss_scale_window": 2, "min_loss_scale": 1, "hysteresis": 1}
    return {"bf16": False, "fp16": True, "initial_loss_scale": scale, **overflowing}


def checkpoint_flags(case: Case) -> list[str]:
    return [
        *(*STRATEGIES[case.strategy], *ORDERS[case.order], *PACKINGS[case.packing]),
        *LEFT[case.left],
        *("--moe-ft-persist-interval", "1"),
        # A false alarm would end the run, and any trace of a repeated pass would change its end. Every third
        # iteration shows that as well as each would, in half the time.
        *("--moe-ft-check-weights", "1"),
        *(() if case.feature == "slots" else ("--moe-ft-check-iterations", "3")),
        *(("--moe-ft-max-window", "3") if case.family == "sparse" and case.window is None else ()),
    ]


def faults_of(case: Case) -> list[str]:
    """Return the faults of the case, as --moe-ft-inject-fault takes them."""
    found = []
    for fault in case.faults:
        kind = "kill" if fault.kind == "kill-two" else fault.kind
        victims = [fault.victim]
        if fault.kind == "kill-two":
            victims.append((fault.victim + 1) % case.world_size)
        found += [f"{kind}:{victim}@{fault.iteration}:{fault.phase}" for victim in victims]
    return found


def run_case(case: Case, place: Place) -> None:
    """Train with the case's faults until the run has ended.

    Ranks take turns on two nodes, so that each node holds ranks of every stage.

    Raises:
        AssertionError: if the run does not end by itself, a fault did not fire, or a rank has not recovered
            the newest state that was there from the nearest tier.
    """
    job = CheckpointJob(place)
    job.base, job.num_ranks = job_flags(case, place), case.world_size
    nodes, memory = (
        [f"node{rank % 2}" for rank in range(case.world_size)],
        place.memory_dir / "test",
    )

    def between(start: int) -> None:
        for fault in struck(case, job.faults_fired(), start):
            if fault.tier == "storage":
                shutil.rmtree(memory)
            elif fault.tier == "peer":
                shutil.rmtree(memory / f"node{fault.victim}", ignore_errors=True)

    job.run_with_faults(
        *faults_of(case),
        flags=checkpoint_flags(case),
        storage=True,
        nodes=lambda start: nodes,
        between=between,
        has_breakpoints=case.has_breakpoints,
    )
    check_case(case, job.faults_fired(), job.recoveries)
    if case.family == "selective":
        sent = [line for rank in range(case.world_size) for line in job.events("replicate", rank)]
        assert any(line["followed"] for line in sent), f"{case}: peers have followed no expert"
    if not case.is_exact:
        check_losses(
            place.folder / "events",
            num_ranks=case.world_size,
            num_experts=NUM_EXPERTS,
            ep_size=case.ep_size,
            is_load_aware=case.order == "load-aware",
            where=str(case),
        )


def run_repaired_case(case: Case, place: Place) -> None:
    """Train under `moe_ft keep` with the case's kills, each of which is repaired in place.

    Raises:
        AssertionError: if a start fails, or a rank was not replaced.
    """
    log = place.folder / "events"
    run_kept(
        [
            *job_flags(case, place),
            *checkpoint_flags(case),
            *fault_flags(faults_of(case)),
            *(
                *event_flags(log),
                "--moe-ft-repair",
                "auto",
                "--moe-ft-memory-dir",
                str(place.memory_dir),
            ),
            *("--moe-ft-persist-dir", str(place.folder / "storage")),
        ],
        case.world_size,
        log=place.folder / "log",
    ).check()
    for rank in range(case.world_size):
        dead = [line["dead_ranks"] for line in events(log, rank, "repair")]
        assert dead == [[fault.victim] for fault in case.faults], f"{case}: {dead}"


def struck(case: Case, fired: Sequence[Mapping[str, Any]], start: int) -> list[Fault]:
    before = [line for line in fired if line["incarnation"] == start]
    return [
        fault
        for fault in case.faults
        if any(_is_of(line, fault, case.world_size) for line in before)
    ]


def _is_of(line: Mapping[str, Any], fault: Fault, world_size: int) -> bool:
    ranks = [fault.victim]
    if fault.kind == "kill-two":
        ranks.append((fault.victim + 1) % world_size)
    kind = "kill" if fault.kind == "kill-two" else fault.kind
    return (
        (line["kind"], line["phase"]) == (kind, fault.phase)
        and line["rank"] in ranks
        and (is_in_recovery(fault.phase) or line["iteration"] >= fault.iteration)
    )


def check_case(
    case: Case, fired: Sequence[Mapping[str, Any]], recovered: Sequence[Expected | None]
) -> None:
    """Fail unless the faults fired, and each restart recovered what the case itself says that it must.

    This does not depend on what was left between the starts: the first window is complete long before the
    first fault. A slow machine may skip later ones, and may not have sent a state to the peer yet that is
    complete in memory or on storage. That the peer has what was sent is a promise in the simulation.

    Args:
        recovered: ``[start - 1]`` what was recovered, which was the newest and nearest that was left.
    """
    of_starts = [struck(case, fired, start) for start in range(len(recovered) + 1)]
    for fault in case.faults:
        assert any(fault in faults for faults in of_starts), f"{case}: {fault} did not fire"
    are_costly = [any(fault.is_costly for fault in faults) for faults in of_starts]
    assert are_costly == [*[True] * len(recovered), False], f"{case}: a restart without a fault"
    last: Expected | None = None
    for start, each in enumerate(recovered):
        faults = of_starts[start]
        lines = [
            line
            for line in fired
            if line["incarnation"] == start
            and any(_is_of(line, fault, case.world_size) for fault in faults if fault.is_costly)
        ]
        where = f"{case}: start {start + 1} recovered {each or 'nothing'} after {lines}"
        is_from_storage = any(fault.tier == "storage" for fault in faults)
        may_be_older = is_from_storage or any(fault.tier == "peer" for fault in faults)
        if each is None:  # a slow writer had not written a window yet
            assert is_from_storage, where
            continue
        length = each.target_iteration - each.restored_iteration + 1
        at_the_end = each.target_iteration == NUM_ITERATIONS  # everything is in one snapshot
        assert length == 1 if at_the_end else length in _lengths(case), where
        for line in lines:
            if line["phase"] in (Phase.RECOVERY, Phase.REPLAY):  # nothing was trained
                is_same = last is None or each.target_iteration == last.target_iteration
                assert is_same or may_be_older, where
            elif (
                line["phase"] != Phase.PERSIST
            ):  # which is told to write a state that was taken before
                # A state of which a snapshot is being taken is never complete.
                newest = line["iteration"] - (line["phase"] == Phase.SNAPSHOT)
                assert each.target_iteration <= newest, where
        is_older = last is not None and each.target_iteration < last.target_iteration
        assert may_be_older or not is_older, where
        was_in_storage = last is not None and "storage" in last.tiers
        for rank, tier in enumerate(() if each.has_parts or was_in_storage else each.tiers):
            assert tier in _tiers(faults, rank, is_older=is_older), where
        last = each


def _lengths(case: Case) -> Sequence[int]:
    return range(1, 4) if case.window is None else (case.window,)


def _tiers(faults: Sequence[Fault], rank: int, *, is_older: bool) -> set[str]:
    """Return the tiers that a rank's state may come from after faults in a start.

    Args:
        is_older: whether it is older than the state recovered before, whose memory may be used again.
    """
    lost = {fault.victim for fault in faults if fault.tier == "peer"}
    if any(fault.tier == "storage" for fault in faults):
        return {"storage"}
    if rank % 2 in lost:  # ranks take turns on two nodes
        return {"peer", "storage"}
    return {"memory", "storage"} if is_older else {"memory"}
