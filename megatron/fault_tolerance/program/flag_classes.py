"""Classes of Megatron's flags, and what follows from them; the table itself is moe_ft/config/flag_table.py.

Every flag is in one class, for any value but its default:

- neutral: changes neither the state nor what an iteration computes (logging, paths, timeouts, recomputation),
  is read only by other programs or along with a flag that is refused, or is one spelling of a setting that is
  captured in another (virtual stages, the padded vocabulary).
- captured, so that a recovery is exact. Where it is captured:
    - fingerprint: decides which function the state is the state of, how it is divided among the ranks, or
      which data it has seen. State of a run with another value is refused.
    - replay: also decides what an iteration computes. Iterations of a longer window are run again with the
      same value only. A strategy that runs none again lets it change from start to start.
    - record: decides values that move during training, which every record of an iteration holds (learning
      rates, loss scales, positions). May be changed at any start.
    - beginning: decides the weights that a run begins with. Afterwards they are state.
- refused, always or with some strategies: refusals.py has one rule with a remedy for each.

A class with the mark ``untested`` is accepted although no test of ours runs with the flag; a start names
those that it uses. Refusals of single values of a flag that is otherwise accepted are in refusals.py too.
"""

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from moe_ft.config.flag_table import DERIVED, FLAGS


class Kind(Enum):
    """Meaning of a flag for checkpoints; see the file's docstring."""

    NEUTRAL = "neutral"
    FINGERPRINT = "fingerprint"
    REPLAY = "replay"
    RECORD = "record"
    BEGINNING = "beginning"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True, slots=True)
class FlagClass:
    """Class of one flag.

    Attributes:
        subject: what the flag is about.
        kind: its meaning for checkpoints.
        is_tested: whether tests of ours run with it, where that matters.
    """

    subject: str
    kind: Kind
    is_tested: bool


@functools.cache
def flag_classes() -> Mapping[str, FlagClass]:
    """Return the class of every flag, by argparse's ``dest``.

    Raises:
        ValueError: if the table has a flag twice, or a class that does not exist.
    """
    found: dict[str, FlagClass] = {}
    for subject, classes in FLAGS.items():
        for heading, names in classes.items():
            kind, *mark = heading.split()
            if mark not in ([], ["untested"]):
                raise ValueError(f"class '{heading}' of flags about {subject}: unknown mark")
            each = FlagClass(subject=subject, kind=Kind(kind), is_tested=not mark)
            for name in names.split():
                if name in found:
                    raise ValueError(f"flag {name} is in the table twice")
                found[name] = each
    return found


def names_of(kind: Kind) -> list[str]:
    """Return the flags of a kind, and with them what Megatron derives for it, sorted."""
    flags = [name for name, each in flag_classes().items() if each.kind is kind]
    return sorted([*flags, *DERIVED.get(kind.value, "").split()])


def megatron_flags(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return how a parser writes its flags, by ``dest``: the first of several ways."""
    written: dict[str, str] = {}
    for action in parser._actions:
        if action.option_strings:
            written.setdefault(action.dest, action.option_strings[0])
    return written


def untested_flags(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags that a command line uses and no test of ours runs with, as they are written.

    Among them are those of a Megatron version that the table does not know.

    Args:
        args: as parsed, before Megatron's validation fills in what was not given, and not refused.
        parser: of these arguments.
    """
    defaults = parser.parse_args([])
    return sorted(
        flag
        for name, flag in megatron_flags(parser).items()
        if not _is_tested(name) and getattr(args, name, None) != getattr(defaults, name, None)
    )


def _is_tested(name: str) -> bool:
    if name.startswith("moe_ft_") or name == "text_dir":  # ours
        return True
    each = flag_classes().get(name)
    # A refused flag that came this far is refused with other strategies only.
    return each is not None and each.is_tested and each.kind is not Kind.REFUSED
