"""The job that `python -m moe_ft plan` plans, from the command line of training.

Megatron's own parser reads it, and stages.py builds what it describes, without memory and without a GPU.

Megatron's local implementation is built, also for a model that trains with Transformer Engine, whose modules
need a GPU: each expert is a module of its own, and multi-latent attention whose queries are not compressed
has one norm less. Only Transformer Engine's Adam is precision-aware: its settings say what it keeps.

moe_ft/commands/command_line.py finds this file by name, since it lies above.
"""

import argparse
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

import torch
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.cpu.device import CPU_DEFAULTS, UNFUSED_DEFAULTS
from megatron.fault_tolerance.launch.environment import check_restarts
from megatron.fault_tolerance.program import slots
from megatron.fault_tolerance.program.arguments import (
    REFUSALS,
    add_flags,
    refusals_of_megatron,
)
from megatron.fault_tolerance.program.stages import build_stages
from megatron.fault_tolerance.program.text_dataset import BYTE_VOCABULARY
from megatron.fault_tolerance.repair.rules import (
    answer_to_lost_nodes,
    why_not_in_place,
)
from megatron.fault_tolerance.seams import elastic
from megatron.fault_tolerance.seams.megatron_loop import expert_part_of, pipeline_traffic
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.refusals import (
    SCRIPT_REFUSALS,
    check_refusals,
    check_yaml,
)
from megatron.fault_tolerance.seams.settings import (
    check_settings,
    check_sizes,
    planned_iterations,
)
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.command_lines import as_flag
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.flags import as_arguments
from moe_ft.config.rules import Rule
from moe_ft.config.stock_defects import is_layer_wise
from moe_ft.errors import ConfigError
from moe_ft.planning.experts import ExpertFacts
from moe_ft.planning.placement import planned_replicas
from moe_ft.planning.planned_job import (
    MeasuredTimes,
    PlannedJob,
    PlannedModel,
)
from moe_ft.spelling import hint
from moe_ft.state.tensors import inner_optimizers
from moe_ft.units import UnitId, UnitKind

_PRECISIONS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}
_MOST_RANKS = 1_000_000  # a plan lists each
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_AT_LEAST_1 = (*_REQUIRED, "vocab_size", "padded_vocab_size", "micro_batch_size", "seq_length")
_AT_MOST = {"num_layers": 10_000, "num_experts": 100_000}
_ANY_LENGTH = 4096  # of sequences, where no size depends on it
# What only Transformer Engine or a GPU can do: no size depends on it, a note says so, or it is described.
_NEEDS_KERNELS = {
    "perform_initialization": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
    "cross_entropy_loss_fusion": False,
    "tp_comm_overlap": False,
    "recompute_granularity": None,
    "moe_token_dispatcher_type": "alltoall",
    "delay_wgrad_compute": False,
    "overlap_moe_expert_parallel_comm": False,
    "fine_grained_activation_offloading": False,
    "reuse_grad_buf_for_mxfp8_param_ag": False,
    "optimizer_cpu_offload": False,
    "main_grads_dtype": "fp32",
    "cuda_graph_impl": "none",
    "qk_clip": False,
    "fp8_param_gather": False,
    "moe_grouped_gemm": False,
    "use_precision_aware_optimizer": False,
    "main_params_dtype": "fp32",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "fp8": None,
    "fp4": None,
    "moe_router_padding_for_quantization": False,
    "moe_router_padding_for_fp8": False,
    "moe_enable_deepep": False,
    "te_precision_config_file": None,
}


def plan_job(
    flags: Sequence[str],
    config: MoeFtConfig,
    measured: MeasuredTimes,
    *,
    world_size: int,
    ranks_per_node: int,
    runs_script: bool = False,
) -> tuple[PlannedJob, list[str]]:
    """Return the job that flags describe, and lines on what is not counted and what was built.

    No process group may exist. CUDA calls of this process are answered by the CPU from here on.

    Args:
        flags: of training, those of Megatron and of moe_ft.
        runs_script: whether a script reads them too: unknown flags are then taken as its own.

    Raises:
        ConfigError: if a flag is unknown or missing, or training would refuse it.
    """
    _check_ranks(world_size)
    cpu_device.install()
    # Megatron asserts it for some layouts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with _quiet():
        given, notes = _read(flags, world_size, runs_script=runs_script)
        args = argparse.Namespace(**vars(given))
        vars(args).update(_NEEDS_KERNELS | UNFUSED_DEFAULTS | CPU_DEFAULTS)
        with refusals_of_megatron():
            megatron_arguments.validate_args(args)
            slots.complete(args)
            built = build_stages(args, config, partial(_describe_optimizer, given))
    is_divided = args.use_distributed_optimizer or is_layer_wise(args)
    is_whole = config.strategy.sharding == "none" and not is_divided
    stages = built.by_sharding["none" if is_whole else "equal"]
    job = PlannedJob(
        model=_model(args, given, built.parameters),
        stages=stages,
        dp=len(stages[0].ep_ranks(stages[0].ranks[0].group)),
        ep=args.expert_model_parallel_size,
        tp=args.tensor_model_parallel_size,
        expert_tp=args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
        is_optimizer_distributed=is_divided,
        experts=_experts(args),
        config=config,
        ranks_per_node=ranks_per_node,
        replication_factor=planned_replicas(config.memory.num_replicas, world_size, ranks_per_node),
        train_iterations=planned_iterations(given) or None,
        measured=measured,
        tokens=(given.global_batch_size or 0) * (given.seq_length or 0) or None,
        traffic=pipeline_traffic(args) if config.memory.upstream_log else None,
        by_sharding=built.by_sharding,
        reduced_bytes=2 if is_reduced_in_16_bits(args) else 4,
        cp=args.context_parallel_size,
        global_batch_size=given.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        expert_part=expert_part_of(args),
    )
    notes.append(_what_was_built(job))
    return job, notes


class PlannedStart:
    """Start of a job that does not run: the rules of a start, on the arguments that it would have.

    What depends on the machine is left out: folders, data, packages, the version of Megatron. So is what
    Megatron's own validation would change in the arguments of a job on GPUs. What strategies check
    themselves (`registry.check`) is checked with their plans.
    """

    def __init__(
        self, flags: Sequence[str], *, world_size: int, on_gpus: bool, runs_script: bool
    ) -> None:
        """Read the flags as a start on GPUs or CPUs reads them; a script may have further ones."""
        cpu_device.install()
        with _quiet():
            self._args, _ = _parse(flags, world_size, on_gpus=on_gpus)
        self._on_gpus = on_gpus
        self._refusals = SCRIPT_REFUSALS if runs_script else (*REFUSALS, *slots.SLOT_REFUSALS)

    def check(
        self,
        config: MoeFtConfig,
        environment: Mapping[str, str],
        *,
        is_kept: bool,
        is_watched: bool,
    ) -> None:
        """Raise ConfigError on the first rule that other settings of moe_ft break.

        Args:
            environment: of a rank, as its launcher sets it.
            is_kept: whether `keep` forks the ranks.
            is_watched: whether it also starts the nodes.
        """
        args = argparse.Namespace(**{**vars(self._args), **as_arguments(config)})
        check_restarts(environment)
        if config.elastic.elastic:
            elastic.check_elastic(args, environment)
        check_sizes(args)
        check_refusals(args, self._refusals)
        check_settings(args, on_gpus=self._on_gpus)
        if config.strategy.is_on:
            config.memory.resolve_job_id(environment)
        if config.recovery.repair != "off":
            assignment = Assignment(
                rank=0, local_rank=0, world_size=args.world_size, node="", is_watched=is_watched
            )
            member = Member(assignment) if is_kept else None
            if not why_not_in_place(config, args, member, on_gpus=self._on_gpus):
                assert member is not None
                answer_to_lost_nodes(config, args, member)


def is_reduced_in_16_bits(args: argparse.Namespace) -> bool:
    """Return whether Megatron reduces gradients in the precision of the model, and that has 16 bits."""
    return args.params_dtype != torch.float32 and not args.accumulate_allreduce_grads_in_fp32


def _check_ranks(world_size: int) -> None:
    if world_size > _MOST_RANKS:
        raise ConfigError(
            f"{world_size} ranks (--world-size, or what the launcher starts) must be at most {_MOST_RANKS}: "
            "a plan lists each. Give the numbers of the job."
        )


def _what_was_built(job: PlannedJob) -> str:
    numbers = ", ".join(str(stage.numbers[0]) for stage in job.stages)
    return (
        f"planned from Megatron's model, without memory for it: one rank of each different stage ({numbers} "
        f"of {job.num_stages}), and the slices of all {len(job.stages[0].ranks)} ranks of a stage"
    )


def _model(
    args: argparse.Namespace, given: argparse.Namespace, parameters: Mapping[UnitId, int]
) -> PlannedModel:
    experts = [unit for unit in parameters if unit.kind is UnitKind.EXPERT]
    num_experts = args.num_experts or 0
    return PlannedModel(
        num_parameters=sum(parameters.values()),
        num_experts=num_experts,
        num_moe_layers=len({unit.layer_name for unit in experts}),
        expert_parameters=max((parameters[unit] for unit in experts), default=0),
        active_share=min(1.0, args.moe_router_topk / max(1, num_experts)),
        is_grouped=given.moe_grouped_gemm,
    )


def _experts(args: argparse.Namespace) -> ExpertFacts:
    """Return facts about experts, whose tokens no size depends on."""
    return ExpertFacts(
        num_experts=args.num_experts or 0,
        ep_rank=0,
        ep_size=1 if args.moe_ft_expert_slots else args.expert_model_parallel_size,
        tokens_per_sample=1,
        planned_samples=1,
        samples_per_iteration=1,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop what Megatron says of a job that does not run."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


def _parse(
    flags: Sequence[str], world_size: int, *, on_gpus: bool
) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    """Return Megatron's arguments as a start reads them, and their parser."""
    parsers: list[argparse.ArgumentParser] = []

    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        stock = {name: parser.get_default(name) for name in CPU_DEFAULTS | UNFUSED_DEFAULTS}
        parsers.append(add_flags(parser))
        if on_gpus:
            parser.set_defaults(**stock)
        return parser

    check_yaml(flags)
    with Patches() as patches:
        patches.set(sys, "argv", [sys.argv[0], *flags])
        args = megatron_arguments.parse_args(add, ignore_unknown_args=True)
    args.rank, args.world_size = 0, world_size
    args.use_gloo_process_groups, args.fake_process_group = False, False
    return args, parsers[0]


def _read(
    flags: Sequence[str], world_size: int, *, runs_script: bool
) -> tuple[argparse.Namespace, list[str]]:
    """Return Megatron's arguments, completed where no size depends on them, and notes."""
    args, parser = _parse(flags, world_size, on_gpus=False)
    notes = _unknown(parser, flags, runs_script=runs_script)
    _check(args, SCRIPT_REFUSALS if runs_script else (*REFUSALS, *slots.SLOT_REFUSALS))
    _complete(args)
    for name in ("fp8", "fp4", "te_precision_config_file"):
        if getattr(args, name):
            flag = next(each.option_strings[0] for each in parser._actions if each.dest == name)
            notes.append(f"{flag}: the scales and histories of its modules are not counted")
    if is_layer_wise(args):
        notes.append(
            f"--optimizer={args.optimizer} with --use-distributed-optimizer: which rank steps which matrix "
            "is an estimate, and so are the bytes of single ranks"
        )
    if args.moe_router_enable_expert_bias:
        notes.append(
            "--moe-router-enable-expert-bias: the biases of routers, one number an expert, are not counted"
        )
    return args, notes


def _unknown(
    parser: argparse.ArgumentParser, flags: Sequence[str], *, runs_script: bool
) -> list[str]:
    """Return a line on each flag of a script; raise ConfigError if there is no script."""
    unknown = [word.partition("=")[0] for word in parser.parse_known_args(list(flags))[1]]
    notes = []
    for flag in (word for word in unknown if word.startswith("-")):
        if not runs_script or flag.startswith("--moe-ft-"):
            remedy = hint(flag, parser._option_string_actions) or " Correct it."
            raise ConfigError(f"{flag} is neither a flag of Megatron nor of moe_ft.{remedy}")
        notes.append(f"{flag}: taken as a flag of the script, and not counted")
    if unknown and not notes:
        raise ConfigError(f"'{unknown[0]}' belongs to no flag. Correct it.")
    return notes


def _check(args: argparse.Namespace, refusals: Sequence[Rule]) -> None:
    """Check the flags as a start would, but for directories, data and packages of this machine."""
    for name in _REQUIRED:
        if getattr(args, name) is None:
            raise ConfigError(
                f"{as_flag(name)} not given: the sizes of the model follow from the flags of training. Give "
                "the whole command line after the --."
            )
    for name in _AT_LEAST_1:
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ConfigError(
                f"{as_flag(name)}={getattr(args, name)} must be a whole number, at least 1. Give a "
                "larger one."
            )
    for name, most in _AT_MOST.items():
        if (getattr(args, name) or 0) > most:
            raise ConfigError(
                f"{as_flag(name)}={getattr(args, name)} must be at most {most}: a plan lists all. Lower it."
            )
    if args.use_checkpoint_args or args.use_mp_args_from_checkpoint_args:
        raise ConfigError(
            "--use-checkpoint-args cannot be planned: plan opens no checkpoint. Give the flags themselves."
        )
    check_sizes(args)
    check_refusals(args, refusals)
    check_settings(args, on_gpus=False, allows_void=True)
    missing = [
        as_flag(name) for name in ("seq_length", "micro_batch_size") if not getattr(args, name)
    ]
    if missing and args.moe_ft_upstream_log:
        raise ConfigError(
            f"{', '.join(missing)} not given: --moe-ft-upstream-log keeps what the stages send to each "
            "other, whose size follows from it. Give the whole command line after the --."
        )


def _complete(args: argparse.Namespace) -> None:
    """Set what a training must give and no size depends on, and the size of the vocabulary."""
    if args.text_dir is not None and args.tokenizer_model is None:
        args.vocab_size = BYTE_VOCABULARY
    elif args.padded_vocab_size is None and (
        args.vocab_size is None or args.tokenizer_type not in (None, "NullTokenizer")
    ):
        raise ConfigError(
            "the size of the vocabulary is not known: plan opens no tokenizer. Add --padded-vocab-size N to "
            "the flags of training; training prints it as 'padded vocab'."
        )
    if args.max_position_embeddings is None:
        if (
            args.position_embedding_type == "learned_absolute"
            and not args.use_rotary_position_embeddings
        ):
            raise ConfigError(
                "--max-position-embeddings not given: with --position-embedding-type=learned_absolute, the "
                "default, every position has parameters. Give it, or --position-embedding-type rope."
            )
        args.max_position_embeddings = args.seq_length or _ANY_LENGTH
    args.seq_length = args.seq_length or args.max_position_embeddings
    args.micro_batch_size, args.lr = args.micro_batch_size or 1, args.lr or 1.0


def _describe_optimizer(given: argparse.Namespace, optimizer: Any) -> None:
    """Let the optimizer say what Transformer Engine's Adam would keep."""
    if not given.use_precision_aware_optimizer or given.optimizer_cpu_offload:
        return  # one that is offloaded keeps everything in fp32
    for inner in inner_optimizers(optimizer):
        inner.config.use_precision_aware_optimizer = True
        inner.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            setattr(inner.config, name, _PRECISIONS[getattr(given, name)])
        inner.optimizer.store_param_remainders = given.main_params_dtype == "fp32"
