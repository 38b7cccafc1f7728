"""A training loop that is not Megatron's own, as the listeners see it, and the values that it gives and gets.

It uses `megatron.core` alone. checkpointer.py tells it where the loop is.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, override

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_model_config

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.seams import versions
from megatron.fault_tolerance.seams.flag_classes import settings_of
from megatron.fault_tolerance.seams.refusals import NO_SLOTS, check_refusals, refused_with
from megatron.fault_tolerance.seams.replay import CoreLoop
from megatron.fault_tolerance.seams.settings import (
    check_event_log,
    check_state_dtype,
)
from moe_ft.cluster.member import own_launch
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.flag_table import Kind
from moe_ft.config.flags import as_arguments, config_from_settings
from moe_ft.config.rules import Rule, check_rules
from moe_ft.config.untested import MEGATRON
from moe_ft.errors import ConfigError
from moe_ft.format.records import Counted, IterationRecord
from moe_ft.loop.training_loop import LoopParts, state_places
from moe_ft.planning.experts import ExpertFacts
from moe_ft.recovery.facts import JobFacts
from moe_ft.state.random_states import apply_rng
from moe_ft.state.record import LoopCounters
from moe_ft.strategies import registry
from moe_ft.strategies.interface import ModelFacts

_JSON_REMEDY = "Use dicts with texts as keys, lists, texts, finite numbers, True, False and None."


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts:
    """Facts about a run that no object of `megatron.core` knows. The same on all ranks.

    Attributes:
        settings: further settings that the state of the run depends on, by name, as JSON values: seed, data,
            whatever a start must share to continue the run. State of a run that differs in one is refused.
        train_iterations: at which training is complete.
        samples_per_iteration: of the whole job, on average (the global batch size).
        sequence_length: tokens of a sample.
        replay_settings: further settings that an iteration which is run again must share, by name, as JSON
            values, such as the size of a micro-batch. Only strategies that replay use them.
        iteration, consumed_samples: where training begins if nothing is recovered: not at 0 if the loop has
            loaded a checkpoint of its own before.
        began_with: what the loop has loaded that belongs to another run, such as "--finetune /old/run"; empty
            for nothing.
        is_deterministic: whether an iteration that is run again computes the same bits; None for what the
            model's `deterministic_mode` says, and on a CPU True.
        timeout_s: timeout of the process groups, in seconds.
    """

    settings: Mapping[str, Any]
    train_iterations: int
    samples_per_iteration: int
    sequence_length: int
    replay_settings: Mapping[str, Any] = field(default_factory=dict)
    iteration: int = 0
    consumed_samples: int = 0
    began_with: str = ""
    is_deterministic: bool | None = None
    timeout_s: float = 600.0

    def check(self) -> None:
        """Raise ConfigError if a number is out of its range or settings are no JSON values."""
        at_least = {name: 1 for name in ("train_iterations", "samples_per_iteration")}
        at_least |= {"sequence_length": 1, "iteration": 0, "consumed_samples": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    f"RunFacts.{name}={value!r} must be a whole number, at least {least}. Give one."
                )
        for name in ("settings", "replay_settings"):
            copy_of_json(f"RunFacts.{name}", getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The point in a run between two iterations.

    Attributes:
        iteration: iterations that have been trained; the next one to run has this number, from 0.
        consumed_samples: that they have read, over all ranks.
        state: what the loop gave for itself at the end of the last one, on this rank; empty at a beginning.
        is_recovered: whether moe_ft has brought the state of this point back.
    """

    iteration: int
    consumed_samples: int
    state: Mapping[str, Any] = field(default_factory=dict)
    is_recovered: bool = False


def copy_of_json(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of JSON values; raises ConfigError if a file would change them."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be kept as JSON: {error}. {_JSON_REMEDY}") from error
    if copied != values:
        raise ConfigError(f"{name} would not come back from JSON as it is. {_JSON_REMEDY}")
    return copied


class CustomLoop(CoreLoop):
    """A loop on `megatron.core`. Owned by the training thread.

    Attributes:
        position: where the loop is, as far as it has told.
        first_iteration: the one that this start begins with.
    """

    def __init__(self, run: RunFacts, settings: argparse.Namespace, groups: Any) -> None:
        """Describe a loop by its own facts and the result of `megatron_settings`."""
        self._run = run
        self._settings = settings
        self._groups = groups
        self._record: IterationRecord | None = None
        self.position = Position(iteration=run.iteration, consumed_samples=run.consumed_samples)
        self.first_iteration = run.iteration
        self._num_microbatches = 1

    def end_iteration(self, position: Position, num_microbatches: int) -> None:
        """Take over what the loop says of the iteration that has just ended."""
        self.position = position
        self._num_microbatches = num_microbatches
        self._record = None

    def restore_random_numbers(self) -> None:
        """Put the random numbers of the recovered state back, if one was recovered."""
        if self._record is not None:
            apply_rng(self._record.rng)

    @property
    @override
    def train_iterations(self) -> int:
        return self._run.train_iterations

    @property
    @override
    def sequence_length(self) -> int:
        return self._run.sequence_length

    @property
    @override
    def process_groups(self) -> Any:
        return self._groups

    @override
    def began_with(self) -> str:
        return self._run.began_with

    @override
    def job_facts(self, began_with: str) -> JobFacts:
        run, groups = self._run, self._groups
        is_deterministic = run.is_deterministic
        if is_deterministic is None:
            is_deterministic = cpu_device.is_active() or bool(self._settings.deterministic_mode)
        state_settings = {
            **settings_of(self._settings, Kind.FINGERPRINT),
            "sequence_length": run.sequence_length,
        }
        return JobFacts(
            launch=own_launch(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            stage=groups.pp.rank(),
            places=state_places(groups),
            groups=groups,
            fingerprint={**state_settings, **run.settings},
            replay_settings={**settings_of(self._settings, Kind.REPLAY), **run.replay_settings},
            experts=ExpertFacts(
                num_experts=int(self._settings.num_experts),
                ep_rank=groups.ep.rank(),
                ep_size=groups.ep.size(),
                tokens_per_sample=run.sequence_length * int(self._settings.moe_router_topk),
                planned_samples=run.train_iterations * run.samples_per_iteration,
                samples_per_iteration=run.samples_per_iteration,
            ),
            iteration=run.iteration,
            began_with=began_with,
            is_deterministic=is_deterministic,
            timeout_s=run.timeout_s,
        )

    @override
    def start_fields(self) -> dict[str, Any]:
        groups = self._groups
        return {
            "world_size": dist.get_world_size(),
            "tp": groups.tp.size(),
            "pp": groups.pp.size(),
            "ep": groups.ep.size(),
            "etp": groups.expt_tp.size(),
            "dp": groups.dp.size(),
            "stage": groups.pp.rank(),
            "seq_length": self.sequence_length,
            "num_experts": int(self._settings.num_experts),
            "train_iterations": self.train_iterations,
        }

    @override
    def sample_counters(self, num_uncounted: int) -> dict[str, int]:
        # Those of the last iteration are counted already.
        return {"consumed_train_samples": self.position.consumed_samples}

    @override
    def counters(self, num_uncounted: int) -> LoopCounters:
        return LoopCounters(
            consumed_train_samples=self.position.consumed_samples,
            num_microbatches=self._num_microbatches,
            loop_state=dict(self.position.state),
        )

    @override
    def resume(self, record: Counted) -> None:
        assert isinstance(record, IterationRecord)  # stages of such a loop do not recover alone
        self._record = record
        self.position = _position_of(record)
        self.first_iteration = record.iteration
        self._num_microbatches = record.num_microbatches

    @override
    def set_data_position(self, consumed_samples: int) -> None:
        pass  # the loop reads its data where a `Position` says

    @override
    def run_forward_backward(self, parts: LoopParts, before: Counted, after: Counted) -> None:
        # The function that the loop has given to `recover`.
        parts.forward_backward(_position_of(before), after.num_microbatches)

    @override
    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        pass  # the event log has them


def _position_of(record: Counted) -> Position:
    assert isinstance(record, IterationRecord)
    return Position(
        iteration=record.iteration,
        consumed_samples=record.consumed_train_samples,
        state=record.loop_state,
        is_recovered=True,
    )


def _of_megatrons_loop(own: str, reason: str, default: str = "") -> Rule:
    problem = "needs Megatron's own training loop"
    dest = f"moe_ft_{own}"
    return refused_with(
        own, lambda args: getattr(args, dest) != default, problem, reason, "Leave it out"
    )


_OF_MEGATRONS_LOOP = (
    NO_SLOTS,
    _of_megatrons_loop(
        "upstream_log", "a Checkpointer does not know what another loop sends between stages"
    ),
    _of_megatrons_loop(
        "check_iterations", "how a loop of your own runs forward and backward is not known"
    ),
    _of_megatrons_loop("elastic", "a loop of your own chooses its layout and reads its samples"),
    _of_megatrons_loop("repair", "its iterations can be left and run again", default="off"),
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
    given = as_arguments(config)
    check_rules(_OF_MEGATRONS_LOOP, argparse.Namespace(**given))
    model = ModelFacts(num_experts=megatron.num_experts, num_iterations=train_iterations)
    registry.check(config, model)
    check_refusals(argparse.Namespace(**vars(megatron), **given))
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
