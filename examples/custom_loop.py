"""A training loop on `megatron.core` alone that takes checkpoints with moe_ft and recovers after a failure.

It trains a small MoE GPT on numbers that it makes up, on GPUs or, without any, on the CPU. Start it twice:
rank 1 is killed the first time, and the second start continues where the first one was.

    torchrun --nproc-per-node 2 examples/custom_loop.py --kill-at 5 --event-log runs/custom
    torchrun --nproc-per-node 2 examples/custom_loop.py --kill-at 5 --event-log runs/custom

The digest at the end is the one of a run that nobody disturbed.
"""

import argparse
import os
import random
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron.fault_tolerance.checkpointer import Checkpointer, Position, RunFacts
from megatron.fault_tolerance.cpu import device as cpu_device
from moe_ft.state.digest import digest_state

SEED, SEQUENCE_LENGTH, VOCABULARY = 1234, 32, 128
MICRO_BATCH, NUM_MICROBATCHES = 2, 2
DDP = DistributedDataParallelConfig(use_distributed_optimizer=True)


def start_rank() -> None:
    """Join the other ranks, and draw the same random numbers in every start."""
    is_on_gpu = torch.cuda.is_available()
    if is_on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        cpu_device.install()
    dist.init_process_group("nccl" if is_on_gpu else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    tensor_parallel.model_parallel_cuda_manual_seed(SEED)


def build_model() -> DistributedDataParallel:
    """Return a GPT of two MoE layers, whose experts are divided among the ranks."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        num_moe_experts=4,
        moe_router_topk=2,
        moe_aux_loss_coeff=0.01,
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=dist.get_world_size(),
        add_bias_linear=False,
        hidden_dropout=0.1,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE_LENGTH,
        position_embedding_type="rope",
    )
    model = DistributedDataParallel(config, DDP, model.cuda().bfloat16())
    model.broadcast_params()
    return model


def build_optimizer(
    model: DistributedDataParallel, num_iterations: int
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Return Adam and its learning rates."""
    config = OptimizerConfig(lr=1e-3, min_lr=1e-5, bf16=True, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(config, [model])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-5,
        lr_warmup_steps=2,
        lr_decay_steps=num_iterations,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=num_iterations,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def read_batch(sample: int) -> torch.Tensor:
    """Return ``[micro-batch, sequence + 1]`` tokens, which the number of their first sample decides."""
    generator = torch.Generator().manual_seed(SEED + sample)
    shape = (MICRO_BATCH, SEQUENCE_LENGTH + 1)
    # Larger numbers are more frequent: something to learn.
    return (torch.rand(shape, generator=generator).sqrt() * VOCABULARY).long().cuda()


class Loop:
    """The loop's own part of an iteration: data, forward, backward."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.loss = model, torch.zeros(())

    def run_forward_backward(self, position: Position, num_microbatches: int) -> None:
        """Compute the gradients of the iteration that begins at a position."""
        positions = torch.arange(SEQUENCE_LENGTH).expand(MICRO_BATCH, -1).cuda()
        causal = torch.ones(SEQUENCE_LENGTH, SEQUENCE_LENGTH).triu(1).bool()[None, None].cuda()
        first = position.consumed_samples + dist.get_rank() * num_microbatches * MICRO_BATCH
        self.model.zero_grad_buffer()
        for index in range(num_microbatches):
            tokens = read_batch(first + index * MICRO_BATCH)
            is_last = index == num_microbatches - 1
            with nullcontext() if is_last else self.model.no_sync():
                losses = self.model(tokens[:, :-1], positions, causal, labels=tokens[:, 1:])
                self.loss = losses.float().mean()
                (self.loss / num_microbatches).backward()
        finalize_model_grads([self.model])


def train(arguments: argparse.Namespace) -> str:
    """Train to the end, from where an earlier start was, if there was one; return a digest of the end."""
    model = build_model()
    optimizer, scheduler = build_optimizer(model, arguments.iterations)
    loop = Loop(model)
    batch_size = MICRO_BATCH * NUM_MICROBATCHES * dist.get_world_size()
    run = RunFacts(
        settings={"seed": SEED, "data": "made up"},
        train_iterations=arguments.iterations,
        samples_per_iteration=batch_size,
        sequence_length=SEQUENCE_LENGTH,
        replay_settings={"micro_batch": MICRO_BATCH},
    )
    settings = {
        "strategy": "dense",
        "job_id": "custom-loop",
        "event_log": arguments.event_log,
        "inject_fault": [f"kill:1@{arguments.kill_at}:backward"] if arguments.kill_at else [],
        **dict(word.split("=", 1) for word in arguments.setting),
    }
    with Checkpointer(
        settings, model=[model], optimizer=optimizer, scheduler=scheduler, run=run
    ) as checkpointer:
        position = checkpointer.recover(replay=loop.run_forward_backward)
        print(f"rank {dist.get_rank()} begins at iteration {position.iteration}", flush=True)
        while position.iteration < arguments.iterations:
            optimizer.zero_grad()
            loop.run_forward_backward(position, NUM_MICROBATCHES)
            checkpointer.before_step()
            optimizer.step()
            scheduler.step(1)
            position = checkpointer.end_iteration(
                position.iteration + 1,
                consumed_samples=position.consumed_samples + batch_size,
                num_microbatches=NUM_MICROBATCHES,
                loss=loop.loss.detach(),
            )
        is_saved = checkpointer.finish()
    assert is_saved, "the last state should be on storage"
    counters = {"iteration": position.iteration, "samples": position.consumed_samples}
    return digest_state([model], optimizer, scheduler, counters).sha256_all


def main() -> None:
    """Train, and print the digest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument(
        "--setting", action="append", default=[], metavar="NAME=VALUE", help="a setting of moe_ft"
    )
    parser.add_argument("--event-log", help="a directory; needed for --kill-at")
    parser.add_argument("--kill-at", type=int, help="the iteration in which rank 1 is killed, once")
    arguments = parser.parse_args()
    start_rank()
    print(f"rank {dist.get_rank()} digest {train(arguments)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
