"""A pretraining script as somebody writes it for Megatron-LM: own data, own loss, own arguments, own checks.

It uses Megatron's public interface only, and knows nothing of this project. It draws random numbers in its
loss, and changes arguments after they are parsed.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

LOWEST_LR = 1e-4


class Sums(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences in which each number is the sum of the two before it, modulo a base."""

    def __init__(self, num_samples: int, length: int, base: int) -> None:
        self._num_samples, self._length, self._base = num_samples, length, base

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = [index % self._base, (index // self._base + 1) % self._base]
        while len(numbers) <= self._length:
            numbers.append((numbers[-1] + numbers[-2]) % self._base)
        row = torch.tensor(numbers)
        return {"tokens": row[:-1], "labels": row[1:], "positions": torch.arange(self._length)}


def add_own_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of this script."""
    group = parser.add_argument_group("sums")
    group.add_argument("--base", type=int, required=True, help="the numbers are less than this")
    group.add_argument("--ignored-share", type=float, default=0.25, help="100% would be 1.0")
    return parser


def provide_datasets(num_samples: list[int]) -> tuple[Sums, Sums, Sums]:
    """Return the data for training, validation and test."""
    args = get_args()
    train, valid, test = (
        Sums(max(1, count or 0), args.seq_length, args.base) for count in num_samples
    )
    return train, valid, test


provide_datasets.is_distributed = True  # type: ignore[attr-defined]


def provide_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> GPTModel:
    """Build this rank's part of the model."""
    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, vp_stage=vp_stage
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def loss_function(
    losses: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Add up the losses of a random part of the tokens."""
    kept = (torch.rand_like(losses) >= get_args().ignored_share).float()
    total, count = (losses * kept).sum(), kept.sum()
    logged = torch.stack([total.detach(), count])
    return total, count.to(torch.int), {"lm loss": logged}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    """Run one micro-batch forward."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = {name: tensor.cuda() for name, tensor in next(data).items()}
    timer.stop()
    length = batch["tokens"].shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device="cuda").triu(1)
    output = model(batch["tokens"], batch["positions"], mask, labels=batch["labels"])
    return output, loss_function


def parse() -> argparse.Namespace:
    """Parse the arguments and change what this script wants differently."""
    args: argparse.Namespace = parse_and_validate_args(
        extra_args_provider=add_own_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    args.min_lr = LOWEST_LR
    return args


def main(train: Any = pretrain, provide: Any = provide_model) -> None:
    """Train on sums."""
    args = parse()
    print_rank_0(f"sums below {args.base}")
    train(
        cfg_container=pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=provide_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=partial(forward_step),
        model_provider=provide,
    )


if __name__ == "__main__":
    main()
