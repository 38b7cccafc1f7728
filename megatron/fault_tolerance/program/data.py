"""Training, validation and test datasets for Megatron's loop.

The data are indexed (--data-path and its relatives, and the dataset made from --text-dir) or mock data.
text_dataset.py turns text into indexed data.
"""

import argparse
from typing import Any

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.fault_tolerance.program.forward_step import needs_batch
from moe_ft.errors import ConfigError


def provide_datasets(num_samples: Any, vp_stage: int | None = None) -> Any:
    """Build the three datasets; Megatron calls this on all ranks.

    Args:
        num_samples: minimum for the training, validation and test dataset.

    Returns:
        (train, validation, test); None on the ranks that read no data.
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

    Args:
        args: Megatron's arguments; its validation has set the default of --split.
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
