"""Third phase of a start: all ranks look for state, in the memory of their nodes and on storage.

One rank of each node looks at its memory, and sends what it finds to rank 0, which plans for all of them.

Flags that say where to begin hold for the first start of a launcher only. torchrun counts its restarts after
failures, but not those after nodes have come or gone; so each node remembers which launcher started it last,
which starts there were before that, and which start was the last. If that was the one before, the memory of
the nodes is the newest state of the run, also while storage cannot be read.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from moe_ft.engine.persist.origin import agent_name, is_kept, restart_counts
from moe_ft.files.private_files import read_private, write_atomically
from moe_ft.format.identity import has_other_layout, layout_of
from moe_ft.planning.recovery import Plan, Rejection
from moe_ft.planning.remains import Place
from moe_ft.recovery.attempts import Failure, attempt
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.claim import Claimed
from moe_ft.recovery.failures import Attempt, failed_locally, failed_too_often, read_attempts
from moe_ft.recovery.inventory import (
    Inventory,
    look_at_logs,
    look_at_memory,
    look_at_storage,
    merge_packed,
    pack,
)
from moe_ft.recovery.meet import Met


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Findings of a start. Rank 0 has them; other ranks know the wish, and the inventory's summary.

    Attributes:
        failed: failures that two starts had in the same way when they continued from a state, by the name of
            the start that wrote it and its iteration.
        failed_locally: likewise the failures of recoveries by some stages alone.
        unreadable: places of state, logs and records that a rank of this start could not read.
        most_iteration: the latest that may be recovered; None for any.
    """

    inventory: Inventory
    wish: Wish
    failed: Mapping[tuple[str, int], str]
    failed_locally: Mapping[tuple[str, int], str] = field(default_factory=dict)
    unreadable: frozenset[Place] = frozenset()
    most_iteration: int | None = None

    def failure_of(self, plan: Plan) -> Rejection | None:
        """Return why a plan is passed over: two starts have failed from there in the same way."""
        failure = self.failed.get((plan.start.name, plan.iteration))
        if failure is None or self._user_insists:
            return None
        return Rejection(
            iteration=plan.iteration,
            start=plan.start,
            reason=f"iteration {plan.iteration}: two starts failed from there in the same way ({failure})",
        )

    def local_failure_of(self, plan: Plan) -> str:
        """Return why a plan by which some stages recover alone is passed over; empty if it is not."""
        failure = self.failed_locally.get((plan.start.name, plan.iteration))
        if failure is None or self._user_insists:
            return ""
        return (
            f"iteration {plan.iteration}: a start failed to recover some stages alone ({failure})"
        )

    @property
    def _user_insists(self) -> bool:
        return self.wish.only_iteration is not None and not self.wish.is_restart


_NAME = "launcher"


class Launcher(msgspec.Struct, frozen=True):
    """Note of a node on what started its ranks.

    Attributes:
        process: name of torchrun's agent; empty for anything else.
        known: names of the starts that had left something when it first started the job.
        number: of the last start on the node: SLURM's job, its requeues, and restarts by the launcher.
        has_begun: whether that start, or one before it in the same chain, has got as far as training.
    """

    process: str
    known: tuple[str, ...]
    number: tuple[str, int, int] = ("", 0, 0)
    has_begun: bool = False


_LAUNCHER = msgspec.json.Decoder(Launcher)


class _Sight(msgspec.Struct, frozen=True, array_like=True):
    """Findings of one rank; all but the first field are of the node, and empty on its other ranks.

    Attributes:
        has_last: see `has_last_start`.
        inventory: of its memory, as it travels.
    """

    is_counted: bool
    has_last: bool = False
    launcher: Launcher | None = None
    attempts: list[Attempt] = []
    inventory: bytes = b""


_SIGHT = msgspec.msgpack.Decoder(_Sight | Failure)
_FOUND = msgspec.msgpack.Decoder(Found)


def look(met: Met, claimed: Claimed) -> Found:
    """Look for state. Called by all ranks; if one cannot, all raise its error."""
    site, ranks = met.site, met.ranks
    where = f"rank {site.rank} on node {site.node} cannot look for state: "
    sights = ranks.everyone.collect(attempt(lambda: _look_here(met), where), _SIGHT)
    found: list[Found] = []

    def join() -> Found | Failure:
        assert sights is not None
        for each in sights:
            if isinstance(each, Failure):
                return each
        found.append(_join([each for each in sights if isinstance(each, _Sight)], met, claimed))
        return replace(found[0], inventory=found[0].inventory.summary())

    summary = ranks.on_first(join, _FOUND)
    return found[0] if found else summary


def _look_here(met: Met) -> _Sight:
    """Return what this rank has found."""
    site, is_counted = met.site, is_counted_restart(os.environ)
    if not site.is_lowest_on_node:
        return _Sight(is_counted=is_counted)
    inventory = look_at_memory(site.node_dir, site.node, site.job_id)
    if met.pipelines is not None:
        inventory.logs = look_at_logs(site.node_dir, site.node, site.job_id)
    return _Sight(
        is_counted=is_counted,
        has_last=has_last_start(site.node_dir, os.environ),
        launcher=recall_launcher(site.node_dir, os.environ),
        attempts=read_attempts(site.node_dir),
        inventory=pack(inventory),
    )


def _join(sights: Sequence[_Sight], met: Met, claimed: Claimed) -> Found:
    """Return what all ranks have found, and what is on storage. Called by rank 0."""
    inventory = merge_packed(each.inventory for each in sights if each.inventory)
    if claimed.storage is not None:
        inventory.merge(look_at_storage(claimed.storage))
    mark_other_layouts(inventory, met.fingerprint, met.facts.world_size)
    noted = [attempt for each in sights for attempt in each.attempts]
    return Found(
        inventory=inventory,
        wish=_wish_of(sights, met),
        failed=failed_too_often(noted),
        failed_locally=failed_locally(noted),
    )


def mark_other_layouts(
    inventory: Inventory, fingerprint: Mapping[str, Any], world_size: int
) -> None:
    """Mark the versions of other layouts than that of this start, and leave out their logs.

    What is known by rank means nothing there: a log is that of another stage.
    """
    others = {
        identity.start: (layout_of(identity), identity.world_size)
        for _, identity in inventory.identities
        if has_other_layout(identity, fingerprint, world_size)
    }
    inventory.logs = [each for each in inventory.logs if each.history[-1] not in others]
    inventory.versions = [
        replace(each, layout=others[each.start][0], world_size=others[each.start][1])
        if each.start in others
        else each
        for each in inventory.versions
    ]


def note_start(met: Met, found: Found, *, has_begun: bool) -> None:
    """Note on this node which start it was, once it is known how it continues. Called by all ranks.

    Args:
        has_begun: whether it has got as far as training.
    """
    wish = found.wish
    if met.site.is_lowest_on_node:
        known = wish.known_before if wish.is_restart else found.inventory.names
        note_launcher(met.site.node_dir, os.environ, known, has_begun=has_begun)


def _wish_of(sights: Sequence[_Sight], met: Met) -> Wish:
    """Return what the flags ask for."""
    recovery = met.config.recovery
    launchers = [each.launcher for each in sights if each.launcher is not None]
    return Wish(
        recover_from=recovery.recover_from,
        only_iteration=recovery.only_iteration,
        is_restart=bool(launchers) or any(each.is_counted for each in sights),
        loaded_iteration=met.facts.iteration,
        began_with=met.facts.began_with,
        known_before=frozenset(name for each in launchers for name in each.known),
        has_last_memory=any(each.has_last for each in sights),
    )


def is_counted_restart(environment: Mapping[str, str]) -> bool:
    """Return whether torchrun or SLURM says that it has started this job before."""
    _, *counts = _number(environment)
    return any(counts)


def _number(environment: Mapping[str, str]) -> tuple[str, int, int]:
    return environment.get("SLURM_JOB_ID", ""), *restart_counts(environment)


def recall_launcher(node_dir: Path, environment: Mapping[str, str]) -> Launcher | None:
    """Return a node's note of its launcher; None if that has not started its ranks before."""
    known = _read(node_dir)
    if known is None:
        return None
    process = agent_name(environment)
    requeues, _ = restart_counts(environment)
    is_same = known.process == process
    if not process or is_kept(environment):
        is_same = is_counted_restart(environment)
    return known if is_same or requeues else None


def has_last_start(node_dir: Path, environment: Mapping[str, str]) -> bool:
    """Return whether the start before this one was on this node too, and had begun to train.

    Then the memory of the nodes is what the run has left last. A node that was away in between, or that some
    other launcher has used, may have an older state of the run.
    """
    known = _read(node_dir)
    if known is None or not known.has_begun:
        return False
    (job, *before), (own_job, *now) = known.number, _number(environment)
    requeues, restarts = (new - old for new, old in zip(now, before, strict=True))
    if job != own_job or requeues:
        return job == own_job and requeues == 1
    process = agent_name(environment)
    # torchrun does not count every restart; of other launchers nobody knows whether it is still the same.
    return known.process == process and (restarts == 1 or (restarts == 0 and bool(process)))


def _read(node_dir: Path) -> Launcher | None:
    with suppress(OSError, ValueError):
        return _LAUNCHER.decode(read_private(node_dir / _NAME))
    return None


def note_launcher(
    node_dir: Path,
    environment: Mapping[str, str],
    known: Iterable[str],
    *,
    has_begun: bool = False,
) -> None:
    """Note the launcher that starts a node's ranks. Called by one rank of a node, in each start.

    Args:
        known: names of the starts that had left something when it first did so.
    """
    launcher = Launcher(
        process=agent_name(environment),
        known=tuple(sorted(known)),
        number=_number(environment),
        has_begun=has_begun,
    )
    with suppress(OSError):  # at worst a flag that names where to begin holds for one more start
        write_atomically(node_dir / _NAME, msgspec.json.encode(launcher))
