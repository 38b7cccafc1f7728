"""Fourth phase of a start: plan the ways to recover, choose those that the flags allow, compare settings.

Only rank 0 does; recovery/planner.py gives the others what they need of it. planning/recovery.py makes the
plans, recovery/choice.py chooses among them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import msgspec

from moe_ft.command_lines import as_flag
from moe_ft.config.flag_table import FLAGS, names_in
from moe_ft.errors import ConfigError, StorageAwayError
from moe_ft.format.identity import (
    EVALUATION,
    Identity,
    changed_settings,
    differing_settings,
    has_other_layout,
    incomparable_settings,
    without_layout,
)
from moe_ft.planning.local_recovery import is_behind, plan_local
from moe_ft.planning.recovery import Plan, Rejection, Version, plan_recovery
from moe_ft.planning.remains import place_of
from moe_ft.planning.scope import Place
from moe_ft.recovery.choice import Choice, choose, follows, without_left
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import Found
from moe_ft.recovery.meet import Met, why_never_alone
from moe_ft.recovery.notices import Notices
from moe_ft.state.schedule import error_of_replay
from moe_ft.state.slices import uncut_shapes
from moe_ft.strategies.registry import chosen

_MOST_UNREAD = 3  # named in a message
# Flags of the data and the tokenizer, those of evaluations too.
_DATA = {
    as_flag(name)
    for heading in ("fingerprint", "fingerprint untested")
    for name in names_in(FLAGS["data"][heading])
} - {"--seed"} | {"dataset.blend", "dataset.blend_per_split[train]", "dataset.mock"}
_DRAWING = ("--hidden-dropout", "--attention-dropout", "--moe-input-jitter-eps")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Plans of a start, on rank 0.

    Attributes:
        choice: the plans that may be used, best first.
        plans: all plans, best first.
        rejected: state that no plan uses, and plans that the flags or earlier failures exclude.
        most_iteration: latest iteration of versions of units that only some snapshots hold; None for any.
        blocked_by: reason why no newer state is reached, or no stage recovers alone; empty if neither is so.
    """

    choice: Choice
    plans: Sequence[Plan]
    rejected: Sequence[Rejection]
    most_iteration: int | None
    blocked_by: str = ""


def plan(found: Found, met: Met) -> Candidates:
    """Plan the ways to recover.

    Raises:
        ConfigError: if the flags begin a run from other weights than the run that was found.
    """
    ranks, wish, inventory = met.site.topology.ranks, found.wish, found.inventory
    if wish.ignores_all:  # nothing that was found may refuse this start
        return Candidates(choice=Choice(plans=()), plans=(), rejected=(), most_iteration=None)
    readable = [each for each in inventory.versions if place_of(each) not in found.unreadable]
    versions, later = _until(readable, found.most_iteration)
    plans, rejected = plan_recovery(
        versions, [info.node for info in ranks], [info.stage for info in ranks]
    )
    rejected += later
    local, blocked_by = _plan_local(plans, versions, found, met)
    if local is not None:
        plans.insert(0, local)
    failures = [found.failure_of(each) for each in plans]
    rejected += [failure for failure in failures if failure is not None]
    plans = [each for each, failure in zip(plans, failures, strict=True) if failure is None]
    passed_over = {each.iteration for each in failures if each is not None}
    if wish.loaded_iteration in passed_over:  # --load has the same state, saved when it failed
        wish = replace(wish, loaded_iteration=0)
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
        blocked_by="; ".join(dict.fromkeys(filter(None, (*_reasons(later), blocked_by)))),
    )


def _until(
    versions: Sequence[Version], most_iteration: int | None
) -> tuple[list[Version], list[Rejection]]:
    """Return the states up to an iteration, and for each later iteration of a start one rejection."""
    if most_iteration is None:
        return [*versions], []
    later = {
        (each.iteration, each.start): Rejection(
            iteration=each.iteration,
            start=each.start,
            reason=f"iteration {each.iteration}: not finished on all ranks",
        )
        for each in versions
        if each.iteration > most_iteration
    }
    return [each for each in versions if each.iteration <= most_iteration], [*later.values()]


def _reasons(rejected: Sequence[Rejection]) -> list[str]:
    return [each.reason for each in rejected]


def _plan_local(
    plans: Sequence[Plan], versions: Sequence[Version], found: Found, met: Met
) -> tuple[Plan | None, str]:
    """Return a recovery of some stages alone, if that helps, and what hinders a better one."""
    # Of another layout no rank has what a rank of the same number needs.
    versions = [each for each in versions if not each.layout]
    if met.pipelines is None:
        is_asked = met.config.recovery.recovery == "auto"
        never = why_never_alone(met.facts, met.config) if is_asked else ""
        return None, never if is_behind(plans, versions) else ""

    def can_replay(settings: str) -> bool:
        differences = differing_settings(met.facts.replay_settings, msgspec.json.decode(settings))
        return not differences and met.config.recovery.data == "same"

    def has_same_records(settings: str) -> bool:
        return not differing_settings(met.facts.record_settings, msgspec.json.decode(settings))

    local, blocked_by = plan_local(
        plans,
        versions,
        found.inventory.logs,
        met.pipelines,
        cache(can_replay),
        met.facts.is_evaluated,
        cache(has_same_records),
        found.unreadable,
    )
    if local is not None and (reason := found.local_failure_of(local)):
        return None, reason
    failure = None if local is None else found.failure_of(local)
    return local, blocked_by if failure is None else failure.reason


def plan_without(
    rejected: Plan,
    lacking: Sequence[Rejection],
    unreadable: Collection[Place],
    found: Found,
    candidates: Candidates,
    met: Met,
) -> tuple[Found, Candidates]:
    """Return the ways to recover that are left after a plan was rejected.

    If stages can recover alone, everything is planned again without what could not be read: with more stages,
    or from other states, some of them may still do so.

    Args:
        rejected: the best of the candidates.
        unreadable: places of that plan that ranks could not read.

    Returns:
        The same findings if there is nothing new to leave out, and then the other candidates.
    """
    known = found.unreadable
    if met.pipelines is not None:
        known = known.union(unreadable)
    if known != found.unreadable:
        found = replace(found, unreadable=known)
        candidates = plan(found, met)
    else:
        others = tuple(each for each in candidates.choice.plans if each is not rejected)
        candidates = replace(candidates, choice=replace(candidates.choice, plans=others))
    best = next(iter(candidates.choice.plans), None)
    is_worse = best is None or best.iteration < rejected.iteration
    is_worse |= rejected.is_local and best is not None and not best.is_local
    if met.pipelines is not None and is_worse and not candidates.blocked_by:
        candidates = replace(candidates, blocked_by=lacking[0].reason)
    return found, candidates


def check_plan(candidate: Plan, found: Found, met: Met, notices: Notices) -> None:
    """Check that a plan belongs to this job, and that nothing unread may be newer.

    Raises:
        ConfigError: if it is the state of another model, layout or data, or was made with other settings and
            needs a replay.
        StorageAwayError: if something that could not be read may be newer.
    """
    check_all_is_read(candidate, found)
    other_data: list[str] = []
    for _, identity in found.inventory.identities:
        if identity.start == candidate.start:
            other_data += check_settings(identity, found.inventory, met, notices)
            changes = changed_settings(met.facts.script_settings, identity.script_settings or {})
            notices.say_changed(changes)
    if not candidate.is_local:  # which was planned with what has the settings of this start
        check_replay(candidate, met.facts.replay_settings, notices, other_data)


def unread(candidate: Plan | None, found: Found) -> str:
    """Return what could not be read and may be newer than a plan; empty if there is nothing.

    Going back to an older state would let retention delete it. But the memory of the start before this one is
    newer than all that storage may have, unless it is known to be there.
    """
    wish = found.wish
    if wish.ignores_all or (candidate is not None and wish.only_iteration is not None):
        return ""
    problems = [each for each in found.inventory.problems if each.is_unread]
    if candidate is not None:
        is_newest = wish.has_last_memory and not candidate.basis.is_on_storage
        problems = [
            each
            for each in problems
            if (not is_newest if each.iteration is None else each.iteration > candidate.iteration)
        ]
    return "; ".join(each.text for each in problems[:_MOST_UNREAD])


def check_all_is_read(candidate: Plan | None, found: Found) -> None:
    """Raise StorageAwayError if something that could not be read may be newer than a plan."""
    if not (reasons := unread(candidate, found)):
        return
    if candidate is None:
        raise StorageAwayError(
            f"{reasons}: nothing else is usable, and what is there is unknown. Start again when storage "
            "answers. To begin from --load or afresh without it, add --moe-ft-recover-from load."
        )
    raise StorageAwayError(
        f"{reasons}: may be newer than iteration {candidate.iteration}, which is usable. Start again when "
        "storage answers. To continue from there anyway, add --moe-ft-recover-from "
        f"iter_{candidate.iteration}."
    )


def check_settings(
    identity: Identity, inventory: Inventory, met: Met, notices: Notices
) -> list[str]:
    """Raise ConfigError if an identity is that of another model, layout or data.

    Returns: differences of data that --moe-ft-data allows.
    """
    where = next(where for where, each in inventory.identities if each is identity)
    division = chosen(met.config).division(met.config)
    if division and identity.division and division != identity.division:
        raise ConfigError(
            f"{where} holds experts that are divided differently: '{identity.division}' there, "
            f"'{division}' now. Start with the flags of that run, or ignore it with "
            "--moe-ft-recover-from load."
        )
    unknown = incomparable_settings(met.fingerprint, identity.fingerprint)
    notices.say_incomparable(where, unknown)
    theirs = without_layout(identity.fingerprint)
    differences = differing_settings(without_layout(met.fingerprint), theirs)
    other_data = [each for each in differences if _flag_in(each) in _DATA]
    allowed = other_data if met.config.recovery.data == "any" else []
    evaluated = [each for each in differences if _flag_in(each) in EVALUATION]
    notices.say_other_data([*allowed, *evaluated])
    differences = [each for each in differences if each not in (*allowed, *evaluated)]
    is_other = has_other_layout(identity, met.fingerprint, met.facts.world_size)
    hint = ""
    if not differences and is_other and met.config.recovery.layout == "same":
        differences = differing_settings(met.fingerprint, identity.fingerprint) or [
            f"{identity.world_size} ranks there, {met.facts.world_size} now"
        ]
        hint = "To divide it again among the ranks of now, add --moe-ft-layout any. Otherwise start"
    elif not differences and is_other:
        _check_is_divisible(where, met)
    elif any(name.startswith("--padded-vocab-size") for name in differences):
        hint = "Choose --make-vocab-size-divisible-by so that the vocabulary is padded alike. Start"
    elif differences == other_data:
        hint = "To continue with the data of now, add --moe-ft-data any. Otherwise start"
    if differences:
        raise ConfigError(
            f"{where} holds the state of another model, layout or data: "
            f"{'; '.join(differences[:5])}. {hint or 'Start'} with the settings of that run, name another "
            "--moe-ft-persist-dir or --moe-ft-job-id, remove its memory with `python -m moe_ft "
            "clean`, or ignore it with --moe-ft-recover-from load."
        )
    return allowed


def _check_is_divisible(where: str, met: Met) -> None:
    """Raise ConfigError if the optimizer keeps tensors that no layout but the one of the state has."""
    whole = [each.name for each in met.live.parameters if uncut_shapes(each)]
    if whole:
        raise ConfigError(
            f"--moe-ft-layout=any: {where} holds the state of an optimizer that keeps more for "
            f"{whole[0]} than numbers of each weight: the factors of SOAP, and second moments of rows, are "
            "of whole matrices as a rank has them, and Megatron's own checkpoints do not hold them either. "
            "Start in the layout of that run, or ignore its state with --moe-ft-recover-from load."
        )


def _flag_in(difference: str) -> str:
    return difference.split()[0].removesuffix(":")


def check_replay(
    candidate: Plan,
    replay_settings: Mapping[str, Any],
    notices: Notices,
    other_data: Sequence[str] = (),
) -> None:
    """Raise ConfigError if a plan replays iterations and they would not be the same."""
    if candidate.num_replays == 0:
        return
    theirs = msgspec.json.decode(candidate.version.replay_settings)
    if candidate.is_other_layout:
        theirs = without_layout(theirs)
        replay_settings = without_layout(replay_settings)
        check_draws_nothing(candidate, theirs)
    notices.say_incomparable(
        f"the window of iteration {candidate.iteration}",
        incomparable_settings(replay_settings, theirs),
    )
    if differences := [*other_data, *differing_settings(replay_settings, theirs)]:
        raise error_of_replay(candidate.iteration, candidate.version.window, differences)


def check_draws_nothing(candidate: Plan, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError if iterations draw random numbers: in another layout they are other numbers."""
    drawing = [f"{name} {settings[name]}" for name in _DRAWING if settings.get(name)]
    if drawing:
        raise ConfigError(
            f"--moe-ft-layout=any: iteration {candidate.iteration} is in a window of "
            f"{candidate.version.window} snapshots, and recovering it runs iterations again, which draw "
            f"other random numbers in another layout ({', '.join(drawing)}). Start in the layout of that "
            "run with --exit-interval 1 and --moe-ft-persist-dir, which writes the state as a whole, and "
            "change the layout then; `python -m moe_ft convert --densify` does the same. Or recover a whole "
            "state, which --moe-ft-persist-dense-interval writes while training runs."
        )
