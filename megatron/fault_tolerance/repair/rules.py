"""Jobs whose ranks can be replaced in place; others are refused at the start, with the reason."""

import argparse
import os
from collections.abc import Iterator, Mapping

import torch.distributed as dist

from megatron.fault_tolerance.degraded.rules import check_job
from megatron.fault_tolerance.repair import renewals
from megatron.fault_tolerance.seams.megatron_loop import timeout_of_groups_s
from moe_ft.cluster.member import Member
from moe_ft.command_lines import as_flag
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.config.lost_nodes import FLAG
from moe_ft.config.untested import UNTESTED
from moe_ft.errors import ConfigError

# An argument, perhaps with the one value that is meant, and why it is refused.
_RULES: Mapping[tuple[str, str], str] = {
    ("dataloader_type", "external"): "how to set its position is not known",
    ("dataloader_type", "batch"): "iterations that run again do not divide its batches",
    ("async_save", ""): "all ranks wait together for a save that a new process does not know of",
    ("ckpt_assume_constant_structure", ""): (
        "a new process plans checkpoints that the others have planned already"
    ),
    ("phase_transition_iterations", ""): "the position in the data is counted from the transition",
    ("skip_train", ""): "nothing is trained",
    (
        "qk_clip",
        "",
    ): "it changes weights after the optimizer step, with which ranks take them to be done",
    ("hybrid_context_parallel", ""): "its iterator is not renewed",
    # Fields of Megatron-Bridge.
    (
        "ft.enable_ft_package",
        "",
    ): "ft_launcher takes a repair for a hang, and starts all ranks again",
    (
        "nvrx_straggler.enabled",
        "",
    ): "it reports after iterations that each process has counted itself",
    ("tensor_inspect.enabled", ""): "it reports in iterations that each process has counted itself",
}
_RULES_ON_GPUS: Mapping[tuple[str, str], str] = {
    ("nccl_ub", ""): "its memory is registered with communicators that are not there any more",
    (
        "use_sharp",
        "",
    ): "its groups have to be the first ones that NCCL makes, which a repair does not know",
    ("pipeline_model_parallel_comm_backend", "ucc"): "only backends of NCCL and gloo are renewed",
}

_SPELLED = {"nccl_ub": "--use-nccl-ub"}

# Of addresses that ranks read in a repair, at 164 bytes and 8 for each member, for each of its members.
_MOST_ADDRESS_BYTES = 4e9
_NUM_GLOO_GROUPS = 3  # of Megatron, for the data-parallel ranks
_LAZY = "TORCH_GLOO_LAZY_INIT"
_TRUE = ("y", "yes", "1", "t", "true")  # as torch reads it


def why_not_in_place(
    config: MoeFtConfig, args: argparse.Namespace, member: Member | None, *, on_gpus: bool
) -> str:
    """Return why dead ranks are not replaced in place; empty if they are.

    Args:
        member: that this process is; None if nothing forks a replacement.

    Raises:
        ConfigError: for that reason, if --moe-ft-repair auto wants them to be.
    """
    asked = f"{flag_of('repair')}={config.recovery.repair}"
    if config.recovery.repair == "off":
        return asked
    try:
        check_job_is_repairable(args, member, asked, on_gpus=on_gpus)
        checked_heartbeat_s(config, args)
        permission = UNTESTED["repair"]
        if on_gpus and not permission.is_allowed(config.strategy.allow_untested):
            raise ConfigError(f"{asked} is off on GPUs: {permission.reason}. Or {permission.risk}.")
    except ConfigError as error:
        if config.recovery.repair == "auto":
            raise
        return str(error)
    return ""


def check_job_is_repairable(
    args: argparse.Namespace, member: Member | None, asked: str, *, on_gpus: bool
) -> None:
    """Raise ConfigError if nothing forks a replacement, or the flags of the job do not allow one.

    Args:
        asked: the flag that asks for it, with its value.
    """
    if member is None:
        raise ConfigError(
            f"{asked} needs ranks that are forked by `python -m moe_ft launch`, and this one is not. Start "
            "the job with it (python -m moe_ft launch --ranks-per-node N SCRIPT FLAGS), or leave the flag "
            "out."
        )
    refused = dict(_used(args, _RULES))
    if dist.is_initialized():
        refused["process groups of the script's own"] = "how they were made is not known"
    if args.world_size == 1 and not args.moe_ft_elastic:  # which may have more later
        refused["one rank"] = "no rank is left to repair it"
    if (value := os.environ.get(_LAZY, "")).lower() in _TRUE:
        refused[f"{_LAZY}={value}"] = (
            "connections that gloo makes later are not ended when a rank dies, and the others wait for it"
        )
    if on_gpus:
        refused |= dict(_used(args, _RULES_ON_GPUS))
        refused |= renewals.reasons(args)
    for what, reason in refused.items():
        raise ConfigError(f"{asked} does not work with {what}: {reason}. Leave one of them out.")


def line_on_gloo_groups(args: argparse.Namespace) -> str:
    """Return a line for jobs so large that Megatron's groups of gloo take too long to make again; or none."""
    size = args.data_parallel_size
    num_bytes = _NUM_GLOO_GROUPS * args.world_size * size * (164 + 8 * size)
    if not args.use_gloo_process_groups or num_bytes < _MOST_ADDRESS_BYTES:
        return ""
    return (
        f"a repair makes Megatron's groups of gloo again, in which {args.world_size} ranks read "
        f"{num_bytes / 1e9:.0f} GB of addresses: add --disable-gloo-process-groups"
    )


def answer_to_lost_nodes(config: MoeFtConfig, args: argparse.Namespace, member: Member) -> str:
    """Return what is done about a lost node when no spare is left: a value of --moe-ft-without-spare.

    Raises:
        ConfigError: if that is asked for by name, and this job or the way in which it was started does not
            allow it.
    """
    answer, value = config.answer_to_lost_nodes, config.recovery.without_spare
    asked = f"{FLAG}={value}"
    if not member.assignment.is_watched:
        if value in ("auto", "end"):
            return "end"
        raise ConfigError(
            f"{asked} needs several nodes, or a spare one: this job has one node, and ends with it. Give "
            "`python -m moe_ft keep` --nodes and --meet (docs/agent.md), or leave the flag out."
        )
    if answer == "share":
        try:
            check_job(args)
        except ConfigError as error:
            raise ConfigError(
                f"{asked} is refused: {error} Or give {FLAG} crowd, which any job can do."
            ) from error
    return answer


def flag_in(name: str, value: str) -> str:
    """Return an argument of the tables above, with its value, as people write it."""
    flag = name if "." in name else _SPELLED.get(name, as_flag(name))
    return f"{flag} {value}".rstrip()


def _used(
    args: argparse.Namespace, rules: Mapping[tuple[str, str], str]
) -> Iterator[tuple[str, str]]:
    """Yield which arguments in a table a job has, and why each is refused."""
    for (name, value), reason in rules.items():
        # A field of Megatron-Bridge is nowhere else.
        given = getattr(args, name, None) if "." in name else getattr(args, name)
        if given == value if value else bool(given) and given != "none":
            yield flag_in(name, value), reason


def checked_heartbeat_s(config: MoeFtConfig, args: argparse.Namespace) -> float:
    """Return after how many seconds a silent rank is killed.

    Raises:
        ConfigError: if the other ranks would give up before.
    """
    limit_s, timeout_s = config.recovery.repair_heartbeat_s, timeout_of_groups_s(args)
    if limit_s >= timeout_s:
        raise ConfigError(
            f"{flag_of('repair_heartbeat_s')}={limit_s:g} must be less than {timeout_s:g}, the seconds of "
            "--distributed-timeout-minutes or --distributed-timeout-seconds-after-init: the others would "
            "give up before a rank that hangs is killed. Lower it."
        )
    return limit_s
