"""Values that a custom training loop and moe_ft tell each other: facts of a run, a position in it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_ft.errors import ConfigError

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
        consumed_samples: training samples that they have read, over all ranks.
        state: what the loop gave for itself at the end of the last one, on this rank; empty at a beginning.
        is_recovered: whether moe_ft has brought the state of this point back.
    """

    iteration: int
    consumed_samples: int
    state: Mapping[str, Any] = field(default_factory=dict)
    is_recovered: bool = False


def copy_of_json(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a mapping of JSON values.

    Args:
        name: for the message.

    Raises:
        ConfigError: if it would not come back from a file as it is.
    """
    try:
        copied: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be kept as JSON: {error}. {_JSON_REMEDY}") from error
    if copied != values:
        raise ConfigError(f"{name} would not come back from JSON as it is. {_JSON_REMEDY}")
    return copied
