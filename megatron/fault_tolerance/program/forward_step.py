"""Data sets, forward step and loss of GPT pretraining, as Megatron's loop calls them.

The data are indexed (--data-path and its relatives, and the dataset made from --text-dir) or mock data.
text_dataset.py turns text into indexed data.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.fault_tolerance.seams.versions import name_of_parameter
from moe_ft.errors import ConfigError

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]
_PACKED = name_of_parameter(get_batch_on_this_tp_rank, "has_cu_seqlens", "is_sft")
_BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def needs_batch(vp_stage: int | None) -> bool:
    """Return whether this rank's (virtual) pipeline stage reads tokens or labels."""
    ignore_virtual = vp_stage is None
    return (
        parallel_state.is_pipeline_first_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
        or parallel_state.is_pipeline_last_stage(ignore_virtual=ignore_virtual, vp_stage=vp_stage)
        or _has_mtp(vp_stage)
    )


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None,
    model: Any,
    return_schedule_plan: bool = False,
) -> tuple[Any, LossFunction]:
    """Run one micro-batch forward.

    Args:
        data_iterator: yields tokens, labels, position_ids [micro_batch, seq] int64, loss_mask
            [micro_batch, seq] float32 and attention_mask [micro_batch, 1, seq, seq] bool. Only
            tensor-parallel rank 0 of the stages that need a batch reads it.
        return_schedule_plan: return the plan of the combined 1F1B schedule instead of the output.

    Returns:
        The output of the model (on the last stage the loss per token, [micro_batch, seq]) and the loss
        function that Megatron applies to it on the last stage.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    args = get_args()
    micro_batch_size = args.micro_batch_size if model.training else args.eval_micro_batch_size
    batch = _read_batch(data_iterator, vp_stage, micro_batch_size)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    output = run(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return output, functools.partial(loss_function, batch["loss_mask"])


def loss_function(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the loss over the tokens that count.

    Args:
        loss_mask: [micro_batch, seq] float32, 0 where a token does not count.
        output: loss per token, [micro_batch, seq].

    Returns:
        The summed loss (Megatron divides it), the number of tokens (int32), and the values to log: the
        summed loss and the number of tokens, which Megatron reduces over the job.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        validate = get_rerun_state_machine().validate_result
        for rejects, what in ((torch.isnan, "NaN"), (torch.isinf, "infinite")):
            validate(total, rejects, f"the loss of this micro-batch is {what}", fatal=True)
    logged = torch.stack([total.detach(), num_tokens.to(total.dtype)])
    return total, num_tokens, {"lm loss": logged}


@functools.cache
def _has_mtp(vp_stage: int | None) -> bool:
    """Return whether this stage has layers for multi-token prediction (--mtp-num-layers)."""
    args = get_args()
    if not args.mtp_num_layers:
        return False
    return bool(
        mtp_on_this_rank(
            core_transformer_config_from_args(args).pipeline_model_parallel_layout,
            args.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def _read_batch(data_iterator: Any, vp_stage: int | None, micro_batch_size: int) -> dict[str, Any]:
    """Return this rank's part of the next batch; tensors that the stage does not read are None.

    Called by all ranks of the tensor-parallel group.
    """
    if not needs_batch(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    args = get_args()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = dict.fromkeys(_BATCH_KEYS)
    if tp_rank == 0:
        sample = next(data_iterator)  # may hold other keys: a blend adds the dataset of the sample
        given = [key for key in _BATCH_KEYS if key in sample]
        batch |= {key: sample[key].cuda(non_blocking=True) for key in given}
    batch = get_batch_on_this_tp_rank(
        batch,
        **{_PACKED: False},
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_has_mtp(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
    )
    if args.context_parallel_size > 1:
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
        )
    return batch


def provide_datasets(num_samples: Any, vp_stage: int | None = None) -> Any:
    """Build the training, validation and test dataset, of these numbers of samples at least.

    Megatron calls this on all ranks. Those that read no data get None.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
    )

    def is_built_on_rank() -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and needs_batch(vp_stage)

    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    return BlendedMegatronDatasetBuilder(
        dataset_type, num_samples, is_built_on_rank, config
    ).build()


provide_datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron: all ranks call it


def check_splits(args: argparse.Namespace) -> None:
    """Raise ConfigError if a part of --split would get no document: Megatron would never return.

    Its validation has set the default of --split.
    """
    blend, _ = get_blend_and_blend_per_split(args)
    if args.mock_data or blend is None:
        return
    bounds = convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))
    for prefix in blend[0]:
        if "://" in prefix:
            continue
        dataset = IndexedDataset(prefix, mmap=args.mmap_bin_files)
        num_documents = GPTDataset.numel_low_level_dataset(dataset)
        for part, bound in zip(Split, bounds, strict=True):
            if bound and round(bound[0] * num_documents) == round(bound[1] * num_documents):
                raise ConfigError(
                    f"--split={args.split} leaves the {part.name} part of {prefix} without a "
                    f"document: there are {num_documents}, shared in these proportions. Give the "
                    "part a larger share (--split 80,10,10), or none (--split 100,0,0 with "
                    "--eval-iters 0), or prepare more text."
                )
