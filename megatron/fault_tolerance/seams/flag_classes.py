"""Classes of Megatron's flags, and the settings of a run by class. moe_ft/config/flag_table.py has the table.

Every flag is in one class, which holds for any value except its default:

- neutral: changes neither the state nor the result of an iteration (logging, paths, timeouts, recomputation),
  is read only by other programs or together with a refused flag, or is another spelling of a captured setting
  (virtual stages, the padded vocabulary).
- captured, so that a recovery is exact. It is captured in one of these places:
    - fingerprint: decides which function the state belongs to, how the state is divided among the ranks, or
      which data it has seen. State of a run with another value is refused.
    - replay: decides what an iteration computes. An iteration can be run again only with the same value. With
      a strategy that replays nothing, the value may change from start to start.
    - record: decides values that change during training and are in the record of every iteration (learning
      rates, loss scales, positions). docs/changed_flags.md says which may change, and by which flags.
    - beginning: decides the weights that a run begins with. Afterwards they are state.
- refused, always or with some strategies: refusals.py has one rule with a remedy for each.

A flag whose class has the mark ``untested`` is accepted although no test of ours uses it, and so is a value
that TESTED_VALUES lacks; a start names those of its run. refusals.py also refuses single values of flags that
are accepted otherwise.
"""

import argparse
import functools
import itertools
import math
import textwrap
from collections.abc import Container, Mapping, Sequence
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, NamedTuple

from megatron.fault_tolerance.seams.contents import LISTING_FILES, PATH_LISTS, is_path, last_part
from moe_ft.command_lines import as_flag
from moe_ft.config.flag_table import (
    DERIVED,
    FLAGS,
    OF_SCRIPTS,
    PATHS,
    TESTED_VALUES,
    Kind,
    flag_classes,
    names_in,
)
from moe_ft.format.identity import digest_setting

# The attribute of Megatron's arguments that names the flags of the script, by ``dest``.
SCRIPT_FLAGS = "moe_ft_script_flags"
UNKNOWN = "unknown to moe_ft"  # the subject of flags that the table lacks

_DEEPEST = 8  # of settings in one another
_OF_THE_END = "--exit-"  # they decide when a run ends, not what an iteration does


class Settings(NamedTuple):
    """Settings of a job, by what they are kept and compared for, as JSON values.

    Attributes:
        of_state: that the training state depends on: state of a run that differs in one is another run's.
        of_replays: that an iteration which is run again must share, besides those.
        of_records: that decide what records hold, and which states are evaluated. An iteration of which there
            is no record can only be run again with the same ones.
        data: lists of data sets that no flag names, by setting, as contents.py takes them.
    """

    of_state: dict[str, Any]
    of_replays: dict[str, Any]
    of_records: dict[str, Any]
    of_script: dict[str, str]
    data: Mapping[str, list[str]] = {}


def names_of(kind: Kind) -> list[str]:
    """Return the flags of a kind and the settings that Megatron derives from them, sorted."""
    flags = [name for name, each in flag_classes().items() if each.kind is kind]
    return sorted([*flags, *DERIVED.get(kind.value, "").split()])


def megatron_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return the first spelling of each flag of a parser, by ``dest``."""
    written: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            written.setdefault(action.dest, action.option_strings[0])
    return written


def untested_flags(
    args: argparse.Namespace, parser: argparse.ArgumentParser, script_flags: Container[str] = ()
) -> dict[str, list[str]]:
    """Return the untested flags and values of a run by subject, as they are written.

    They include the flags of a Megatron version that the table does not know, and untested defaults of a
    machine with GPUs.

    Args:
        args: as parsed and not refused: Megatron's validation has not filled in defaults yet.
        script_flags: the flags that a script has added, by ``dest``: they are its own business.
    """
    found: dict[str, list[str]] = {}
    actions = {each.dest: each for each in reversed(parser._actions)}
    for dest, flag in sorted(megatron_flags(parser).items(), key=lambda each: each[1]):
        value = getattr(args, dest, None)
        names = names_in_value(value) if actions[dest].choices or dest in TESTED_VALUES else []
        if dest in TESTED_VALUES:
            names = [name for name in names if name not in TESTED_VALUES[dest]]
            is_named = bool(names)
        else:
            is_named = not _is_tested(dest) and value != _default(parser, actions[dest])
        if is_named and dest not in script_flags:
            each = flag_classes().get(dest)
            subject = each.subject if each else UNKNOWN
            found.setdefault(subject, []).append(" ".join([flag, *names]))
    return found


def untested_lines(
    args: argparse.Namespace, parser: argparse.ArgumentParser, script_flags: Container[str] = ()
) -> list[str]:
    """Return one text with the untested flags and values of each subject, or none if there are none."""
    return lines_by_subject(untested_flags(args, parser, script_flags))


def lines_by_subject(found: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one text with what no test runs with, by subject; none if there is nothing."""
    wrapper = textwrap.TextWrapper(110, "  ", "    ", break_on_hyphens=False)
    subjects = (each for each in dict.fromkeys((*FLAGS, *found, UNKNOWN)) if each in found)
    lines = [wrapper.fill(f"{each}: {', '.join(found[each])}") for each in subjects]
    return ["\n".join(["no test of moe_ft runs with (docs/flags.md)", *lines])] if lines else []


def names_in_value(value: Any) -> list[str]:
    """Return the names of which a value consists; none for None."""
    values = value if isinstance(value, list | tuple) else [value]
    return [
        each.name if isinstance(each, Enum) else str(each) for each in values if each is not None
    ]


def _default(parser: argparse.ArgumentParser, action: argparse.Action) -> Any:
    """Return the value of a flag that is not given, as parsing gives it."""
    if action.default is argparse.SUPPRESS:
        return None
    is_text = isinstance(action.default, str)
    return parser._get_value(action, action.default) if is_text else action.default


def _is_tested(name: str) -> bool:
    if name.startswith("moe_ft_") or name == "text_dir":  # ours
        return True
    each = flag_classes().get(name)
    # A refused flag gets this far only if other strategies refuse it.
    return each is not None and each.is_tested and each.kind is not Kind.REFUSED


def script_settings(args: argparse.Namespace, defaults: argparse.Namespace) -> dict[str, str]:
    """Return digests of the settings that only a script of one's own reads, by flag.

    They are the flags that the script has added, and those of Megatron that pretrain_gpt_moe.py refuses or
    nothing but other programs reads. Those with default values are left out. Nobody but the script knows what
    they decide: the data, the loss, or the name of a log.
    """
    of_scripts = (names_in(text) for of in OF_SCRIPTS for text in FLAGS[of].values())
    names = {*getattr(args, SCRIPT_FLAGS, ()), *itertools.chain.from_iterable(of_scripts)}
    missing = object()
    return {
        as_flag(name): digest_setting(as_flag(name), _as_text(value))
        for name in sorted(names)
        if (value := getattr(args, name, missing)) is not missing
        if value != getattr(defaults, name, missing)
    }


def _as_text(value: Any) -> str:
    """Return a value as text that is the same in the next start."""
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def settings_of(args: argparse.Namespace, kind: Kind) -> dict[str, Any]:
    """Return the settings of a class, by flag, as JSON values."""
    return {
        as_flag(name): as_json(getattr(args, name))
        for name in names_of(kind)
        if hasattr(args, name)
    }


def settings_as_used(args: argparse.Namespace, kind: Kind) -> dict[str, Any]:
    """Return the settings of a class as Megatron uses them, by flag, as JSON values.

    Call it after Megatron's validation. contents.py has those that are in files. What a Megatron does not
    have is left out, so that it is compared with nothing.
    """
    return {
        flag: _as_used(name, _setting(name, getattr(args, name)), args)
        for name in names_of(kind)
        if hasattr(args, name) and name not in LISTING_FILES
        if not (flag := as_flag(name)).startswith(_OF_THE_END)
    }


def _as_used(name: str, value: Any, args: argparse.Namespace) -> Any:
    """Return what Megatron's configuration makes of a value, which may be written in several ways."""
    if name == "cp_comm_type" and isinstance(value, list) and len(value) == 1:
        return value[0]
    if name == "microbatch_group_size_per_vp_stage" and value is None:
        return args.pipeline_model_parallel_size
    if name == "moe_expert_capacity_factor" and value is not None and value < 0:
        return None
    if name == "use_distributed_optimizer":
        # Megatron's validation switches it off where the optimizer is layer-wise.
        return value or getattr(args, "use_layer_wise_distributed_optimizer", False)
    if name == "decoupled_lr":  # given or not divides the parameters; the rate itself may change
        return value is not None
    return value


def _setting(name: str, value: Any) -> Any:
    if name in PATH_LISTS:
        return [last_part(str(word)) for word in value or ()]
    if name in PATHS and is_path(value):
        return last_part(str(value))
    return as_json(value)


def as_json(value: Any, depth: int = 0) -> Any:
    """Return a value as JSON that is the same in the next start: functions and classes by their names."""
    inner = functools.partial(as_json, depth=depth + 1)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, functools.partial):
        return inner({"function": value.func, "args": value.args, **value.keywords})
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, list | tuple):
        return [inner(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): inner(item) for name, item in value.items()}
    text = str(sorted(map(str, value)) if isinstance(value, set | frozenset) else value)
    if not is_dataclass(value) and " at 0x" not in text:
        return text
    if depth == _DEEPEST or not hasattr(value, "__dict__"):
        return type(value).__qualname__
    return {"class": type(value).__qualname__, **inner(vars(value))}
