"""Repair in place for one call of `pretrain`, if the flags ask for it."""

import argparse
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.repair.backends import check_torch
from megatron.fault_tolerance.repair.environment import set_variables
from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.nccl import Nccl
from megatron.fault_tolerance.repair.seam import RepairSeam
from megatron.fault_tolerance.repair.support import checked_link
from megatron.fault_tolerance.repair.transport import Transport
from megatron.fault_tolerance.repair.watcher import Watcher
from megatron.fault_tolerance.seams.loop_facts import timeout_of_groups_s
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.engine.links.signed_store import SignedStore
from moe_ft.errors import ConfigError
from moe_ft.keeper import job_store
from moe_ft.keeper.heartbeat import Heart
from moe_ft.keeper.link import own_link
from moe_ft.keeper.rounds import Rounds
from moe_ft.loop.listeners import Listeners
from moe_ft.saying import say


@dataclass(frozen=True, kw_only=True, slots=True)
class Repairing:
    """Additions to a call of `pretrain`; without repairs there are none.

    Attributes:
        seam: acts when a rank dies; None without repairs.
        arguments: of the call.
    """

    seam: RepairSeam | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def below_hooks(self) -> AbstractContextManager[None]:
        """Return the context around the seams of the listeners."""
        return nullcontext() if self.seam is None else self.seam.below_hooks()

    def above_hooks(self) -> AbstractContextManager[None]:
        """Return the context within the seams of the listeners."""
        return nullcontext() if self.seam is None else self.seam.above_hooks()


def repairing(config: MoeFtConfig, args: argparse.Namespace, listeners: Listeners) -> Repairing:
    """Return what repairs add to a call of `pretrain`.

    Raises:
        ConfigError: if repairs are asked for, and this job or process cannot be repaired.
        RepairError: if the job's store cannot be reached.
    """
    if config.recovery.repair == "off":
        return Repairing()
    link = checked_link(args, own_link())
    check_torch()
    links = Links(_transports(args))
    heart = Heart(link, checked_heartbeat_s(config, args))
    # Each thread has a connection of its own, made before those that end with a round.
    deadline_s = 60.0 * args.distributed_timeout_minutes
    store, watched = (job_store.connect(os.environ, link, deadline_s) for _ in range(2))
    if not link.is_replacement:
        job_store.take_seat(store, os.environ)
    rounds, rounds_of_watcher = (
        Rounds(SignedStore(each, lambda: link.token), args.rank, args.world_size)
        for each in (store, watched)
    )
    watcher = Watcher(rounds_of_watcher, links, link)
    seam = RepairSeam(link, listeners, store, rounds, watcher, links, heart)
    return Repairing(seam=seam, arguments={"store": store})


def _transports(args: argparse.Namespace) -> tuple[Transport, ...]:
    """Return the transports of this job's groups; those of NCCL need variables before groups are made.

    Raises:
        ConfigError: if a variable has another value already.
    """
    if cpu_device.is_active():
        return (Gloo(),)
    added = set_variables(os.environ)
    if args.rank == 0:
        sets = "".join(f" {name}={value}" for name, value in added.items())
        say(
            "--moe-ft-repair=auto has never run on a GPU (docs/first_day_on_a_gpu.md); it sets"
            f"{sets or ' no variables'}"
        )
    return (Gloo(), Nccl())


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
