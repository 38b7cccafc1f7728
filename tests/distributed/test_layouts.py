"""Every layout and feature that is supported on a CPU trains."""

from pathlib import Path

import pytest

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events, run_training

# (ranks, layout, changes to the small model)
CASES: dict[str, tuple[int, dict[str, int], dict[str, object]]] = {
    "one rank": (1, {}, {}),
    "ep2 dp2, fp32, no distributed optimizer": (
        2,
        {"ep": 2},
        {"bf16": False, "use_distributed_optimizer": False},
    ),
    "pp2 ep2": (4, {"pp": 2, "ep": 2}, {}),
    "pp2 ep2 dp2, 8 ranks": (8, {"pp": 2, "ep": 2}, {}),
    "tp2 sequence parallel, ep2": (4, {"tp": 2, "ep": 2, "etp": 1}, {"sequence_parallel": True}),
    "tp2 expert tensor parallel 2": (
        2,
        {"tp": 2, "etp": 2},
        {"sequence_parallel": True, "normalization": "RMSNorm"},
    ),
    "tp2 pp2 ep2, 8 ranks": (8, {"tp": 2, "pp": 2, "ep": 2}, {"sequence_parallel": True}),
    "tp4 sequence parallel": (4, {"tp": 4}, {"sequence_parallel": True}),
    "virtual stages": (2, {"pp": 2}, {"num_layers_per_virtual_pipeline_stage": 1}),
    "expert bias": (
        2,
        {"ep": 2},
        {
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
            "moe_aux_loss_coeff": 0,
            "moe_router_load_balancing_type": "none",
        },
    ),
    "shared experts, dense layers": (
        2,
        {"pp": 2},
        {"moe_shared_expert_intermediate_size": 64, "moe_layer_freq": 2},
    ),
    "full recomputation, dropout": (
        2,
        {"pp": 2},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
    ),
    "selective recomputation": (
        2,
        {"ep": 2},
        {"recompute_granularity": "selective", "recompute_modules": "core_attn moe"},
    ),
    "fp16 with loss scaling": (
        2,
        {"pp": 2},
        {"bf16": False, "fp16": True, "initial_loss_scale": 4096, "loss_scale_window": 2},
    ),
    "per-token loss": (2, {"pp": 2}, {"calculate_per_token_loss": True}),
    "batch-size ramp": (
        2,
        {"ep": 2},
        {
            "global_batch_size": False,
            "step_batch_size_schedule": ("0:8 512:16",),
        },
    ),
    "overlapped communication": (
        4,
        {"ep": 2},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "tied embeddings, half-precision optimizer": (
        2,
        {"pp": 2},
        {"untie_embeddings_and_output_weights": False, "use_distributed_optimizer": False},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_layout_trains_and_loss_falls(case: str, dataset_flags: list[str], tmp_path: Path) -> None:
    world_size, layout, changes = CASES[case]
    flags = model_flags(**changes) + layout_flags(layout) + dataset_flags + event_flags(tmp_path)
    run_training(flags, world_size, log_dir=tmp_path).check()
    losses = [line["loss"] for line in events(tmp_path, world_size - 1, "iteration")]
    assert losses[-1] < losses[0]
    assert all(events(tmp_path, r, "end")[0]["reason"] == "finished" for r in range(world_size))
