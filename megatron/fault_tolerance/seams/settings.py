"""Settings of moe_ft, read from Megatron's arguments and checked with them before anything is built.

Each message names the flag, its value, the rule and the remedy. Flags that are not supported are in
refusals.py; rules on --moe-ft-* values alone are in moe_ft/config. Megatron checks the other rules on its own
flags.
"""

import argparse
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.seams import versions
from megatron.fault_tolerance.seams.refusals import (
    SCRIPT_REFUSALS,
    check_no_replay_is_refused,
    check_refusals,
)
from megatron.fault_tolerance.seams.stack import SEAMS
from moe_ft import saying
from moe_ft.cluster.member import own_member
from moe_ft.config import flags
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.config.rules import Rule, check_rules
from moe_ft.config.stock_defects import check_schedule, lines_on_defects
from moe_ft.config.strategy import PrecisionConfig
from moe_ft.config.untested import MEGATRON, UNTESTED, Feature, lines_of_features, refusals_on_gpus
from moe_ft.errors import ConfigError
from moe_ft.format.packings import Packing
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts

# The parts of the state that --moe-ft-state-dtype can name.
_ADAM = ("master", "exp_avg", "exp_avg_sq")
# Besides Muon a scalar optimizer runs, Adam by default.
_PARTS_OF_OPTIMIZERS = {
    "adam": _ADAM,
    "lion": ("master", "exp_avg"),
    "muon": _ADAM,
    "dist_muon": _ADAM,
}


def add_moe_ft_flags(parser: argparse.ArgumentParser) -> None:
    """Add the --moe-ft-* flags to a parser, and make its --help work, and short."""
    parts = flags.part_types(registry.option_types()).values()
    choices = {"strategy": registry.names()}
    flags.add_flags(parser, parts, choices, is_brief=parser.add_help)
    if parser.usage is None:  # that of all of Megatron's flags has 640 lines
        parser.usage = "%(prog)s [FLAG [VALUE ...]] ..."
    _mend_help(parser)


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape the percent signs that keep megatron-core 0.19.2 from printing its help."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % vars(action)
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")


def own_parser() -> argparse.ArgumentParser:
    """Return a parser of the --moe-ft-* flags alone."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_moe_ft_flags(parser)
    return parser


def config_from_arguments(args: argparse.Namespace) -> MoeFtConfig:
    """Collect the --moe-ft-* values of a parsed command line."""
    return flags.config_from(args, registry.option_types())


def is_off(args: argparse.Namespace) -> bool:
    """Return whether all --moe-ft-* values are their defaults, or no parser has read any."""
    return config_from_arguments(args) == config_from_arguments(argparse.Namespace())


def checked_config(
    args: argparse.Namespace, refusals: Sequence[Rule] = SCRIPT_REFUSALS
) -> MoeFtConfig:
    """Return the settings, checked without the model: it may still change. Nothing is built yet.

    Raises:
        ConfigError: with one line that names flag, value, rule and remedy.
    """
    check_arguments(args, refusals)
    config = check_settings(args, on_gpus=not cpu_device.is_active())
    if config.strategy.is_on:  # known only here, and needed only then
        config.memory.resolve_job_id(os.environ)
        config.memory.resolve_node_id(os.environ, socket.gethostname())
    return config


def check_settings(
    args: argparse.Namespace, *, on_gpus: bool, allows_void: bool = False
) -> MoeFtConfig:
    """Return the settings, checked with Megatron's arguments alone: a plan of a job does the same.

    Args:
        allows_void: as `MoeFtConfig.validate` takes it.

    Raises:
        ConfigError: as `checked_config`.
    """
    config = config_from_arguments(args)
    config.validate(args.world_size, allows_void=allows_void)
    if on_gpus:
        for problem in refusals_on_gpus(flags.as_arguments(config)):
            raise ConfigError(problem)
    if config.memory.upstream_log:
        check_no_replay_is_refused(args, "--moe-ft-upstream-log")
    if config.strategy.is_on:
        # state/gradients.py checks the optimizer itself, once it is built.
        if on_gpus and config.memory.sends_gradients:
            check_rules([_ROUNDED_OTHERWISE], args)
        check_state_dtype(args, config.precision)
    return config


def check_model(args: argparse.Namespace, config: MoeFtConfig) -> None:
    """Raise ConfigError if the strategy does not fit the model and the length of the run."""
    registry.check(
        config,
        ModelFacts(num_experts=args.num_experts or 0, num_iterations=planned_iterations(args)),
    )


def planned_iterations(args: argparse.Namespace) -> int:
    """Return the number of iterations of the whole run; 0 where it is not known."""
    if args.train_iters:
        return int(args.train_iters)
    return int((args.train_samples or 0) // args.global_batch_size) if args.global_batch_size else 0


def void_settings(
    args: argparse.Namespace, config: MoeFtConfig, command_line: Sequence[str]
) -> list[str]:
    """Return one line for each setting of moe_ft that changes nothing, or has another name now.

    Args:
        command_line: as given: shows a flag that is given with its default value.
    """
    words = {word.partition("=")[0] for word in command_line}
    given = {name for name in flags.as_arguments(config) if f"--{name.replace('_', '-')}" in words}
    names = {name.removeprefix("moe_ft_") for name in given}
    lines = config.warnings(planned_iterations(args) or None, names)
    lines += flags.lines_on_old_words(args)
    if config.strategy.allow_untested is not None:
        lines += _void_permissions(args, config)
    if "moe_ft_sharding" in given and args.use_distributed_optimizer and config.strategy.is_on:
        lines.append(
            f"--moe-ft-sharding={args.moe_ft_sharding} changes nothing with --use-distributed-optimizer: "
            "every rank saves the slices that the optimizer has given it (only frozen parameters are "
            "replicated)"
        )
    return lines


def _void_permissions(args: argparse.Namespace, config: MoeFtConfig) -> list[str]:
    """Return one line for each value of --moe-ft-allow-untested that changes nothing."""
    run = {} if cpu_device.is_active() else _as_used(config)
    run["has_misfits"] = any(seam.misfit() for seam in SEAMS.values())
    run["cuda_graph_impl"] = config.strategy.is_on and args.cuda_graph_impl
    return [
        f"--moe-ft-allow-untested={value} changes nothing: nothing is refused for {each.name}"
        for value, each in UNTESTED.items()
        if each.is_allowed(config.strategy.allow_untested) and not each.is_used(run)
    ]


def lines_on_megatron(args: argparse.Namespace) -> list[str]:
    """Return a line on a version that was not tested, and one for each defect that damages `--save`."""
    misfits = versions.check_seams(allow_misfit=MEGATRON.is_allowed(args.moe_ft_allow_untested))
    return [*misfits, *lines_on_defects(args)]


def lines_on_gpus(config: MoeFtConfig, megatron: argparse.Namespace, world_size: int) -> list[str]:
    """Return a line on what of a run has been seen on a GPU; none on CPUs."""
    if cpu_device.is_active():
        return []
    has_peers = world_size > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    facts = {
        "has_replicas": has_peers and config.strategy.is_on and config.memory.num_replicas != 0,
        "is_packed": config.precision.staging,
        "is_kept": own_member() is not None,
    }
    kind = registry.kind_of(config.strategy.strategy)
    own = [] if kind is None else [Feature(f"strategy {kind.name}", "", seen=kind.seen_on_gpu)]
    return lines_of_features({**vars(megatron), **_as_used(config), **facts}, own)


def _as_used(config: MoeFtConfig) -> dict[str, Any]:
    """Return all settings as arguments; on GPUs `try` repairs where that is allowed."""
    found = flags.as_arguments(config)
    if config.recovery.repair == "try":
        is_allowed = UNTESTED["repair"].is_allowed(config.strategy.allow_untested)
        found["moe_ft_repair"] = "auto" if is_allowed else "off"
    return found


def warn(args: argparse.Namespace, lines: Sequence[str]) -> None:
    """Print lines on rank 0."""
    for line in lines if args.rank == 0 else ():
        saying.warn(line)


def check_arguments(args: argparse.Namespace, refusals: Sequence[Rule] = SCRIPT_REFUSALS) -> None:
    """Raise ConfigError on the first rule that Megatron's arguments break, as parsed or later."""
    versions.check_seams(allow_misfit=MEGATRON.is_allowed(args.moe_ft_allow_untested))
    check_sizes(args)
    check_refusals(args, refusals)
    check_schedule(args)
    check_event_log(args.moe_ft_event_log)
    check_folders(args)


_OFFLOADS = (
    "optimizer_cpu_offload",
    "offload_optimizer_states",
    "chunked_optimizer_state_offload",
)


def check_state_dtype(args: argparse.Namespace, precision: PrecisionConfig) -> None:
    """Raise ConfigError if a part of the state cannot be kept in the format that a flag names for it."""
    kept = {
        "master": args.main_params_dtype,
        "exp_avg": args.exp_avg_dtype,
        "exp_avg_sq": args.exp_avg_sq_dtype,
    }
    for part, packing in precision.packings.items():
        if packing is Packing.EXACT:
            continue
        problem = ""
        if flag := next((each for each in _OFFLOADS if getattr(args, each, False)), ""):
            problem = (
                f"with --{flag.replace('_', '-')} the state lies in memory of the host, and is packed only "
                "on a device. Leave one of them out."
            )
        elif part not in _PARTS_OF_OPTIMIZERS.get(args.optimizer, ("master",)):
            problem = f"--optimizer {args.optimizer} keeps no {part}. Leave it out of the list."
        elif kept[part] != "fp32":
            flag = "main-params" if part == "master" else part.replace("_", "-")
            problem = (
                f"the optimizer itself keeps {part} in {kept[part]} (--{flag}-dtype), and snapshots hold "
                "that as it is. Leave it out of the list."
            )
        elif part == "master" and args.use_precision_aware_optimizer:
            problem = (
                "with --use-precision-aware-optimizer masters are the optimizer's own, and snapshots hold "
                "them as they are. Leave master out of the list."
            )
        elif packing is Packing.SPLIT and getattr(args, "fp8_param_gather", False):
            problem = (
                "with --fp8-param-gather forward uses no BF16 weights that masters could be split into. Use "
                "master=exact."
            )
        elif packing is Packing.SPLIT and not args.bf16:
            problem = (
                "masters can be split only where forward uses BF16 weights. Add --bf16, or use "
                "master=exact."
            )
        if problem:
            raise ConfigError(f"--moe-ft-state-dtype={precision.state_dtype}: {problem}")


_ROUNDED_OTHERWISE = Rule(
    "",
    f"{flag_of('replicate')}=gradients",
    lambda args: not args.moe_ft_allow_lossy,
    "peers repeat the step on their CPU, which rounds otherwise",
    f"Give {flag_of('replicate')} state, or add --moe-ft-allow-lossy",
    problem="is not exact on a GPU",
)


_SIZES = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
)


def check_sizes(args: argparse.Namespace) -> None:
    """Raise ConfigError unless the ranks can be divided as Megatron's arguments say."""
    for flag in _SIZES:
        size = getattr(args, flag[2:].replace("-", "_"))
        if size is not None and size < 1:
            raise ConfigError(f"{flag}={size} must be at least 1. Give a number of ranks.")
    check_world_size(args, args.world_size)
    check_experts(args.num_experts, args.expert_model_parallel_size, args.moe_router_topk)


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


def check_event_log(directory: str | None) -> None:
    """Raise ConfigError unless the directory of the event log, if there is one, exists or can be made."""
    if directory is None:
        return
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        problem = "" if os.access(directory, os.W_OK | os.X_OK) else "no right to write there"
    except OSError as error:
        problem = error.strerror or str(error)
    if problem:
        raise ConfigError(
            f"--moe-ft-event-log={directory} cannot be written ({problem}): it must be a directory, or a "
            "path where one can be created. Name another one."
        )


def check_folders(args: argparse.Namespace) -> None:
    """Raise ConfigError if Megatron could never use its own folders: it would end late, with a traceback.

    Storage that is away for a while is no reason to refuse a start: the state may be in memory.
    """
    for flag, folder, is_written in (
        ("--save", args.save, True),
        ("--data-cache-path", args.data_cache_path, False),  # a complete one may be read-only
        ("--load", args.load, False),
        ("--pretrained-checkpoint", args.pretrained_checkpoint, False),
    ):
        if folder is not None and "://" not in folder:
            _check_folder(flag, Path(folder), is_written)


def _check_folder(flag: str, folder: Path, is_written: bool) -> None:
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    if os.path.isfile(place):
        problem = f"{place} is a file"
    elif is_written and os.path.isdir(place) and not os.access(place, os.W_OK | os.X_OK):
        problem = f"{place} may not be written"
    else:
        return
    raise ConfigError(
        f"{flag}={folder} cannot be a folder of this job: {problem}. Name another one."
    )
