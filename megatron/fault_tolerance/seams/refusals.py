"""Flags of Megatron that the seams do not support, each with the reason and the remedy.

They are refused whatever program calls Megatron's loop; those of pretrain_gpt_moe.py are in
program/arguments.py. Together they have one rule for each flag of the class `refused` in flag_table.py.
Other rules refuse single values. settings.py checks how flags fit together and whether they fit this machine.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron.fault_tolerance.cpu import device as cpu_device
from moe_ft.command_lines import as_flag
from moe_ft.config.fields import flag_of
from moe_ft.config.rules import Rule, check_rules
from moe_ft.config.strategy import NO_STRATEGY
from moe_ft.config.untested import GRAPHS
from moe_ft.errors import ConfigError
from moe_ft.strategies.interface import StrategyKind
from moe_ft.strategies.registry import kind_of, kinds

Strategies = Callable[[StrategyKind], bool]

_NO_UNITS = "its state cannot be divided into units"
_OWN_PARAMETERS = "Leave it out, so that every expert has parameters of its own"


def refused_flag(
    dest: str,
    reason: str,
    remedy: str = "Leave it out",
    strategies: Strategies | None = None,
    *,
    is_broken: Callable[[Any], bool] | None = None,
    flag: str = "",
    problem: str = "is not supported",
) -> Rule:
    """Return a rule that refuses a flag: any value but false and None, unless another condition is given."""
    is_given = is_broken or (lambda args: bool(getattr(args, dest, None)))
    return Rule(dest, flag or as_flag(dest), is_given, reason, remedy, strategies, problem)


def refused_with(
    own: str,
    is_used: Callable[[Any], Any],
    problem: str,
    reason: str,
    remedy: str = "Leave one of the two out",
) -> Rule:
    """Return a rule that refuses a setting of moe_ft together with something else, or without it."""
    dest = f"moe_ft_{own}"

    def is_broken(args: Any) -> bool:
        return bool(getattr(args, dest, None)) and bool(is_used(args))

    return Rule(dest, flag_of(own), is_broken, reason, remedy, problem=problem)


def refused_flag_with(own: str, dest: str, reason: str, flag: str = "") -> Rule:
    """Return a rule that refuses a setting of moe_ft together with a flag, however that is given."""
    flag = flag or as_flag(dest)
    problem = f"cannot be used with {flag}"
    return refused_with(own, lambda args: getattr(args, dest, None), problem, reason)


def _sharded(name: str, size: str) -> Rule:
    """Return a rule that refuses more shards of weights than tensor-parallel ranks."""
    dest = f"{name}_num_weight_shards"
    flag, of_size = (as_flag(each) for each in (dest, size))

    def is_broken(args: Any) -> bool:
        given = getattr(args, size)
        ranks = args.tensor_model_parallel_size if given is None else given
        return bool((getattr(args, dest) or 0) > ranks)

    reason = "snapshots do not know the process groups of its weight shards"
    remedy = f"Leave it out, or raise {of_size} instead"
    return Rule(dest, f"{flag} above {of_size}", is_broken, reason, remedy, _any)


def _parked(dest: str) -> Rule:
    """Return a rule against state in few bits or of other optimizers that is parked on the host."""

    def is_broken(args: Any) -> bool:
        few_bits = "fp8" in (args.exp_avg_dtype, args.exp_avg_sq_dtype)
        return bool(getattr(args, dest)) and (few_bits or args.optimizer != "adam")

    flag = as_flag(dest)
    reason = "of others it is not known which numbers on the host are the state"
    remedy = "Use --optimizer adam with moments in fp32, fp16 or bf16, or leave it out"
    return Rule(dest, f"{flag} with FP8 moments or another optimizer", is_broken, reason, remedy)


def _any(kind: StrategyKind) -> bool:
    return True


def loses_tokens(kind: StrategyKind) -> bool:
    """Return whether recoveries of a strategy lose tokens."""
    return not kind.is_exact


def replays(kind: StrategyKind) -> bool:
    """Return whether recoveries of a strategy run iterations again."""
    return kind.replays


def _is_on(args: Any) -> bool:
    return bool(args.moe_ft_strategy != NO_STRATEGY)


def _skips_with_chunks(args: Any) -> bool:
    names = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
    return bool(args.iterations_to_skip) and any(getattr(args, name, None) for name in names)


def has_graphs(args: Any) -> bool:
    """Return whether a job captures CUDA graphs, by Megatron's arguments or the configuration of a model."""
    return getattr(args, "cuda_graph_impl", None) not in (None, "none")


def _forgets_histories(args: Any) -> bool:
    is_delayed = getattr(args, "fp8", None) and getattr(args, "fp8_recipe", "") == "delayed"
    is_at_once = getattr(args, "cuda_graph_warmup_steps", 1) == 0
    return bool(args.cuda_graph_impl == "transformer_engine" and is_delayed and is_at_once)


def _casts_in_optimizer(args: Any) -> bool:
    has_own_masters = args.fp8_recipe != "delayed" and args.main_params_dtype in _FP32
    return args.use_precision_aware_optimizer and not has_own_masters


def _fp8_parameters(
    other: str, is_given: Callable[[Any], bool], reason: str, remedy: str = "Leave one of them out"
) -> Rule:
    """Return a rule that refuses FP8 parameters together with something else."""
    return Rule(
        "fp8_param_gather",
        f"--fp8-param-gather with {other}",
        lambda args: bool(getattr(args, "fp8_param_gather", False)) and is_given(args),
        reason,
        remedy,
        _any,
    )


_FP32 = ("fp32", torch.float32)  # as parsed, and as validated
_OF_NUMBERS = ("adam", "sgd")

SEAM_REFUSALS: tuple[Rule, ...] = (
    # State that snapshots cannot hold.
    refused_flag("optimizer_cuda_graph", _NO_UNITS),
    refused_flag("use_megatron_fsdp", _NO_UNITS, "Use --use-distributed-optimizer"),
    refused_flag("use_torch_fsdp2", _NO_UNITS, "Use --use-distributed-optimizer"),
    Rule(
        "optimizer_cpu_offload",
        "--optimizer-cpu-offload with --fp8-param-gather",
        lambda args: bool(args.optimizer_cpu_offload and getattr(args, "fp8_param_gather", None)),
        "no test has had FP8 weights of masters on the host",
        "Leave one of the two out",
    ),
    *map(_parked, ("offload_optimizer_states", "chunked_optimizer_state_offload")),
    Rule(
        "optimizer_cpu_offload",
        "--optimizer-cpu-offload with an optimizer of matrices",
        lambda args: bool(args.optimizer_cpu_offload and args.optimizer not in _OF_NUMBERS),
        "Megatron then has only some of the optimizers on the host, which no test has had",
        "Use --optimizer adam, or leave it out",
    ),
    refused_flag(
        "disable_param_buffers_cpu_backup",
        "weights then have no memory while the script pauses it, and a snapshot may read them at any time",
    ),
    Rule(
        "num_distributed_optimizer_instances",
        "--num-distributed-optimizer-instances above 1",
        lambda args: args.num_distributed_optimizer_instances > 1,
        _NO_UNITS,
        "Use one instance",
    ),
    _fp8_parameters(
        "an optimizer of matrices",
        lambda args: args.optimizer not in _OF_NUMBERS,
        "no test has had FP8 weights of its masters",
        "Use --optimizer adam, or leave it out",
    ),
    _fp8_parameters(
        "--fp8-recipe custom",
        lambda args: args.fp8_recipe == "custom",
        "scales may then depend on more than masters and the state of modules",
    ),
    _fp8_parameters(
        "--use-precision-aware-optimizer, and --fp8-recipe delayed or --main-params-dtype fp16",
        _casts_in_optimizer,
        "Transformer Engine's optimizer then keeps the masters, and casts weights in a step alone",
    ),
    _fp8_parameters(
        "--fp16",
        lambda args: args.fp16,
        "a step that is left out for its loss scale leaves weights that older scales have cast",
        "Use --bf16",
    ),
    refused_flag(
        "fp4_param_gather",
        "weights of two numbers a byte, with two levels of scales, have no digest that covers them",
        "Leave it out; FP4 compute with bf16 parameters does not need it",
        _any,
    ),
    refused_flag("moe_single_grouped_weight", _NO_UNITS, _OWN_PARAMETERS),
    refused_flag("moe_single_grouped_bias", _NO_UNITS, _OWN_PARAMETERS),
    refused_flag("hybrid_context_parallel", _NO_UNITS, "Use --context-parallel-size alone"),
    refused_flag("dynamic_context_parallel", _NO_UNITS, "Use --context-parallel-size alone"),
    _sharded("tensor_parallel", "tensor_model_parallel_size"),
    _sharded("expert_tensor_parallel", "expert_tensor_parallel_size"),
    refused_flag(
        "fake_process_group",
        "its ranks exchange nothing, so they cannot agree on a checkpoint",
        strategies=_any,
    ),
    Rule(
        "iterations_to_skip",
        "--iterations-to-skip with virtual pipeline stages",
        _skips_with_chunks,
        "Megatron's loop fails in the iteration that it skips: it takes the list of iterators for one",
        "Leave one of the two out",
    ),
    # Features that some strategies cannot support.
    Rule(
        "cuda_graph_impl",
        "--cuda-graph-impl full_iteration",
        lambda args: args.cuda_graph_impl == "full_iteration",
        "a recovery runs iterations again without overlap, and some stages alone, and the graph has an "
        "iteration as it was captured",
        "Use graphs of layers (--cuda-graph-impl transformer_engine), or {others}",
        strategies=replays,
    ),
    Rule(
        "cuda_graph_impl",
        f"--cuda-graph-impl with {flag_of('capacity_boost')}",
        lambda args: has_graphs(args) and bool(getattr(args, "moe_ft_capacity_boost", 0)),
        "a replayed graph drops tokens by the capacity that it was captured with",
        "Leave one of the two out",
        strategies=loses_tokens,
    ),
    Rule(
        "cuda_graph_impl",
        "--cuda-graph-impl transformer_engine with --fp8-recipe delayed and --cuda-graph-warmup-steps 0",
        _forgets_histories,
        "a recovery puts amax histories into modules in their first pass, which is then one of those that "
        "prepare the capture, and Transformer Engine resets what they have changed",
        "Give --cuda-graph-warmup-steps 1, or another recipe",
        strategies=_any,
    ),
    Rule(
        "cuda_graph_impl",
        "--cuda-graph-impl",
        lambda args: has_graphs(args) and not GRAPHS.is_allowed(args.moe_ft_allow_untested),
        GRAPHS.reason,
        f"Use --cuda-graph-impl none, or {GRAPHS.risk}",
        strategies=_any,
    ),
    refused_flag(
        "qk_clip",
        "it changes weights after the optimizer step, which a recovery runs again without it",
        "Leave it out, or use {others}",
        replays,
    ),
    Rule(
        "qk_clip",
        "--qk-clip with --moe-ft-breakpoints",
        lambda args: args.qk_clip and getattr(args, "moe_ft_breakpoints", False),
        "it changes weights after the optimizer step, with which a breakpoint takes them to be done",
        "Leave one of the two out",
    ),
    refused_flag(
        "phase_transition_iterations",
        "Megatron reads a phase's data from where training continues, and a recovery runs iterations before "
        "that again",
        "Use --moe-ft-strategy {others}",
        replays,
    ),
    # Iterations that ranks repeat for each other.
    refused_with(
        "check_iterations",
        lambda args: not (cpu_device.is_active() or args.deterministic_mode),
        "needs --deterministic-mode on a GPU",
        "kernels that add numbers in another order each time give other bits",
        "Add it, or leave the flag out",
    ),
    refused_with(
        "check_iterations",
        has_graphs,
        "cannot be used with --cuda-graph-impl",
        "a graph runs no hooks, and keeps what it has gathered",
    ),
    refused_flag_with(
        "check_iterations",
        "reuse_grad_buf_for_mxfp8_param_ag",
        "gradients of the first pass would take the place of gathered weights",
    ),
    refused_flag_with(
        "check_iterations",
        "use_tp_pp_dp_mapping",
        "stages are then not the outermost dimension of ranks",
    ),
    # Settings of moe_ft that need some of Megatron's.
    refused_with(
        "upstream_log",
        lambda args: args.pipeline_model_parallel_size < 2,
        "needs pipeline stages",
        "with --pipeline-model-parallel-size=1 nothing is sent from one to another",
        "Leave it out",
    ),
    refused_with(
        "capacity_boost",
        lambda args: _is_on(args) and getattr(args, "moe_expert_capacity_factor", None) is None,
        "needs --moe-expert-capacity-factor",
        "without one no token is dropped, so none can be made up",
        "Leave it out",
    ),
    refused_with(
        "capacity_boost",
        lambda args: _is_on(args) and getattr(args, "moe_pad_expert_input_to_capacity", False),
        "cannot be used with --moe-pad-expert-input-to-capacity",
        "all inputs of experts then have one size",
    ),
    refused_with(
        "replicate",
        lambda args: (
            _is_on(args)
            and args.moe_ft_replicate == "gradients"
            and args.use_precision_aware_optimizer
        ),
        "cannot be used with --use-precision-aware-optimizer",
        "peers repeat the step of torch's Adam on fp32 state",
        f"Leave one of the two out, or give {flag_of('replicate')} state",
    ),
    # Features that leave the seams no run to follow.
    refused_flag(
        "inprocess_restart",
        "it starts training again in a process where the seams and their threads are still at work",
        "Leave it out: let torchrun restart the ranks (--max-restarts), and recover from memory with "
        "--moe-ft-strategy {others}",
    ),
    refused_flag(
        "perform_rl_step",
        "an iteration then trains on what the model itself has generated, which a recovery cannot read again",
        "Leave it out, or train without moe_ft",
    ),
    refused_flag(
        "yaml_cfg",
        "Megatron then reads no other flag, not even moe_ft's",
        "Give the settings as flags",
    ),
)

NO_SLOTS = refused_with(
    "expert_slots",
    lambda args: True,
    "needs pretrain_gpt_moe.py",
    "only that puts slots into the layers of the model",
    "Leave it out",
)
# Those of scripts: pretrain_gpt_moe.py has its own, and builds what these would have to build.
SCRIPT_REFUSALS = (*SEAM_REFUSALS, NO_SLOTS)


def check_refusals(args: argparse.Namespace, rules: Sequence[Rule] = SEAM_REFUSALS) -> None:
    """Raise ConfigError on the first flag, or value of a flag, that a rule refuses.

    Megatron's validation may add to the arguments (older flags, arguments of a checkpoint).
    """
    for problem in refused(args, rules):
        raise ConfigError(problem)


def refused(args: argparse.Namespace, rules: Sequence[Rule] = SEAM_REFUSALS) -> Iterator[str]:
    """Yield what is wrong with each flag, or value of a flag, that a rule refuses."""
    strategy = args.moe_ft_strategy
    kind = kind_of(strategy)
    for rule in rules:
        if rule.strategies is not None and (kind is None or not rule.strategies(kind)):
            continue
        if not hasattr(args, rule.dest):  # of a Megatron that does not fit
            continue
        where = f" with --moe-ft-strategy={strategy}" if rule.strategies else ""
        remedy = rule.remedy.format(others=_others(rule))
        if rule.is_broken(args):
            yield replace(rule, problem=rule.problem + where, remedy=remedy).message(args)


def check_no_replay_is_refused(args: argparse.Namespace, flag: str) -> None:
    """Raise ConfigError if arguments use what no replay can repeat, with a flag that needs replays."""
    for rule in SEAM_REFUSALS:
        if rule.strategies is replays:
            with_flag = f"{rule.problem} with {flag}"
            check_rules([replace(rule, problem=with_flag, remedy="Leave one of them out")], args)


def _others(rule: Rule) -> str:
    """Return the strategies with which a rule accepts a flag, in words."""
    names = [kind.name for kind in kinds() if rule.strategies is None or not rule.strategies(kind)]
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def check_yaml(command_line: Sequence[str]) -> None:
    """Raise ConfigError for --yaml-cfg, which keeps all other flags from being parsed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--yaml-cfg", nargs="?", const="")
    args, _ = parser.parse_known_args(command_line)
    rule = next(rule for rule in SEAM_REFUSALS if rule.dest == "yaml_cfg")
    if args.yaml_cfg is not None:
        raise ConfigError(rule.message(args))
