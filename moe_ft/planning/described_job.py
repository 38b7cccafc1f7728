"""The planned job that flags describe: sizes, ranks and bytes as Megatron's validation derives them.

The flags are declared in config/megatron_flags.py and config/flags.py.
"""

import argparse
import math
from collections.abc import Mapping

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.format.packings import Packing
from moe_ft.planning.boundary_log import PipelineTraffic
from moe_ft.planning.model_size import ByteModel, LatentAttention, ModelShape, stage_units
from moe_ft.planning.ownership import SavingLayout, Sharding
from moe_ft.planning.parallel_sizes import check_experts, check_world_size
from moe_ft.planning.pipeline import layers_of_stages
from moe_ft.planning.placement import default_replication_factor
from moe_ft.planning.planned_job import Measured, PlannedJob, flag_of

_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_AT_LEAST_1 = (
    *_REQUIRED,
    *("ffn_hidden_size", "moe_ffn_hidden_size", "kv_channels", "num_query_groups", "vocab_size"),
    *("moe_shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
    *("qk_pos_emb_head_dim", "v_head_dim"),
    *("padded_vocab_size", "make_vocab_size_divisible_by", "moe_router_topk", "ddp_bucket_size"),
    *("pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size"),
    *("max_position_embeddings", "train_iters", "train_samples", "global_batch_size"),
    *("micro_batch_size", "seq_length"),
)
_MOST = 1_000_000  # ranks, and experts of all layers: plans list each
_BYTE_VOCABULARY = 256  # of --text-dir without a tokenizer
_LEAST_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000  # Megatron's defaults
_FORMAT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
_PACKED_BYTES = {Packing.SPLIT: 4, Packing.BF16: 2, Packing.FP16: 2}  # all others: 1


def describe_job(
    args: argparse.Namespace,
    config: MoeFtConfig,
    measured: Measured,
    *,
    world_size: int,
    ranks_per_node: int,
) -> PlannedJob:
    """Return the job that flags describe.

    Args:
        world_size: ranks of the job.

    Raises:
        ConfigError: if a flag cannot be, two do not fit together, or sizes are not known for one.
    """
    _check_sizes(args, world_size)
    shape = shape_of(args)
    layers = layers_of_stages(args)
    layout = layout_of(args, world_size, config.strategy.sharding)
    bucket = None
    if args.overlap_grad_reduce:
        num_data_parallel = layout.dp // args.context_parallel_size
        bucket = args.ddp_bucket_size or max(_LEAST_BUCKET, _BUCKET_PER_RANK * num_data_parallel)
    if measured.storage_bandwidth is not None and not config.storage.persists:
        raise ConfigError(
            f"--storage-bandwidth={measured.storage_bandwidth:g} needs checkpoints that go to storage. Add "
            "--moe-ft-persist-dir URL to the flags of training, or leave it out."
        )
    return PlannedJob(
        shape=shape,
        stages=tuple(stage_units(shape, len(layers), layers)),
        layout=layout,
        bucket_parameters=bucket,
        byte_model=bytes_of(args, config.precision.packings),
        config=config,
        ranks_per_node=ranks_per_node,
        replication_factor=_replication(config, world_size, ranks_per_node),
        train_iterations=_train_iterations(args),
        active_share=min(1.0, args.moe_router_topk / shape.num_experts),
        is_grouped=args.moe_grouped_gemm,
        measured=measured,
        live_bytes=bytes_of(
            args, dict.fromkeys(config.precision.packings, Packing.EXACT)
        ).optimizer,
        traffic=traffic_of(args, layout) if config.memory.upstream_log else None,
    )


def _check_sizes(args: argparse.Namespace, world_size: int) -> None:
    for name in _AT_LEAST_1:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(
                f"{flag_of(name)}={getattr(args, name)} must be a whole number, at least 1. Give a larger "
                "one."
            )
    num_experts = args.num_layers * (args.num_experts or 1) if args.num_layers else 0
    for number, what in (
        (world_size, "ranks (--world-size, or what the launcher starts)"),
        (num_experts, "experts of all layers (--num-layers times --num-experts)"),
    ):
        if number > _MOST:
            raise ConfigError(
                f"{number} {what} must be at most {_MOST}: a plan lists each. Give the numbers of the job."
            )


def shape_of(args: argparse.Namespace) -> ModelShape:
    """Return the model that Megatron would build.

    Raises:
        ConfigError: if a flag is missing or does not fit another one.
    """
    missing = [flag_of(name) for name in _REQUIRED if getattr(args, name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not given: the sizes of the model follow from the flags of training. "
            "Give the whole command line after the --."
        )
    heads, hidden = args.num_attention_heads, args.hidden_size
    if args.kv_channels is None and not args.multi_latent_attention:
        _check_divides(heads, "--num-attention-heads", hidden, "--hidden-size")
    groups = args.num_query_groups if args.group_query_attention else heads
    _check_divides(groups, "--num-query-groups", heads, "--num-attention-heads")
    num_experts = args.num_experts or 0
    # Megatron keeps gated FFNs at the parameters of plain ones, in multiples of 64.
    ffn = args.ffn_hidden_size or (int(4 * hidden * 2 / 3 / 64) * 64 if args.swiglu else 4 * hidden)
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=hidden,
        num_experts=max(1, num_experts),
        moe_layers=_moe_layers(args) if num_experts else (),
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size or ffn,
        shared_expert_hidden_size=args.moe_shared_expert_intermediate_size or 0,
        num_attention_heads=heads,
        kv_channels=args.kv_channels or hidden // heads,
        num_query_groups=groups,
        vocab_size=_padded_vocabulary(args),
        num_positions=_num_positions(args),
        has_output_layer=args.untie_embeddings_and_output_weights,
        is_gated=args.swiglu,
        has_bias=args.add_bias_linear,
        has_qkv_bias=args.add_qkv_bias,
        has_norm_bias=args.normalization == "LayerNorm",
        has_qk_norm=args.qk_layernorm,
        has_router_bias=args.add_bias_linear,
        has_shared_expert_gate=args.moe_shared_expert_gate,
        latent_attention=_latent_attention(args),
        num_mtp_layers=args.mtp_num_layers or 0,
    )


def _latent_attention(args: argparse.Namespace) -> LatentAttention | None:
    if not args.multi_latent_attention:
        return None
    return LatentAttention(
        query_rank=args.q_lora_rank or 0,
        key_value_rank=args.kv_lora_rank,
        head_width=args.qk_head_dim,
        position_width=args.qk_pos_emb_head_dim,
        value_width=args.v_head_dim,
    )


def _moe_layers(args: argparse.Namespace) -> tuple[int, ...]:
    pattern = args.moe_layer_freq
    if isinstance(pattern, int):
        if pattern < 1:
            raise ConfigError(f"--moe-layer-freq={pattern} must be at least 1. Give a larger one.")
        return tuple(range(0, args.num_layers, pattern))
    if len(pattern) != args.num_layers:
        raise ConfigError(
            f"--moe-layer-freq lists {len(pattern)} layers, --num-layers={args.num_layers}. They must be "
            "equal: change one of them."
        )
    return tuple(layer for layer, has_experts in enumerate(pattern) if has_experts)


def _padded_vocabulary(args: argparse.Namespace) -> int:
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    size = args.vocab_size
    if args.text_dir is not None and args.tokenizer_model is None:
        size = _BYTE_VOCABULARY
    elif size is None or args.tokenizer_type not in (None, "NullTokenizer"):
        raise ConfigError(
            "the size of the vocabulary is not known: plan opens no tokenizer. Add --padded-vocab-size N to "
            "the flags of training; training prints it as 'padded vocab'."
        )
    multiple = int(args.make_vocab_size_divisible_by)
    return math.ceil(int(size) / multiple) * multiple


def _num_positions(args: argparse.Namespace) -> int:
    kind = args.position_embedding_type
    if args.use_rotary_position_embeddings or kind in ("rope", "yarn", "mrope", "none"):
        return 0
    if kind == "relative":
        raise ConfigError(
            "--position-embedding-type=relative cannot be planned: GPTs have no such embedding. Use rope."
        )
    if args.max_position_embeddings is None:
        raise ConfigError(
            "--max-position-embeddings not given: with --position-embedding-type=learned_absolute, the "
            "default, every position has parameters. Give it, or --position-embedding-type rope."
        )
    return int(args.max_position_embeddings)


def layout_of(args: argparse.Namespace, world_size: int, sharding: str) -> SavingLayout:
    """Return the ranks of a stage. Context-parallel ranks hold the same state, as data-parallel ones do.

    Raises:
        ConfigError: if sizes do not fit together, or there is tensor parallelism.
    """
    for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size"):
        if getattr(args, name) not in (None, 1):
            raise ConfigError(
                f"{flag_of(name)}={getattr(args, name)} cannot be planned: sizes are known without tensor "
                "parallelism only. Use 1, and as many ranks more per node."
            )
    check_world_size(args, world_size)
    ep = args.expert_model_parallel_size
    check_experts(args.num_experts or None, ep, args.moe_router_topk)
    return SavingLayout(
        dp=world_size // args.pipeline_model_parallel_size,
        ep=ep,
        sharding=Sharding(sharding),
        is_optimizer_distributed=args.use_distributed_optimizer,
    )


def traffic_of(args: argparse.Namespace, layout: SavingLayout) -> PipelineTraffic:
    """Return what the pipeline sends in an iteration, which the boundary log keeps.

    Raises:
        ConfigError: if a flag is missing, or there is only one stage.
    """
    stages = args.pipeline_model_parallel_size
    if stages < 2:
        raise ConfigError(
            f"--moe-ft-upstream-log needs pipeline stages: with --pipeline-model-parallel-size={stages} "
            "nothing is sent from one to another. Leave it out."
        )
    missing = [
        flag_of(name) for name in ("seq_length", "micro_batch_size") if not getattr(args, name)
    ]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} not given: --moe-ft-upstream-log keeps what the stages send to each "
            "other, whose size follows from it. Give the whole command line after the --."
        )
    samples = args.micro_batch_size * (layout.dp // args.context_parallel_size)
    is_half = (args.bf16 or args.fp16) and not args.fp32_residual_connection
    return PipelineTraffic(
        num_stages=stages,
        num_chunks=1,
        num_microbatches=(args.global_batch_size or samples) // samples,
        shape=(
            args.seq_length // args.context_parallel_size,
            args.micro_batch_size,
            args.hidden_size,
        ),
        element_bytes=2 if is_half else 4,
    )


def bytes_of(args: argparse.Namespace, packings: Mapping[str, Packing]) -> ByteModel:
    """Return the bytes that snapshots have for a parameter.

    The scales of block formats and the odd bit of split masters are left out.

    Args:
        packings: format of each part of the state.

    Raises:
        ConfigError: if the optimizer is not Adam.
    """
    if args.optimizer != "adam":
        raise ConfigError(
            f"--optimizer={args.optimizer} cannot be planned: the state of adam is known only. Use adam."
        )
    kept = {
        "master": args.main_params_dtype,
        "exp_avg": args.exp_avg_dtype,
        "exp_avg_sq": args.exp_avg_sq_dtype,
    }
    sizes = {
        part: _FORMAT_BYTES[kept[part]]
        if packing is Packing.EXACT
        else _PACKED_BYTES.get(packing, 1)
        for part, packing in packings.items()
    }
    return ByteModel(
        weights=2 if args.bf16 or args.fp16 else 4,
        master=sizes["master"],
        moments=sizes["exp_avg"] + sizes["exp_avg_sq"],
    )


def _replication(config: MoeFtConfig, world_size: int, ranks_per_node: int) -> int:
    num_nodes = math.ceil(world_size / ranks_per_node)
    given = config.memory.num_replicas
    if given is None:
        return default_replication_factor(num_nodes)
    if given >= num_nodes:
        raise ConfigError(
            f"--moe-ft-replication-factor={given} must be less than the {num_nodes} nodes that {world_size} "
            f"ranks are on with --ranks-per-node={ranks_per_node}: replicas go to other nodes. Lower one of "
            "the two."
        )
    return given


def _train_iterations(args: argparse.Namespace) -> int | None:
    if args.train_iters is not None or not args.train_samples or not args.global_batch_size:
        return int(args.train_iters) if args.train_iters is not None else None
    return int(args.train_samples) // int(args.global_batch_size)


def _check_divides(part: int, part_flag: str, whole: int, whole_flag: str) -> None:
    if whole % part:
        raise ConfigError(
            f"{part_flag}={part} must divide {whole_flag}={whole}. Change one of them."
        )
