"""Settings of learning rates, weight decay and the optimizer that another start may have: whose count.

Megatron's scheduler compares its own with those of a checkpoint that it loads. Recovered state is not loaded
by it, so the same rules are here: a difference is refused, or a flag says whose settings count from the first
step on. Values of groups of parameters follow the same flags. docs/changed_flags.md has the table. record.py
puts back what is no setting.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from moe_ft.errors import ConfigError
from moe_ft.format.identity import differing_settings
from moe_ft.format.records import IterationRecord
from moe_ft.state.packed_values import from_json, to_json
from moe_ft.state.tensors import inner_optimizers, kind_of

OVERRIDE = "--override-opt_param-scheduler"
KEEP = "--use-checkpoint-opt_param-scheduler"

# Those that Megatron's scheduler compares: the flags by the names of its attributes, as in its state_dict.
_COMPARED = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "lr_warmup_steps": "samples of --lr-warmup-iters, -fraction or -samples",
    "lr_decay_steps": "samples of --lr-decay-iters, -samples or of the run",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
    "wd_incr_steps": "samples of the run, over which --weight-decay-incr-style changes",
}
# Those that it neither saves nor compares: every start has its own.
_OF_THE_START = {
    "init_lr": "--lr-warmup-init",
    "wsd_decay_steps": "samples of --lr-wsd-decay-iters or -samples",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
}
# Those of a group of parameters; {} is a kind of optimizer. Rates of default groups are the scheduler's.
_OF_GROUPS = {
    "max_lr": "--decoupled-lr",
    "min_lr": "--decoupled-min-lr",
    "start_wd": "--start-weight-decay of some parameters",
    "end_wd": "--end-weight-decay of some parameters",
    "betas": "--{}-beta1, --{}-beta2",
    "eps": "--{}-eps",
    "momentum": "--{}-momentum",
}


def state_of(scheduler: Any) -> dict[str, Any]:
    """Return what a record holds of a scheduler: its state, and the settings that are not in that."""
    return {**scheduler.state_dict(), **_attributes(scheduler, _OF_THE_START)}


def _attributes(scheduler: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(scheduler, name) for name in names if hasattr(scheduler, name)}


def find_changes(record: IterationRecord, optimizer: Any, scheduler: Any) -> list[str]:
    """Describe the settings that Megatron compares, or that an optimizer loads, and that differ."""
    ours, theirs = _flags(_attributes(scheduler, _COMPARED)), _flags(from_json(record.scheduler))
    for inner, saved in zip(inner_optimizers(optimizer), record.optimizers, strict=True):
        kind = kind_of(inner).replace("soap", "adam")  # whose flags it shares
        _add_groups(ours, inner.optimizer.param_groups, kind)
        _add_groups(theirs, saved.groups, kind)
    return differing_settings(ours, theirs)


def _flags(scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a scheduler that decide something, by flag."""
    found = {flag: scheduler[name] for name, flag in _COMPARED.items() if name in scheduler}
    if scheduler.get("lr_decay_style") == "constant":  # the run may become longer
        del found[_COMPARED["lr_decay_steps"]]
    if scheduler.get("wd_incr_style") == "constant":
        found["--weight-decay"] = found.pop(_COMPARED["start_wd"])
        del found[_COMPARED["end_wd"]], found[_COMPARED["wd_incr_steps"]]
    return found


def _add_groups(found: dict[str, Any], groups: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Add the settings of groups of parameters, by flag; with MuP some of them have several values."""
    for group in groups:
        for name, flag in _OF_GROUPS.items():
            if name in group and not (name in _COMPARED and group.get("default_config", True)):
                values = found.setdefault(flag.format(kind, kind), [])
                value = from_json(to_json(group[name]))
                values += [] if value in values else [value]


def _new_of_the_start(record: IterationRecord, scheduler: Any) -> list[str]:
    """Describe the settings that differ and that every start has of its own."""
    both = (_attributes(scheduler, _OF_THE_START), from_json(record.scheduler))
    ours, theirs = (
        {_OF_THE_START[n]: each[n] for n in _OF_THE_START if n in each} for each in both
    )
    return differing_settings(ours, theirs)


def check_changes(records: Sequence[IterationRecord], optimizer: Any, scheduler: Any) -> str:
    """Return a line on whose settings count where they differ, empty if none does.

    Args:
        records: of a window; all but the last are of iterations that are run again.

    Raises:
        ConfigError: if no flag says it, or iterations would be run again with other settings.
    """
    last, asked = records[-1], _asked(scheduler)
    changes = find_changes(last, optimizer, scheduler)
    if changes and not asked:
        raise ConfigError(
            f"the state of iteration {last.iteration} was trained with other settings: {'; '.join(changes)}. "
            f"It continues with its own, as with Megatron's --load. Start with these, or add {OVERRIDE} to "
            f"take those of this start, or {KEEP} to keep those of the state."
        )
    again = _new_of_the_start(last, scheduler) + (changes if asked == OVERRIDE else [])
    if again and len(records) > 1:
        raise error_of_replay(last.iteration, len(records), again)
    verb = "takes" if asked == OVERRIDE else "does not take"
    others = f"other settings than the state of iteration {last.iteration}: {'; '.join(changes)}"
    return f"{asked} {verb} {others}" if changes else ""


def error_of_replay(iteration: int, num_snapshots: int, differences: Sequence[str]) -> ConfigError:
    """Return the refusal to run the iterations of a window again with other settings."""
    return ConfigError(
        f"iteration {iteration} is in a window of {num_snapshots} snapshots, and recovering it runs "
        f"iterations again, with settings that have changed: {'; '.join(differences[:5])}. Start with the "
        "settings of that run; to change them, end it first, with --exit-interval and --moe-ft-persist-dir, "
        "where the last state is written as a whole. Or ignore it with --moe-ft-recover-from load."
    )


def _asked(scheduler: Any) -> str:
    """Return the flag that says whose settings count, as Megatron looks for them; empty without one."""
    for flag in (OVERRIDE, KEEP):
        if getattr(scheduler, flag.removeprefix("--").replace("-", "_"), False):
            return flag
    return ""


def put_back(record: IterationRecord, optimizer: Any, scheduler: Any) -> None:
    """Set the position of a scheduler and the values of all groups, and the settings if the state's count.

    Not by the scheduler's load_state_dict, which would add the steps to those of a checkpoint that was loaded
    before. Where no setting differs the record's rates are right, whoever has set them.
    """
    has_new = _asked(scheduler) == OVERRIDE and bool(find_changes(record, optimizer, scheduler))
    is_stale = has_new or bool(_new_of_the_start(record, scheduler))
    saved = from_json(record.scheduler)
    scheduler.num_steps = saved["num_steps"]
    if _asked(scheduler) == KEEP:
        for name in _COMPARED.keys() & saved.keys():
            setattr(scheduler, name, saved[name])
    for inner, of_inner in zip(inner_optimizers(optimizer), record.optimizers, strict=True):
        groups = inner.optimizer.param_groups
        for group, values in zip(groups, of_inner.groups, strict=True):
            for key, value in values.items():
                is_kept = has_new and key in _OF_GROUPS
                if not is_kept and not (isinstance(value, dict) and "other" in value):
                    restored = from_json(value)
                    group[key] = tuple(restored) if isinstance(group.get(key), tuple) else restored
        if is_stale:
            step(scheduler, groups, 0)


def step(scheduler: Any, groups: Sequence[dict[str, Any]], increment: int) -> Any:
    """Step a copy of a scheduler on groups of parameters, and return it; the scheduler stays as it is."""
    ahead = copy.copy(scheduler)
    ahead.optimizer = SimpleNamespace(param_groups=groups)
    # Not its own `step`, if somebody has wrapped that of the scheduler: it would step the scheduler itself.
    type(scheduler).step(ahead, increment)
    return ahead
