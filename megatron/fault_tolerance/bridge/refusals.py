"""Settings that moe_ft refuses under Megatron-Bridge alone, and messages in the words of its configuration.

Rules on Megatron's flags apply through view.py: `in_words_of_bridge` names the fields in their messages.
"""

import argparse
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron.fault_tolerance.bridge.fields import RENAMED, fields_of
from megatron.fault_tolerance.seams.megatron_loop import megatron_parser
from megatron.fault_tolerance.seams.refusals import refused, replays
from moe_ft.config.fields import flag_of
from moe_ft.config.lost_nodes import FLAG
from moe_ft.config.rules import Rule
from moe_ft.errors import ConfigError

_LEAVE_OUT = "Leave it out"
# Models with one stack of layers, in 0.4 and later. Those with a second part are derived from them, too.
_ONE_STACK = {
    f"{kind}Model{role}" for kind in ("GPT", "Hybrid", "Mamba") for role in ("Provider", "Config")
}
_OF_SECOND_PART = ("freeze_language_model", "vision_config", "teacher")


def _has_several_stacks(model: Any) -> bool:
    is_known = any(each.__name__ in _ONE_STACK for each in type(model).__mro__)
    return not is_known or any(hasattr(model, name) for name in _OF_SECOND_PART)


# A field or a flag of moe_ft, what of its values is refused, why, and the remedy.
_RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "model",
        _has_several_stacks,
        "moe_ft names the parameters of one stack of layers, as GPT and hybrid models have it",
        "Train this model without moe_ft",
    ),
    (
        "model.restore_modelopt_state",
        bool,
        "its quantizers take their scales from a checkpoint, and no snapshot has them",
        _LEAVE_OUT,
    ),
    (
        "peft",
        lambda adapters: adapters is not None,
        "adapters give the weights of experts other names, by which no snapshot knows them",
        _LEAVE_OUT,
    ),
    (
        "dist.use_decentralized_pg",
        bool,
        "snapshots need the process groups of megatron.core.parallel_state, and it then has none",
        _LEAVE_OUT,
    ),
    (
        "dist.eval_context_parallel_size",
        lambda size: size is not None,
        "it needs dist.use_decentralized_pg, which is not supported either",
        _LEAVE_OUT,
    ),
    (
        "train.num_epochs",
        lambda number: number is not None,
        "how many iterations that is, nobody knows before the data are read",
        "Give train.train_iters",
    ),
    (
        "dataset.dataloader_type",
        lambda name: name == "external",
        "such data are not told where to continue, so a recovery would train on others",
        "Use single or cyclic",
    ),
    (
        "checkpoint.non_persistent_ckpt_type",
        lambda name: name == "local",
        "what it left on local disks is loaded even without checkpoint.load, instead of state in memory",
        "Leave it out, or use global",
    ),
    ("--moe-ft-elastic", bool, "samples are divided among a fixed number of ranks", _LEAVE_OUT),
    (
        FLAG,
        lambda answer: answer in ("share", "reroute"),  # the latter is its old word
        "peers run micro-batches of a moved rank in place of Megatron-LM's loop",
        f"Give {FLAG} crowd",
    ),
)


_BATCHES = Rule(
    "dataloader_type",
    "dataset.dataloader_type",
    lambda args: args.dataloader_type == "batch",
    "the loop divides whole batches outside of what a recovery runs again",
    "Use single or cyclic, or --moe-ft-strategy {others}",
    strategies=replays,
)


def value_at(config: Any, path: str) -> Any:
    """Return a field by its path, such as "ft.enable_ft_package"; None where a part of it is not there."""
    for name in path.split("."):
        config = getattr(config, name, None)
    return config


def problems(config: Any, args: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with each setting that is refused under Bridge alone.

    Args:
        config: Bridge's ConfigContainer.
        args: the view of it.
    """
    for name, is_refused, reason, remedy in _RULES:
        is_flag = name.startswith("--")
        value = value_at(args, name[2:].replace("-", "_")) if is_flag else value_at(config, name)
        if is_refused(value):
            shown = value if isinstance(value, str | int | float) else type(value).__name__
            given = name if value is True else f"{name}={shown}"
            yield f"{given} is not supported under Megatron-Bridge: {reason}. {remedy}."
    yield from refused(args, [_BATCHES])


def check_bridge(config: Any, args: argparse.Namespace) -> None:
    """Raise ConfigError on the first problem."""
    for problem in problems(config, args):
        raise ConfigError(problem)


def check_overrides(words: Sequence[str]) -> None:
    """Raise ConfigError for settings of moe_ft among the overrides on a script's command line.

    Bridge ignores those that begin with +, with a warning: a job would train without protection.
    """
    for word in words:
        if found := re.match(r"[+~]*moe_ft(?:\.(\w+)|=)", word):
            raise ConfigError(
                f"{word} would be ignored: Bridge's configuration has no section moe_ft. Give "
                f"{flag_of(found[1] or 'strategy')} as a flag, in front of the script."
            )


_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9])([= ][\w.]*\w)?")
_OVERWRITING = ("mixed_precision", "comm_overlap")  # other sections, when training begins
_OTHER_WORDS = {
    "--bf16": "mixed_precision=bf16_mixed",
    "--fp16": "mixed_precision=fp16_mixed",
    "--inprocess-restart": "inprocess_restart.enabled=true",
    "--num-layers-per-virtual-pipeline-stage": "model.virtual_pipeline_model_parallel_size",
    "--swiglu": "model.activation_func=silu with model.gated_linear_unit=true",
}


def in_words_of_bridge(text: str, config: Any) -> str:
    """Return a text with fields of Bridge's configuration for flags of Megatron; others stay."""

    def as_field(found: re.Match[str]) -> str:
        flag, after = found[1], found[2] or ""
        action = megatron_parser()._option_string_actions.get(flag)
        name = flag[2:].replace("-", "_") if action is None else action.dest
        path = RENAMED.get(name) or _path_of(name, config)
        if flag in _OTHER_WORDS or not path:
            return _OTHER_WORDS.get(flag, flag) + after
        if action is None or action.nargs == 0:  # a switch; some only rules have the form of a flag
            given = None if action is None else action.const
            is_on = not flag.startswith("--no-") if given is None else given
            is_on = is_on != path.startswith("not ")
            return f"{path.removeprefix('not ')}={str(is_on).lower()}{after}"
        if number := signal.Signals.__members__.get(after[1:]):
            return f"{path}={int(number)}"  # Bridge does not know the names of signals
        is_value = after[1:] in map(str, action.choices or ()) or after[1:].isdecimal()
        return f"{path}={after[1:]}" if is_value else path + after

    return _FLAG.sub(as_field, text)


def _path_of(name: str, config: Any) -> str:
    """Return the section from which a name is read, and the name; empty if no section has it."""
    for section in _OVERWRITING:
        if hasattr(getattr(config, section, None), name):
            return f"{section}.{name}"
    found = [each for each in fields_of(config) if each.name == name]
    return next((each.key for each in sorted(found, key=lambda each: not each.flag)), "")
