"""Pipelines of a job as the planning of a local recovery sees them, and whether stages can recover alone."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.remains import Pipelines
from moe_ft.recovery.facts import JobFacts
from moe_ft.recovery.ranks import Ranks
from moe_ft.recovery.site import Site
from moe_ft.saying import say
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.tensors import inner_optimizers


def meet_pipelines(
    site: Site, facts: JobFacts, optimizer: Any, parameters: Sequence[LocalParameter], ranks: Ranks
) -> Pipelines | None:
    """Return the pipelines of a job whose stages can recover alone; None for any other. Called by all ranks.

    Says once if recoveries will be global although what the pipeline sends is logged.

    Raises:
        ConfigError: if --moe-ft-recovery=local can never be followed.
    """
    report, config = facts.couplings, site.config
    mode = config.recovery.recovery
    if report is None or facts.traffic is None:
        return None
    hindrance = why_never_alone(facts, config)
    if hindrance and mode == "local":
        raise ConfigError(
            f"--moe-ft-recovery=local cannot be followed: {hindrance}. Change the model's flags, or give "
            "--moe-ft-recovery auto."
        )
    if (line := hindrance or report.line) and mode != "global" and site.rank == 0:
        say(line)
    everyone = ranks.everyone.gather(
        (
            tuple(dist.get_process_group_ranks(facts.groups.pp)),
            _parts_with_scale(optimizer, parameters),
        )
    )
    if hindrance or mode == "global":
        return None
    pipelines = sorted({pipeline for pipeline, _ in everyone})
    return Pipelines(
        stages=tuple(zip(*pipelines, strict=True)),
        node_of=tuple(info.node for info in site.topology.ranks),
        is_ring=facts.traffic.num_chunks > 1,
        couplings=report.couplings,
        has_common_records=len({parts for _, parts in everyone}) == 1,
    )


def why_never_alone(facts: JobFacts, config: MoeFtConfig) -> str:
    """Return why no stage of a job that logs what its pipeline sends can recover alone; empty if one can."""
    report = facts.couplings
    if report is None or facts.traffic is None:
        return ""
    if not config.memory.breakpoints:
        return "recoveries are global: without --moe-ft-breakpoints healthy stages lose their state"
    return report.line if report.is_global else ""


def _parts_with_scale(optimizer: Any, parameters: Sequence[LocalParameter]) -> tuple[bool, ...]:
    """Return for each part of the optimizer that checks its gradients whether it is of experts."""
    return tuple(
        any(each.is_expert for each in parameters if each.optimizer is inner)
        for inner in inner_optimizers(optimizer)
        if getattr(inner, "grad_scaler", None)
    )
