"""Jobs whose ranks can be replaced in place; others are refused at the start, with the reason."""

import argparse
from collections.abc import Callable
from typing import Any

from megatron.fault_tolerance.cpu import device as cpu_device
from moe_ft.errors import ConfigError
from moe_ft.keeper.link import Link

Rule = tuple[str, Callable[[Any], bool], str]

_RULES: tuple[Rule, ...] = (
    (
        "--dataloader-type external",
        lambda args: args.dataloader_type == "external",
        "nobody knows how its position is set",
    ),
    (
        "--async-save",
        lambda args: args.async_save,
        "all ranks wait together for a save that a new process does not know of",
    ),
    (
        "--ckpt-assume-constant-structure",
        lambda args: args.ckpt_assume_constant_structure,
        "a new process plans checkpoints that the others have planned already",
    ),
    (
        "--phase-transition-iterations",
        lambda args: bool(args.phase_transition_iterations),
        "the position in the data is counted from the transition",
    ),
    (
        "--skip-train",
        lambda args: args.skip_train,
        "nothing is trained",
    ),
    (
        "--hybrid-context-parallel",
        lambda args: args.hybrid_context_parallel,
        "its iterator is not renewed",
    ),
    (
        "one rank",
        lambda args: args.world_size == 1,
        "nobody survives",
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
    if not cpu_device.is_active():
        raise ConfigError(
            "--moe-ft-repair=auto replaces ranks that train on CPUs: no process group of NCCL has been "
            "renewed yet. Leave it out."
        )
    for what, is_used, reason in _RULES:
        if is_used(args):
            raise ConfigError(
                f"--moe-ft-repair=auto does not work with {what}: {reason}. Leave one of them out."
            )
    return link
