"""Rules on settings: when one is broken, and the message with the reason and the remedy.

Rooms hold tuples of them; those between parts of `MoeFtConfig` are here. Choices and ranges of single values
are with the fields, see fields.py. The rules for directories are a function: which can hold state at all, and
which must be apart.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.utils import get_protocol

from moe_ft.config.fields import STRATEGY, ConfigPart, flag_of
from moe_ft.config.lost_nodes import CROWDED, FLAG
from moe_ft.errors import ConfigError
from moe_ft.format.packings import Packing

# A password, which may hold any character and so ends at the last @, or a signature. NAME:8020/ is a port.
_SECRET = re.compile(
    r"://[^/:[]*:(?!\d+(/|$)).*@|[?&][^=&]*(sig|signature|token|key|password|secret)=",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule that settings break by a flag, by some values of it, or by flags together.

    Its message reads `FLAG=VALUE PROBLEM: REASON. REMEDY.`

    Attributes:
        dest: the attribute of the settings with the value that the message shows; empty if it shows none.
        flag: as messages name it; one with a space says the value itself.
        remedy: {others} stands for the strategies with which the rule does not hold.
        strategies: says of a `StrategyKind` whether the rule holds with it; None for always, also without
            a strategy.
    """

    dest: str
    flag: str
    is_broken: Callable[[Any], bool]
    reason: str = ""
    remedy: str = "Leave it out"
    strategies: Callable[[Any], bool] | None = None
    problem: str = "is not supported"

    def given(self, settings: Any) -> str:
        """Return the flag with its value."""
        value = getattr(settings, self.dest, None)
        if not self.dest or " " in self.flag or isinstance(value, bool):
            return self.flag
        return f"{self.flag}={' '.join(map(str, value)) if isinstance(value, list) else value}"

    def message(self, settings: Any) -> str:
        """Return what is wrong with the settings, and what helps."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.given(settings)} {self.problem}{reason}. {self.remedy}."


def check_rules(rules: Iterable[Rule], settings: Any) -> None:
    """Raise ConfigError on the first rule that the settings break."""
    for rule in rules:
        if rule.is_broken(settings):
            raise ConfigError(rule.message(settings))


def unmet_needs(
    parts: Mapping[str, ConfigPart], options: Collection[str], given: Collection[str] = ()
) -> Iterator[str]:
    """Yield a refusal of each setting that changes nothing, because what it needs is off.

    A need is the name of a setting that must not have its default, NAME=VALUE or NAME!=VALUE; with | between
    several, one of them is enough.

    Args:
        options: names of the parts that also need the strategy of their name.
        given: names of settings that also count where they have their defaults.
    """
    known = {
        each.name: (each, getattr(part, each.name))
        for part in parts.values()
        for each in fields(part)
    }
    for name, part in parts.items():
        own = (f"{STRATEGY}={name}",) if name in options else ()
        for each in fields(part):
            stated = each.metadata["needs"]
            needs = (*own, *(part.NEEDS if stated is None else stated))
            missing = [need for need in needs if not _is_met(need, known)]
            value = getattr(part, each.name)
            if missing and (value != each.default or each.name in given):
                yield _as_refusal(each, value, missing, known)


_Known = Mapping[str, tuple[Any, Any]]  # by name: the field, and its value


def _is_met(need: str, known: _Known) -> bool:
    for choice in need.split("|"):
        name, is_stated, wanted = choice.partition("=")
        each, value = known[name.removesuffix("!")]
        is_so = str(value) == wanted if is_stated else value != each.default
        if is_so != name.endswith("!"):
            return True
    return False


def _as_refusal(each: Any, value: Any, missing: Iterable[str], known: _Known) -> str:
    """Return why a setting changes nothing, and what helps: the first of several choices."""
    without, remedies = [], []
    for need in missing:
        name, is_stated, wanted = need.partition("|")[0].partition("=")
        flag = flag_of(name.removesuffix("!"))
        if name.endswith("!"):
            without.append(f"with {flag}={wanted}")
            remedies.append(f"give {flag} another value")
        elif is_stated:
            without.append(f"without {flag} {wanted}")
            remedies.append(f"give {flag} {wanted}")
        else:
            target = known[name][0]
            value_name = "" if target.default is False else target.metadata["metavar"] or "NAME"
            without.append(f"without {flag}")
            remedies.append(f"add {flag} {value_name}".rstrip())
    own = flag_of(each.name)
    shown = f"{own}={' '.join(value) if isinstance(value, tuple) else value}"
    remedy = " and ".join(remedies)
    return (
        f"{own if value is True else shown} changes nothing {' and '.join(without)}. "
        f"{remedy[0].upper()}{remedy[1:]}, or leave {own} out."
    )


def check_holds_no_secret(flag: str, url: str) -> None:
    """Raise ConfigError for a URL with a password or a signature: `ps`, logs and messages show URLs."""
    if _SECRET.search(url):
        raise ConfigError(
            f"{flag}={url.partition('://')[0]}://... must hold no password and no signature: all "
            "users of the node see it. Give it to the library that opens such URLs, in the environment, "
            "its configuration file or that of fsspec (~/.config/fsspec)."
        )


def default_memory_dir(place: Path = Path("/dev/shm")) -> str:
    """Return the first of moe_ft_UID, moe_ft_UID_1, ... that is this user's; if none is, the first free one.

    Everybody may write to that place, and so take a name that is known before. What a job has left is found
    again by its owner, also when names before it are free again.
    """
    own, name = os.geteuid(), f"moe_ft_{os.geteuid()}"
    pattern, owners = re.compile(rf"{name}(?:_([1-9]\d{{0,8}}))?"), dict[int, int]()
    with suppress(OSError):  # one has vanished, or the place is not there
        for path in place.iterdir():
            if match := pattern.fullmatch(path.name):
                owners[int(match[1] or 0)] = path.lstat().st_uid
    ours = [number for number, owner in owners.items() if owner == own]
    chosen = min(ours) if ours else next(each for each in count() if each not in owners)
    return str(place / (f"{name}_{chosen}" if chosen else name))


def check_directories(memory_dir: str, persist_dir: str | None) -> None:
    """Check what --moe-ft-memory-dir and --moe-ft-persist-dir name.

    Args:
        persist_dir: a path or fsspec URL, None for no storage.

    Raises:
        ConfigError: if the first is not absolute, the second is no storage, or one is in the other.
    """
    if not Path(memory_dir).is_absolute():
        raise ConfigError(
            f"--moe-ft-memory-dir={memory_dir} must be an absolute path: a restart finds its memory there, "
            "wherever it starts. Write it like /dev/shm/NAME."
        )
    if persist_dir is None:
        return
    check_holds_no_secret("--moe-ft-persist-dir", persist_dir)
    if "memory" in re.split("://|::", persist_dir)[:-1]:
        raise ConfigError(
            f"--moe-ft-persist-dir={persist_dir} must be storage that outlives the process which writes it, "
            "and memory:// ends with that. Name a directory, or the URL of an object store."
        )
    if get_protocol(persist_dir) not in LocalFileSystem.protocol:
        return
    memory = Path(memory_dir).resolve()
    persist = Path(LocalFileSystem._strip_protocol(persist_dir)).resolve()
    if memory == persist or memory in persist.parents or persist in memory.parents:
        raise ConfigError(
            f"--moe-ft-memory-dir={memory_dir} and --moe-ft-persist-dir={persist_dir} must not be the same "
            "directory or one in the other: the first is emptied when a job ends, the second is kept. Name "
            "directories that are apart."
        )


def _of_gradients(is_broken: Callable[[Any], bool], problem: str, reason: str, remedy: str) -> Rule:
    return Rule(
        "",
        _FOLLOWED,
        lambda config: config.memory.sends_gradients and is_broken(config),
        reason,
        f"{remedy}{flag_of('replicate')} state",
        problem=problem,
    )


def _of_parity(is_broken: Callable[[Any], bool], problem: str, reason: str, remedy: str) -> Rule:
    return Rule(
        "",
        f"{flag_of('replicas')}=parity:N",
        lambda config: config.memory.parity_nodes is not None and is_broken(config),
        reason,
        f"{remedy}give {flag_of('replicas')} copies",
        problem=problem,
    )


_FOLLOWED = f"{flag_of('replicate')}=gradients"
OF_SETTINGS = (
    Rule(
        "",
        flag_of("check_iterations"),
        lambda config: config.checks.check_iterations > 0 and config.elastic.expert_slots > 0,
        "ranks at the same place of two replicas of the model then have other experts",
        "Leave one of the two out",
        problem=f"cannot be used with {flag_of('expert_slots')}",
    ),
    Rule(
        "",
        "--moe-ft-upstream-log",
        lambda config: config.memory.upstream_log and config.strategy.interval_iterations is None,
        "with --moe-ft-interval=auto the number of iterations that it must hold is not known in advance",
        "Give --moe-ft-interval a number of iterations",
        problem="needs a fixed interval",
    ),
    _of_gradients(
        lambda config: config.strategy.interval_iterations != 1,
        f"needs {flag_of('interval')} 1",
        "a gradient leads from one iteration to the next",
        f"Give {flag_of('interval')} 1, or ",
    ),
    _of_gradients(
        lambda config: any(
            each is not Packing.EXACT for each in config.precision.packings.values()
        ),
        f"cannot be used with {flag_of('state_dtype')}",
        "peers step from state as the optimizer has it",
        f"Leave {flag_of('state_dtype')} out, or give ",
    ),
    _of_gradients(
        lambda config: config.strategy.sharding == "adaptive",
        f"cannot be used with {flag_of('sharding')} adaptive",
        "ranks must save the same slices every time",
        f"Give {flag_of('sharding')} equal, or ",
    ),
    _of_parity(
        lambda config: config.memory.replication_factor != "auto",
        f"cannot be used with {flag_of('replication_factor')}",
        "a group keeps the XOR of its states once",
        f"Leave {flag_of('replication_factor')} out, or ",
    ),
    _of_parity(
        lambda config: config.memory.sends_gradients,
        f"cannot be used with {_FOLLOWED}",
        "a step cannot be repeated on the XOR of several states",
        f"Give {flag_of('replicate')} state, or ",
    ),
    _of_parity(
        lambda config: config.memory.upstream_log,
        "cannot be used with --moe-ft-upstream-log",
        "stages that recover alone have states of different iterations, of which no XOR is kept",
        "Leave that out, or ",
    ),
    _of_parity(
        lambda config: config.elastic.elastic or config.recovery.layout == "any",
        f"cannot be used with {flag_of('elastic')} or {flag_of('layout')} any",
        "a lost rank's state is made again in the memory of the rank that replaces it",
        "Leave them out, or ",
    ),
    _of_parity(
        lambda config: config.recovery.without_spare in (*CROWDED, "shrink"),
        f"cannot be used with {FLAG} crowd, share or shrink",
        "the nodes of a group need as many ranks each",
        f"Give {FLAG} end or wait, or ",
    ),
    Rule(
        "",
        f"{FLAG}=share",
        lambda config: config.recovery.without_spare == "share" and config.elastic.elastic,
        "peers share micro-batches of one size, and those of such a job differ by a sample",
        f"Give {FLAG} shrink or crowd",
        problem=f"cannot be used with {flag_of('elastic')}",
    ),
    Rule(
        "",
        f"{flag_of('late_gradients')}=always",
        lambda config: config.recovery.late_gradients == "always" and config.elastic.elastic,
        "its schedule takes micro-batches of one size, and those of such a job differ by a sample",
        problem=f"cannot be used with {flag_of('elastic')}",
    ),
    Rule(
        "",
        f"{flag_of('late_gradients')}=shared",
        lambda config: (
            config.recovery.late_gradients == "shared" and config.answer_to_lost_nodes != "share"
        ),
        "peers share no micro-batches in this job",
        f"Add it, or give {flag_of('late_gradients')} always or off",
        problem=f"changes nothing without {FLAG} share",
    ),
    Rule(
        "",
        f"{FLAG}=shrink",
        lambda config: config.recovery.without_spare == "shrink" and not config.elastic.elastic,
        "another job has a fixed number of ranks",
        f"Add it, and start keep with --nodes MIN:N, or give {FLAG} crowd",
        problem=f"needs {flag_of('elastic')}",
    ),
)
