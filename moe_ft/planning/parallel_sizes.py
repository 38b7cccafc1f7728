"""Rules for the parallel sizes in Megatron's arguments: of training and of a job that is only planned."""

import argparse

from moe_ft.errors import ConfigError


def check_world_size(args: argparse.Namespace, world_size: int) -> None:
    """Raise ConfigError unless the ranks can be divided as the sizes of Megatron's arguments say."""
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    if world_size % (tp * pp * cp):
        raise ConfigError(
            f"world size {world_size} must be a multiple of --tensor-model-parallel-size={tp} x "
            f"--pipeline-model-parallel-size={pp} x --context-parallel-size={cp} = {tp * pp * cp}. "
            "Start another number of ranks or change one of the sizes."
        )
    etp = tp if args.expert_tensor_parallel_size is None else args.expert_tensor_parallel_size
    ep = args.expert_model_parallel_size
    if world_size % (etp * ep * pp):
        is_default = args.expert_tensor_parallel_size is None
        etp_source = " (default: the tensor parallel size)" if is_default else ""
        raise ConfigError(
            f"world size {world_size} must be a multiple of --expert-tensor-parallel-size={etp}"
            f"{etp_source} x --expert-model-parallel-size={ep} x "
            f"--pipeline-model-parallel-size={pp} = {etp * ep * pp}. "
            "Start another number of ranks or change one of the sizes."
        )


def check_experts(num_experts: int | None, ep: int, top_k: int) -> None:
    """Raise ConfigError unless the ranks can share the experts, and a token has as many as it is sent to."""
    if num_experts is None:
        if ep > 1:
            raise ConfigError(
                f"--expert-model-parallel-size={ep} needs a model with experts. "
                "Add --num-experts, or use --expert-model-parallel-size 1."
            )
        return
    if num_experts % ep:
        raise ConfigError(
            f"--num-experts={num_experts} must be a multiple of --expert-model-parallel-size={ep}: "
            "every expert-parallel rank holds the same number of experts. Change one of the two."
        )
    if top_k > num_experts:
        raise ConfigError(
            f"--moe-router-topk={top_k} must be at most --num-experts={num_experts}. "
            "Lower the first or raise the second."
        )
