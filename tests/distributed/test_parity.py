"""Our program trains exactly as a stock Megatron program does, bit for bit (tests/stock_program.py)."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, events, run_training
from tests.shares import share_of
from tests.stock import run_program

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EVALUATION = {"eval_interval": 2, "eval_iters": 1}
TIED = {"untie_embeddings_and_output_weights": False}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
GATED_EXPERT = {"moe_shared_expert_intermediate_size": 64, "moe_shared_expert_gate": True}
BIASED_ROUTER = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_aux_loss_coeff": 0,
}

# (ranks, layout, changes to the small model)
CASES: dict[str, tuple[int, dict[str, int], Mapping[str, Any]]] = {
    "one rank, fp32, two MTP layers, rope scaling, per-token loss": (
        1,
        {},
        TIED
        | BIASED_ROUTER
        | GATED_EXPERT
        | {"mtp_num_layers": 2, "use_rope_scaling": True, "calculate_per_token_loss": True}
        | {"bf16": False, "use_distributed_optimizer": False, "mock_data": True},
    ),
    "pp2 ep2, learned positions, dense layers, evaluation": (
        4,
        {"pp": 2, "ep": 2},
        DROPOUT
        | EVALUATION
        | DOCUMENTS
        | {"position_embedding_type": "learned_absolute", "qk_layernorm": True}
        | {"moe_layer_freq": 2, "moe_z_loss_coeff": 0.001, "moe_input_jitter_eps": 0.01},
    ),
    "virtual stages, fp16, full recomputation, evaluation": (
        2,
        {"pp": 2},
        TIED
        | DROPOUT
        | EVALUATION
        | DOCUMENTS
        | {"num_layers_per_virtual_pipeline_stage": 1, "bf16": False, "fp16": True}
        | {"initial_loss_scale": 4096, "loss_scale_window": 2, "mtp_num_layers": 1}
        | {"recompute_granularity": "full", "recompute_method": "uniform"}
        | {"recompute_num_layers": 1, "moe_router_load_balancing_type": "seq_aux_loss"},
    ),
    "layout with MTP on a stage of its own": (
        3,
        {"pp": 3},
        DROPOUT
        | DOCUMENTS
        | GATED_EXPERT
        | {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Etttt|m|L"},
    ),
    "layout of virtual stages with MTP before the last, tied": (
        3,
        {"pp": 3},
        TIED
        | EVALUATION
        | BIASED_ROUTER
        | {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et|t|t|t|m|L"}
        | {"global_batch_size": 12, "use_distributed_optimizer": False},
    ),
    "tp2 ep2, sequence parallel, overlapped communication": (
        4,
        {"tp": 2, "ep": 2, "etp": 1},
        DROPOUT
        | {"sequence_parallel": True, "normalization": "RMSNorm", "mtp_num_layers": 1}
        | {"overlap_grad_reduce": True, "overlap_param_gather": True}
        | {"recompute_granularity": "selective", "recompute_modules": "core_attn moe"},
    ),
    "tp2 pp2, expert tensor parallel, evaluation": (
        4,
        {"tp": 2, "pp": 2, "etp": 2},
        TIED
        | EVALUATION
        | DOCUMENTS
        | GATED_EXPERT
        | {"sequence_parallel": True, "group_query_attention": True, "num_query_groups": 2},
    ),
    "ep2 dp2, batch-size ramp, learning-rate schedule": (
        4,
        {"ep": 2},
        {"global_batch_size": False, "step_batch_size_schedule": ("0:8 512:16",)}
        | {"use_distributed_optimizer": False, "lr_warmup_iters": 2, "lr_decay_style": "cosine"}
        | {"rotary_percent": 0.5, "rotary_seq_len_interpolation_factor": 2}
        | {"calculate_per_token_loss": True, "no_create_attention_mask_in_dataloader": True},
    ),
}

# test_convert.py compares tensor parallelism with the stock program.
QUICK = (
    "one rank, fp32, two MTP layers, rope scaling, per-token loss",
    "virtual stages, fp16, full recomputation, evaluation",
)


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return flags that train on documents so short that a sequence holds several."""
    folder = tmp_path_factory.mktemp("documents")
    for number in range(100):
        text = f"Document {number}: {number * number}."[: 8 + number % 20]
        (folder / f"{number}.txt").write_text(text)
    write_dataset(TextSource(paths=(str(folder),)), folder / "data" / "text")
    paths = [
        "--data-path",
        str(folder / "data" / "text"),
        "--data-cache-path",
        str(folder / "cache"),
    ]
    return [*paths, "--split", "60,20,20"]


@pytest.mark.parametrize(
    "case", share_of(CASES, *QUICK, versions=["tp2 pp2, expert tensor parallel, evaluation"])
)
def test_program_trains_as_the_stock_program_bit_for_bit(
    case: str, dataset_flags: list[str], short_documents: list[str], tmp_path: Path
) -> None:
    world_size, layout, changes = CASES[case]
    flags = model_flags(**changes) + layout_flags(layout)
    if "eod_mask_loss" in changes:
        flags += short_documents
    elif "eval_iters" in changes:  # Megatron asks a blend for validation data
        blend = ["0.7", dataset_flags[1], "0.3", short_documents[1]]
        flags += ["--data-path", *blend, *dataset_flags[2:]]
    elif "mock_data" not in changes:
        flags += dataset_flags
    log = ["--moe-ft-event-log", str(tmp_path / "events")]
    stock, ours = (
        run_program(words, world_size, is_stock=is_stock, folder=tmp_path / name)
        for words, is_stock, name in ((flags, True, "stock"), (flags + log, False, "ours"))
    )
    assert ours == stock
    losses = [value for _, value in ours.scalars["lm loss"]]
    assert losses[-1] < losses[0]
    iterations = events(tmp_path / "events", world_size - 1, "iteration")
    assert [line["loss"] for line in iterations] == losses
    tp = layout.get("tp", 1)
    for tp_rank in range(tp):
        assert len(set(itertools.chain(*ours.embeddings[tp_rank::tp]))) == 1


@pytest.mark.rest
def test_another_seed_gives_another_digest(dataset_flags: list[str], tmp_path: Path) -> None:
    ends = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        flags = model_flags(seed=seed, train_iters=1) + dataset_flags + event_flags(folder)
        run_training(flags, 1, log_dir=folder).check()
        ends.append(digests(folder, 1))
    assert ends[0] != ends[1]
