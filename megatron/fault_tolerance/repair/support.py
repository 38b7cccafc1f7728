"""Jobs whose ranks can be replaced in place; others are refused at the start, with the reason."""

import argparse
import os
from collections.abc import Callable
from typing import Any

from megatron.fault_tolerance.cpu import device as cpu_device
from moe_ft.config.rules import Rule, check_rules
from moe_ft.errors import ConfigError
from moe_ft.keeper import job_store
from moe_ft.keeper.link import Link

TRY_ON_GPUS = "MOE_FT_TRY_REPAIR_ON_GPUS"
_SHARED_MEMORY = "its buffers are shared with the process that has died, and are not made again"


def _rule(what: str, is_used: Callable[[Any], bool], reason: str) -> Rule:
    problem, remedy = f"does not work with {what}", "Leave one of them out"
    return Rule("", "--moe-ft-repair=auto", is_used, reason, remedy, problem=problem)


_RULES: tuple[Rule, ...] = (
    _rule(
        "--dataloader-type external",
        lambda args: args.dataloader_type == "external",
        "nobody knows how its position is set",
    ),
    _rule(
        "--async-save",
        lambda args: args.async_save,
        "all ranks wait together for a save that a new process does not know of",
    ),
    _rule(
        "--ckpt-assume-constant-structure",
        lambda args: args.ckpt_assume_constant_structure,
        "a new process plans checkpoints that the others have planned already",
    ),
    _rule(
        "--phase-transition-iterations",
        lambda args: bool(args.phase_transition_iterations),
        "the position in the data is counted from the transition",
    ),
    _rule(
        "--skip-train",
        lambda args: args.skip_train,
        "nothing is trained",
    ),
    _rule(
        "--hybrid-context-parallel",
        lambda args: args.hybrid_context_parallel,
        "its iterator is not renewed",
    ),
    _rule(
        "one rank",
        lambda args: args.world_size == 1,
        "nobody survives",
    ),
)
_RULES_ON_GPUS: tuple[Rule, ...] = (
    _rule(
        "--cuda-graph-impl",
        lambda args: args.cuda_graph_impl not in (None, "none"),
        "captured graphs hold communicators that are not there any more",
    ),
    _rule(
        "--use-nccl-ub",
        lambda args: args.nccl_ub,
        "its memory is registered with communicators that are not there any more",
    ),
    _rule(
        "--use-sharp",
        lambda args: args.use_sharp,
        "its groups have to be the first ones that NCCL makes, which a repair does not know",
    ),
    _rule(
        "--tp-comm-overlap",
        lambda args: args.tp_comm_overlap,
        _SHARED_MEMORY,
    ),
    _rule(
        "--moe-token-dispatcher-type flex",
        lambda args: args.moe_token_dispatcher_type == "flex",
        _SHARED_MEMORY,
    ),
    _rule(
        "--pipeline-model-parallel-comm-backend ucc",
        lambda args: args.pipeline_model_parallel_comm_backend == "ucc",
        "only backends of NCCL and gloo are renewed",
    ),
)


def checked_link(args: argparse.Namespace, link: Link | None) -> Link:
    """Return the link to the zygote.

    Raises:
        ConfigError: if the process has none, or the job cannot be repaired.
    """
    if link is None:
        raise ConfigError(
            "--moe-ft-repair=auto needs ranks that are forked by `python -m moe_ft keep`, and this one is "
            "not. Put it before the script (torchrun ... -m moe_ft keep -- SCRIPT), or leave the flag out."
        )
    if job_store.is_shared(os.environ):
        raise ConfigError(
            "--moe-ft-repair=auto needs a store of its own for each start, and torchrun shares the one that "
            "it keeps. Start torchrun with --rdzv-backend=c10d and with the environment variable "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or leave the flag out."
        )
    rules = _RULES
    if not cpu_device.is_active():
        _check_tries_gpus()
        rules += _RULES_ON_GPUS
    check_rules(rules, args)
    return link


def _check_tries_gpus() -> None:
    if os.environ.get(TRY_ON_GPUS) != "1":
        raise ConfigError(
            "--moe-ft-repair=auto replaces ranks that train on CPUs: what it does on GPUs is written, and "
            f"has never run on one. Leave it out, or set {TRY_ON_GPUS}=1 to try it "
            "(docs/first_day_on_a_gpu.md)."
        )
