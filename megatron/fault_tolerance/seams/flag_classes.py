"""Classes of Megatron's flags. The table itself is moe_ft/config/flag_table.py.

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
      rates, loss scales, positions). The flag may change at any start.
    - beginning: decides the weights that a run begins with. Afterwards they are state.
- refused, always or with some strategies: refusals.py has one rule with a remedy for each.

A flag whose class has the mark ``untested`` is accepted although no test of ours uses it; a start names the
untested flags of its command line. refusals.py also refuses single values of flags that are accepted
otherwise.
"""

import argparse
from collections.abc import Container, Sequence
from typing import Any

from moe_ft.config.flag_table import DERIVED, Kind, flag_classes


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
) -> list[str]:
    """Return the untested flags that a command line uses, as they are written.

    They include the flags of a Megatron version that the table does not know.

    Args:
        args: as parsed and not refused: Megatron's validation has not filled in defaults yet.
        script_flags: the flags that a script has added, by ``dest``: they are its own business.
    """
    return sorted(
        flag
        for name, flag in megatron_flags(parser).items()
        if name not in script_flags and not _is_tested(name)
        if getattr(args, name, None) != _default(parser, name)
    )


def untested_line(flags: Sequence[str]) -> list[str]:
    """Return a line that names untested flags, or no line if there are none."""
    return [f"no test of moe_ft runs with {', '.join(flags)}"] if flags else []


def _default(parser: argparse.ArgumentParser, name: str) -> Any:
    """Return the value of a flag that is not given, as parsing gives it."""
    action = next(each for each in parser._actions if each.dest == name)
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
