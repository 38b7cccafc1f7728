"""Third phase of a start: all ranks look for state, in the memory of their nodes and on storage.

One rank of each node looks at its memory, and sends what it finds to rank 0, which plans for all of them.

Flags that say where to begin hold for the first start of a launcher only. So each node notes which start
(moe_ft/launches.py) was its last, and what there was before the first one of that launcher. If its last start
was the one before this, the memory of the nodes is the newest state of the run, also while storage cannot be
read.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from moe_ft.engine.memory.job_directory import LAUNCHER_NAME
from moe_ft.files.private_files import read_private, write_atomically
from moe_ft.format.identity import has_other_layout, layout_of
from moe_ft.launches import Launch
from moe_ft.planning.recovery import Plan, Rejection
from moe_ft.planning.scope import Place
from moe_ft.recovery.attempts import RankError, attempt
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.claim import Claimed
from moe_ft.recovery.failures import Attempt, failed_locally, failed_too_often, read_attempts
from moe_ft.recovery.inventory import Inventory, look_at_logs, merge_packed, pack
from moe_ft.recovery.media import find_for_all, find_on_node
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


class LaunchNote(msgspec.Struct, frozen=True):
    """Note of a node on its last start.

    Attributes:
        known: names of the starts that had left something when its launcher first started the job.
        has_begun: whether that start, or one before it in the same chain, has got as far as training.
    """

    launch: Launch
    known: tuple[str, ...]
    has_begun: bool = False


_NOTE = msgspec.json.Decoder(LaunchNote)


class _Sight(msgspec.Struct, frozen=True, array_like=True):
    """Findings of one rank: all of them are of the node, and empty on its other ranks.

    Attributes:
        is_counted: whether the launcher has counted a start before this one.
        has_last: whether the start before this one was on this node too, and had begun to train. The memory
            of the nodes is what the run has left last, then. A node that was away in between, or that some
            other launcher has used, may have an older state of the run.
        known: see `LaunchNote`; None if this launcher has not started the node's ranks before.
        inventory: of its memory, as it travels.
    """

    is_counted: bool = False
    has_last: bool = False
    known: tuple[str, ...] | None = None
    attempts: list[Attempt] = []
    inventory: bytes = b""


_SIGHT = msgspec.msgpack.Decoder(_Sight | RankError)
_FOUND = msgspec.msgpack.Decoder(Found)


def look(met: Met, claimed: Claimed) -> Found:
    """Look for state. Called by all ranks; if one cannot, all raise its error."""
    site, ranks = met.site, met.ranks
    where = f"rank {site.rank} on node {site.node} cannot look for state: "
    sights = ranks.everyone.collect(attempt(lambda: _look_here(met), where), _SIGHT)
    found: list[Found] = []

    def join() -> Found | RankError:
        assert sights is not None
        for each in sights:
            if isinstance(each, RankError):
                return each
        found.append(_join([each for each in sights if isinstance(each, _Sight)], met, claimed))
        return replace(found[0], inventory=found[0].inventory.summary())

    summary = ranks.on_first(join, _FOUND)
    return found[0] if found else summary


def _look_here(met: Met) -> _Sight:
    """Return what this rank has found."""
    site = met.site
    if not site.is_lowest_on_node:
        return _Sight()
    inventory = find_on_node(site)
    if met.pipelines is not None:
        inventory.logs = look_at_logs(site.node_dir, site.node, site.job_id)
    launch, note = site.launch, read_note(site.node_dir)
    return _Sight(
        is_counted=launch.is_counted,
        has_last=note is not None and note.has_begun and launch.follows(note.launch),
        known=note.known if note is not None and launch.repeats(note.launch) else None,
        attempts=read_attempts(site.node_dir),
        inventory=pack(inventory),
    )


def _join(sights: Sequence[_Sight], met: Met, claimed: Claimed) -> Found:
    """Return what all ranks have found, and what is on storage. Called by rank 0."""
    inventory = merge_packed(each.inventory for each in sights if each.inventory)
    inventory.merge(find_for_all(claimed))
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
        note = LaunchNote(launch=met.site.launch, known=tuple(sorted(known)), has_begun=has_begun)
        with suppress(
            OSError
        ):  # at worst a flag that names where to begin holds for one more start
            write_atomically(met.site.node_dir / LAUNCHER_NAME, msgspec.json.encode(note))


def _wish_of(sights: Sequence[_Sight], met: Met) -> Wish:
    """Return what the flags ask for."""
    recovery = met.config.recovery
    known = [each.known for each in sights if each.known is not None]
    return Wish(
        recover_from=recovery.recover_from,
        only_iteration=recovery.only_iteration,
        is_restart=bool(known) or any(each.is_counted for each in sights),
        loaded_iteration=met.facts.iteration,
        began_with=met.facts.began_with,
        known_before=frozenset(name for names in known for name in names),
        has_last_memory=any(each.has_last for each in sights),
    )


def read_note(node_dir: Path) -> LaunchNote | None:
    """Return a node's note of its last start; None without one that can be read."""
    with suppress(OSError, ValueError):
        return _NOTE.decode(read_private(node_dir / LAUNCHER_NAME))
    return None
