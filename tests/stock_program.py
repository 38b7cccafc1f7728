"""Pretraining of a GPT with stock Megatron-LM, to compare our program with.

It uses only Megatron's public interface: a model provider, a dataset provider, a forward step with its
loss, and the ranks that hold the embedding are passed to `megatron.training.pretrain`. From this project it
uses only the CPU device, which answers calls to CUDA on a machine without a GPU, and the fixes without which
Megatron loads no checkpoint there. It differs from Megatron's own scripts in two ways, so that one mistake
cannot be in both programs: it builds the model from Megatron's layer specifications, not with its builder,
and every rank reads its batches itself, so that nothing is broadcast to tensor-parallel ranks.

It trains GPTs on mock or indexed data, without packed sequences.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from megatron.training.vocab_utils import calculate_padded_vocab_size

from megatron.fault_tolerance.cpu import adam as cpu_adam
from megatron.fault_tolerance.cpu import device as cpu_device

Batch = dict[str, torch.Tensor | None]

# Flags of stock Megatron on a CPU: no fused kernel, no GPU communication.
CPU_FLAGS = [
    *("--distributed-backend", "gloo"),
    *("--transformer-impl", "local"),
    "--no-persist-layer-norm",
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
]


def train(flags: list[str]) -> None:
    """Train on this rank with Megatron's flags; the usual environment variables name the rank."""
    cpu_device.install()
    cpu_adam.install()  # else it can load no checkpoint
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # some layouts require it; only GPUs use it
    dataset_utils.compile_helpers = lambda: None  # the wheel has them compiled and has no Makefile
    sys.argv = ["stock_program", *CPU_FLAGS, *flags]
    args = parse_and_validate_args()
    if args.sequence_parallel:
        WrappedTorchNorm.__new__ = build_norm
    pretrain(
        pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=provide_datasets,  # their order is that of a version
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=provide_model,
        get_embedding_ranks=embedding_ranks,
    )


def build_norm(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> Any:
    """Build a torch norm for sequence parallelism; Megatron supports it in fused kernels only."""
    kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm = kinds[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this rank's part of the GPT, or one of its virtual stages."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    options = {
        "use_transformer_engine": config.transformer_impl == "transformer_engine",
        "normalization": args.normalization,
        "qk_l2_norm": args.qk_l2_norm,
    }
    mtp_spec = None
    if config.mtp_num_layers:
        last_layer = get_gpt_decoder_layer_specs(config, **options)[-1]
        with_te = options["use_transformer_engine"]
        mtp_spec = get_gpt_mtp_block_spec(config, last_layer, with_te, vp_stage=vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, vp_stage=vp_stage, **options),
        vocab_size=calculate_padded_vocab_size(
            args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size
        ),
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        mtp_block_spec=mtp_spec,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold the weight of the input embedding."""
    args = get_args()
    ranks = {pipeline_ranks[0]}
    if not args.untie_embeddings_and_output_weights:
        ranks.add(pipeline_ranks[-1])
    ranks.update(get_mtp_ranks(pipeline_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def reads_batches(vp_stage: int | None = None) -> bool:
    """Return whether this stage needs the batch: for the embedding, MTP or the loss."""
    config = core_transformer_config_from_args(get_args())
    is_read: bool = is_first_or_last_pipeline_stage(vp_stage) or mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )
    return is_read


def provide_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Return the training, validation and test data; None where the stage needs none."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    is_needed = partial(reads_batches, vp_stage)
    train_data, valid_data, test_data = BlendedMegatronDatasetBuilder(
        kind, num_samples, is_needed, config
    ).build()
    return train_data, valid_data, test_data


# Makes Megatron call it on every rank, not only on the first of each tensor-parallel group.
_attributes: Any = provide_datasets
_attributes.is_distributed = True


def read_batch(data: Iterator[dict[str, Any]] | None, vp_stage: int | None) -> Batch:
    """Return the next micro-batch, or the part of it of a context-parallel rank; Nones if not needed."""
    keys = ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
    if data is None or not reads_batches(vp_stage):
        return dict.fromkeys(keys)
    sample = next(data)
    batch = {key: sample[key].cuda() if key in sample else None for key in keys}
    group = mpu.get_context_parallel_group()
    part: Batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)
    return part


def forward_step(data: Iterator[dict[str, Any]] | None, model: Any) -> tuple[torch.Tensor, Any]:
    """Return the output of the model for a micro-batch, and the function that turns it into the loss."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = read_batch(data, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(sum_losses, batch["loss_mask"])


def sum_losses(
    mask: torch.Tensor | None, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of a micro-batch's losses, their number, and both for the log.

    Args:
        mask: [batch, sequence], 1 where a token counts; None only on stages without a loss.
        losses: [batch, sequence], the cross-entropy of each token.
    """
    assert mask is not None
    total = (losses.float() * mask.float()).sum()
    count = mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.to(total.dtype)])}
