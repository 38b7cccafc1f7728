"""Fourth phase of a start: plan the ways to recover, choose those that the flags allow, compare settings.

planning/recovery.py makes the plans, recovery/choice.py chooses among them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.format.identity import (
    Identity,
    changed_settings,
    differing_settings,
    incomparable_settings,
)
from moe_ft.planning.recovery import Plan, Rejection, plan_recovery
from moe_ft.recovery.choice import Choice, choose, follows, without_left
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import Found
from moe_ft.recovery.meet import Met
from moe_ft.recovery.verdict import Verdict
from moe_ft.strategies.registry import chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Plans of a start, the same on all ranks.

    Attributes:
        choice: the plans that may be used, best first.
        plans: all plans, best first.
        rejected: state that no plan uses, and plans that the flags or earlier failures exclude.
        most_iteration: latest iteration of versions of units that only some snapshots hold; None for any.
    """

    choice: Choice
    plans: Sequence[Plan]
    rejected: Sequence[Rejection]
    most_iteration: int | None


def plan(found: Found, met: Met) -> Candidates:
    """Plan the ways to recover.

    Raises:
        ConfigError: if the flags begin a run from other weights than the run that was found.
    """
    ranks, wish, inventory = met.site.topology.ranks, found.wish, found.inventory
    if wish.ignores_all:  # nothing that was found may refuse this start
        return Candidates(choice=Choice(plans=()), plans=(), rejected=(), most_iteration=None)
    plans, rejected = plan_recovery(
        inventory.versions, [info.node for info in ranks], [info.stage for info in ranks]
    )
    failures = [found.failure_of(each) for each in plans]
    rejected += [failure for failure in failures if failure is not None]
    plans = [each for each, failure in zip(plans, failures, strict=True) if failure is None]
    plans, left = without_left(plans, wish)
    has_begun = any(
        follows(version.history, wish) and version.lineage in inventory.lineages
        for version in inventory.versions
    )
    choice = choose(plans, wish, has_begun=has_begun, newest_iteration=inventory.newest_iteration)
    return Candidates(
        choice=choice,
        plans=plans,
        rejected=[*rejected, *left],
        most_iteration=None if choice.follows else wish.only_iteration,
    )


def check_plan(candidate: Plan, found: Found, met: Met, verdict: Verdict) -> None:
    """Check that a plan belongs to this job, and that nothing unread may be newer.

    Raises:
        ConfigError: if it is the state of another model, layout or data, or was made with other settings and
            needs a replay.
        UnrecoverableError: if something that could not be read may be newer.
    """
    check_all_is_read(candidate, found)
    for _, identity in found.inventory.identities:
        if identity.start == candidate.start:
            check_settings(identity, found.inventory, met, verdict)
            changes = changed_settings(met.facts.script_settings, identity.script_settings or {})
            verdict.say_changed(changes)
    check_replay(candidate, met.facts.replay_settings, verdict)


def check_all_is_read(candidate: Plan, found: Found) -> None:
    """Raise UnrecoverableError if something that could not be read may be newer than a plan.

    Going back to an older state would let retention delete it.
    """
    unread = [
        problem.text
        for problem in found.inventory.problems
        if problem.is_unread
        and (problem.iteration is None or problem.iteration > candidate.iteration)
    ]
    if unread and found.wish.only_iteration is None:
        raise UnrecoverableError(
            f"{'; '.join(unread[:3])}: may be newer than iteration {candidate.iteration}, which is usable. "
            "Start again when storage answers. To continue from there anyway, add "
            f"--moe-ft-recover-from iter_{candidate.iteration}."
        )


def check_settings(identity: Identity, inventory: Inventory, met: Met, verdict: Verdict) -> None:
    """Raise ConfigError if an identity is that of another model, layout or data."""
    where = next(where for where, each in inventory.identities if each is identity)
    division = chosen(met.config).division(met.config)
    if division and identity.division and division != identity.division:
        raise ConfigError(
            f"{where} holds experts that are divided differently: '{identity.division}' there, "
            f"'{division}' now. Start with the flags of that run, or ignore it with "
            "--moe-ft-recover-from load."
        )
    unknown = incomparable_settings(met.fingerprint, identity.fingerprint)
    verdict.say_incomparable(where, unknown)
    differences = differing_settings(met.fingerprint, identity.fingerprint)
    if differences:
        raise ConfigError(
            f"{where} holds the state of another model, layout or data: "
            f"{'; '.join(differences[:5])}. Start with the settings of that run, name another "
            "--moe-ft-persist-dir or --moe-ft-job-id, remove its memory with `python -m moe_ft "
            "clean`, or ignore it with --moe-ft-recover-from load."
        )


def check_replay(candidate: Plan, replay_settings: Mapping[str, Any], verdict: Verdict) -> None:
    """Raise ConfigError if a plan replays iterations and they would not be the same.

    Args:
        replay_settings: settings of this start that the result of an iteration depends on, by flag.
        verdict: says which settings cannot be compared.
    """
    if candidate.num_replays == 0:
        return
    theirs = msgspec.json.decode(candidate.version.replay_settings)
    verdict.say_incomparable(
        f"the window of iteration {candidate.iteration}",
        incomparable_settings(replay_settings, theirs),
    )
    if differences := differing_settings(replay_settings, theirs):
        raise ConfigError(
            f"iteration {candidate.iteration} is in a window of {candidate.version.window} snapshots, and "
            "recovering it runs iterations again, with settings that have changed: "
            f"{'; '.join(differences[:5])}. Start with the settings of that run; to change them, end it "
            "first, with --exit-interval and --moe-ft-persist-dir, where the last state is written as a "
            "whole. Or ignore it with --moe-ft-recover-from load."
        )
