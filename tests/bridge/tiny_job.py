"""A user's script: a tiny MoE GPT that Megatron-Bridge trains. It knows of moe_ft only how digests are made.

    tiny_job.py FOLDER [OVERRIDES...]

FOLDER gets the digests of the state of each rank at the end. Overrides are Hydra's, as Bridge's own scripts
take them, such as ``model.pipeline_model_parallel_size=2``.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from moe_ft.state.digest import digest_state

SEQ_LENGTH, VOCABULARY = 32, 127


def tiny_model() -> GPTModelProvider:
    return GPTModelProvider(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        seq_length=SEQ_LENGTH,
        transformer_layer_spec=local_layer_spec,
        transformer_impl="local",
        num_moe_experts=4,
        moe_router_topk=2,
        moe_ffn_hidden_size=32,
        moe_token_dispatcher_type="alltoall",
        moe_aux_loss_coeff=0.01,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        hidden_dropout=0.1,
        attention_dropout=0.1,
        pipeline_dtype=torch.float32,
        make_vocab_size_divisible_by=8,
        # Kernels that need a GPU.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        cross_entropy_loss_fusion=False,
    )


def tiny_config() -> ConfigContainer:
    """Return the configuration, as a recipe of Bridge would."""
    return ConfigContainer(
        model=tiny_model(),
        optimizer=OptimizerConfig(
            optimizer="adam", lr=1e-3, min_lr=1e-4, use_distributed_optimizer=True, clip_grad=1.0
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine",
            lr_warmup_iters=2,
            lr_decay_iters=20,
            start_weight_decay=0.01,
            end_weight_decay=0.01,
            weight_decay_incr_style="constant",
        ),
        train=TrainingConfig(train_iters=8, global_batch_size=8, micro_batch_size=1),
        validation=ValidationConfig(eval_interval=1000, eval_iters=0),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True),
        dataset=MockGPTDatasetConfig(
            seq_length=SEQ_LENGTH,
            random_seed=1234,
            reset_attention_mask=False,
            reset_position_ids=False,
            eod_mask_loss=False,
            num_dataset_builder_threads=1,
            dataloader_type="single",
            num_workers=0,
            persistent_workers=False,
            pin_memory=False,
            skip_getting_attention_mask_from_dataset=False,  # local attention wants one
        ),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCABULARY),
        checkpoint=CheckpointConfig(save=None, load=None),
        logger=LoggerConfig(log_interval=1, tensorboard_dir=None),
        rng=RNGConfig(seed=1234),
        dist=DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
    )


class Digests(Callback):
    """Writes two digests of the last state: weights and moments, and with everything else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, context: CallbackContext) -> None:
        state = context.state.train_state
        counters = {
            "iteration": state.step,
            "samples": state.consumed_train_samples,
            "validation": state.consumed_valid_samples,
            "skipped": state.skipped_train_samples,
            "operations": state.floating_point_operations_so_far,
        }
        digest = digest_state(context.model, context.optimizer, context.scheduler, counters)
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{dist.get_rank()}.json"
        path.write_text(json.dumps([digest.sha256, digest.sha256_all]))


class Strike(Callback):
    """Kills or stops rank 1 once, where no fault that moe_ft injects does.

    The variable STRIKE says so: kill:log:6, or stop:evaluation:6.
    """

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "struck"

    def on_train_step_end(self, context: CallbackContext) -> None:
        self._strike("log", context.state.train_state.step + 1)  # the loop has not counted it yet

    def on_eval_step_start(self, context: CallbackContext) -> None:
        self._strike("evaluation", context.state.train_state.step)

    def _strike(self, where: str, iteration: int) -> None:
        how, _, moment = os.environ.get("STRIKE", "").partition(":")
        if moment != f"{where}:{iteration}" or dist.get_rank() != 1 or self._mark.exists():
            return
        self._mark.parent.mkdir(parents=True, exist_ok=True)
        self._mark.touch()
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def main() -> None:
    folder, *overrides = sys.argv[1:]
    config = process_config_with_overrides(tiny_config(), cli_overrides=overrides or None)
    pretrain(config, forward_step, callbacks=[Digests(Path(folder)), Strike(Path(folder))])


if __name__ == "__main__":
    main()
