"""Settings of a custom loop: those of moe_ft, checked, and those of the objects that Megatron has built."""

import argparse
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.fault_tolerance.seams import versions
from megatron.fault_tolerance.seams.refusals import SLOTS, check_refusals
from megatron.fault_tolerance.seams.settings import (
    check_capacity_boost,
    check_event_log,
    check_state_dtype,
)
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.config.flags import as_arguments, config_from_settings
from moe_ft.config.rules import Rule, check_rules
from moe_ft.config.untested import MEGATRON
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts

_OF_MEGATRONS_LOOP = (
    Rule(
        "",
        "--moe-ft-upstream-log",
        lambda config: config.memory.upstream_log,
        "a Checkpointer does not know what another loop sends between stages",
        problem="needs Megatron's own training loop",
    ),
    Rule(
        "",
        SLOTS,
        lambda config: config.elastic.expert_slots > 0,
        "only that puts slots into the layers of the model",
        problem="needs pretrain_gpt_moe.py",
    ),
    Rule(
        "",
        flag_of("check_iterations"),
        lambda config: config.checks.check_iterations > 0,
        "how a loop of your own runs forward and backward is not known",
        problem="needs Megatron's own training loop",
    ),
    Rule(
        "",
        "--moe-ft-elastic",
        lambda config: config.elastic.elastic,
        "a loop of your own chooses its layout and reads its samples",
        problem="needs Megatron's own training loop",
    ),
    Rule(
        "",
        "--moe-ft-repair=auto",
        lambda config: config.recovery.repair != "off",
        problem="needs Megatron's own training loop, whose iterations can be left and run again",
    ),
)
# As Megatron's flags name them.
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.uint8: "fp8"}


def checked_config(
    settings: Mapping[str, Any],
    megatron: argparse.Namespace,
    world_size: int,
    train_iterations: int,
) -> MoeFtConfig:
    """Return the settings of moe_ft by the names of their flags, checked as those of a command line are.

    Raises:
        ConfigError: names the setting as a flag, its value, the rule and the remedy.
    """
    choices = {"strategy": registry.names()}
    config = config_from_settings(settings, registry.option_types(), choices)
    versions.check_seams(allow_misfit=MEGATRON.is_allowed(config.strategy.allow_untested))
    check_event_log(config.observability.event_log)
    config.validate(world_size)
    check_rules(_OF_MEGATRONS_LOOP, config)
    model = ModelFacts(num_experts=megatron.num_experts, num_iterations=train_iterations)
    registry.check(config, model)
    check_refusals(argparse.Namespace(**vars(megatron), **as_arguments(config)))
    check_capacity_boost(megatron, config)
    if config.strategy.is_on:
        check_state_dtype(megatron, config.precision)
    return config


def checked_groups(groups: Any) -> Any:
    """Return the process groups of the job: as given, or else those of `megatron.core.parallel_state`.

    Raises:
        ConfigError: if there are none, or one is missing.
    """
    if groups is None:
        if not parallel_state.model_parallel_is_initialized():
            raise ConfigError(
                "Checkpointer needs process groups, and there are none. Call megatron.core.parallel_state."
                "initialize_model_parallel, or pass groups=, a ProcessGroupCollection."
            )
        return ProcessGroupCollection.use_mpu_process_groups()
    missing = [name for name in _GROUPS if getattr(groups, name, None) is None]
    if missing:
        raise ConfigError(
            f"groups= lacks {', '.join(missing)}: state is divided among these ranks. Pass a "
            f"ProcessGroupCollection with {', '.join(_GROUPS)}."
        )
    return groups


_GROUPS = ("dp", "dp_cp", "expt_dp", "tp", "expt_tp", "ep", "pp")


def megatron_settings(
    model: Sequence[torch.nn.Module], optimizer: Any, scheduler: Any
) -> argparse.Namespace:
    """Return the settings of model, DDP and optimizer, as if Megatron's command line had given them.

    Fields of Megatron's configurations have the names of its flags, but for a few. Functions and objects are
    left out.

    Args:
        model: ``[chunk]``.

    Raises:
        ConfigError: if these are not the objects of `megatron.core` that snapshots are taken of.
    """
    for name, values, kind in (
        ("model", model, DistributedDataParallel),
        ("optimizer", [optimizer], ChainedOptimizer),
        ("scheduler", [scheduler], OptimizerParamScheduler),
    ):
        if not values or not all(isinstance(value, kind) for value in values):
            found = ", ".join(type(value).__name__ for value in values) or "nothing"
            raise ConfigError(f"{name}={found} is not supported: {_WANTED[name]}.")
    objects: tuple[Any, ...] = (model[0].ddp_config, optimizer.config, get_model_config(model[0]))
    fields = {name: value for each in objects for name, value in vars(each).items()}
    plain = {name: _plain(value) for name, value in fields.items() if _is_plain(value)}
    return argparse.Namespace(**plain, num_experts=int(fields["num_moe_experts"] or 0))


_WANTED = {
    "model": "wrap each chunk in megatron.core.distributed.DistributedDataParallel, and pass a list of them",
    "optimizer": "pass the one that megatron.core.optimizer.get_megatron_optimizer returns",
    "scheduler": "pass a megatron.core.optimizer_param_scheduler.OptimizerParamScheduler",
}


def _plain(value: Any) -> Any:
    return _DTYPES[value] if isinstance(value, torch.dtype) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    is_known = isinstance(value, torch.dtype) and value in _DTYPES
    return value is None or is_known or isinstance(value, bool | int | float | str | Enum)
