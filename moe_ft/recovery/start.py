"""One start of checkpointing on one rank: recover what can be recovered, then protect it.

The phases are functions from frozen values to a frozen value, one file each, in this order:

    meet     the ranks join groups and learn who is where           -> Met
    claim    each takes its directories, locks and memory           -> Claimed
    rebuild  make again what parity has of lost ranks               (recovery/rebuild.py)
    look     find the state that exists, in memory and on storage   -> Found
    plan     rank 0 chooses what can be recovered, best first       -> Offer, with this rank's part of a Plan
    fetch    read and verify one rank's part of a plan              -> Fetched
    agree    make sure that together the ranks have all of it       -> Agreed
    restore  make it the live state                                 -> Restored
    protect  start the engine, which keeps the recovered state safe -> CheckpointEngine
    replay   run a window's iterations again; the training loop does that later (recovery/restore.py)

Everything that a phase opens is closed in reverse order: when the run ends, and also when a phase fails.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from msgspec import UNSET
from msgspec.msgpack import Decoder

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.background import PhaseHook
from moe_ft.engine.memory.mappings import Mappings
from moe_ft.errors import ConfigError, UnrecoverableError
from moe_ft.files.progress import waiting
from moe_ft.format.identity import Identity, Start
from moe_ft.planning.branches import continue_history, names_to_supersede, number_of_next
from moe_ft.planning.recovery import Plan
from moe_ft.recovery.agree import Agreed, fetch_together
from moe_ft.recovery.attempts import RankError
from moe_ft.recovery.borders import Lockstep
from moe_ft.recovery.checkpointing import Checkpointing, make_outcome, noting_failures
from moe_ft.recovery.claim import Claimed, claim, take_over_lock
from moe_ft.recovery.divided import DividedFetching
from moe_ft.recovery.facts import JobFacts
from moe_ft.recovery.fetch import Fetching
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.look import look, note_start
from moe_ft.recovery.media import open_readers
from moe_ft.recovery.meet import Built, Met, meet
from moe_ft.recovery.notices import Notices
from moe_ft.recovery.planner import Offer, Planner
from moe_ft.recovery.protect import protect
from moe_ft.recovery.rebuild import rebuild
from moe_ft.recovery.restore import Restored, restore
from moe_ft.recovery.site import Site, say_for_node
from moe_ft.saying import warn
from moe_ft.state import schedule
from moe_ft.strategies.registry import chosen

_WAIT_S = 300.0  # for storage that may hold what is needed
_PAUSE_S = 5.0  # between two looks
_STATE = Decoder(tuple[int, str] | RankError)


def start(
    config: MoeFtConfig,
    facts: JobFacts,
    built: Built,
    phase_hook: PhaseHook,
    note_site: Callable[[Site], None] = lambda site: None,
    most_iteration: int | None = None,
    mappings: Mappings | None = None,
) -> Checkpointing:
    """Recover what can be recovered and start checkpointing. Called by all ranks.

    Weights, moments, buffers and scalars are then in place, unless a replay is due. The caller sets the
    counters of the training loop, runs the replay, and puts the random numbers back before the first
    iteration. A process may start again after it has closed what an earlier start has returned.

    Args:
        note_site: called with this rank's place as soon as it is known.
        most_iteration: the latest that may be recovered; None for any. A loop that has not finished an
            iteration yet must run it again, not skip it.
        mappings: owned by the caller, who closes them after the last start; None if this is the only one.

    Raises:
        ConfigError: if the flags do not fit this machine, or the state that is there is another model's.
        UnrecoverableError: if there is state and none of it is usable, or nothing is there and
            --moe-ft-on-missing=fail.
        StorageAwayError: if storage that is needed does not answer, or a fresh start cannot write to it.
    """
    phases_s: dict[str, float] = {}
    with ExitStack() as opened:
        met = meet(config, facts, built, phase_hook, opened)
        note_site(met.site)
        claimed = claim(met, opened, mappings)
        # Only weights that are not always saved have checksums.
        origins = met.live.catalog.origins(sorted(met.strategy.rotation.units))
        planner, offer = _find(met, claimed, most_iteration, phases_s)
        found = planner.found
        recovery = _recover(met, claimed, planner, offer, origins, phases_s)
        restored, problems, blocked_by = recovery.restored, recovery.problems, recovery.blocked_by
        continued = None if restored is None else restored.plan
        with noting_failures(met, continued):
            may_wait = restored is not None or found.wish.has_last_memory
            lock, trouble = take_over_lock(met, claimed, opened, may_wait=may_wait)
            identity = make_identity(met, found.inventory, continued, is_chosen=recovery.is_chosen)
            outcome = make_outcome(met, restored, identity, phases_s, problems, blocked_by)
            engine = protect(met, claimed, identity, lock, origins, restored, trouble)
        note_start(met, found, has_begun=True)
        conversion = None if restored is None else restored.conversion
        borders = None if restored is None else restored.fetched.borders
        has_replays = borders is not None or (conversion is not None and conversion.num_replays)
        return Checkpointing(
            met=met,
            lock=lock,
            engine=engine,
            plan=continued,
            outcome=outcome,
            opened=opened.pop_all(),
            _replay=conversion if conversion is not None and has_replays else None,
            borders=borders,
            lockstep=Lockstep(met.ranks.everyone, continued),
        )


def _find(
    met: Met, claimed: Claimed, most_iteration: int | None, phases_s: dict[str, float]
) -> tuple[Planner, Offer]:
    """Look for state, and plan; look again while storage, which does not answer, may hold what is needed.

    Called by all ranks.

    Raises:
        ConfigError: if the flags do not fit what is there.
        StorageAwayError: if it has not answered for a while.
    """
    if met.groups:
        with _timed(phases_s, "rebuild"):
            rebuild(met, claimed)
    deadline_s, said = time.monotonic() + _WAIT_S, ""
    while True:
        with _timed(phases_s, "inventory"):
            found = replace(look(met, claimed), most_iteration=most_iteration)
        trouble = claimed.trouble
        if trouble is not None and trouble.is_of_flags and not found.wish.has_last_memory:
            raise ConfigError(trouble.text)
        planner = Planner(met, found)
        with _timed(phases_s, "plan"):
            offer = planner.plan()
        if not offer.unread:
            note_start(met, found, has_begun=found.wish.has_last_memory)
            return planner, offer
        planner.check_all_is_read(deadline_s)
        if met.site.rank == 0 and offer.unread != said:
            warn(f"waiting for storage, at most {_WAIT_S:.0f} s: {offer.unread}")
            said = offer.unread
        time.sleep(_PAUSE_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recovery:
    """Result of trying the candidates.

    Attributes:
        is_chosen: whether the user has named where this start begins.
    """

    restored: Restored | None
    is_chosen: bool
    problems: tuple[str, ...] = ()
    blocked_by: str = ""


def _recover(
    met: Met,
    claimed: Claimed,
    planner: Planner,
    offer: Offer,
    origins: Mapping[str, str],
    phases_s: dict[str, float],
) -> _Recovery:
    """Restore the first candidate that all ranks have intact. Called by all ranks."""
    wish, inventory = planner.found.wish, planner.found.inventory
    url = None if claimed.storage is None else claimed.storage.url
    notices = Notices(met.site, wish, url)
    if wish.ignores_all:
        notices.say_others(inventory, "")
        return _Recovery(restored=None, is_chosen=wish.is_choice)
    rejected, unread = list(offer.rejected), list[str]()

    def problems() -> tuple[str, ...]:
        texts = [each.text for each in inventory.problems]
        return (*unread, *texts, *(each.reason for each in rejected))

    while (candidate := offer.plan) is not None:
        planner.check(notices)
        with _timed(phases_s, "restore"), open_readers(met, claimed) as readers:
            fetch = DividedFetching if candidate.is_other_layout else Fetching
            fetching = fetch(candidate, met, readers, origins, offer.most_iteration)
            fetched, agreed, lacking = fetch_together(candidate, fetching, met)
            rejected += lacking
            unread += readers.problems
            if agreed is None:
                fetched.close()
                offer = planner.plan_without(lacking, fetched.unreadable, notices)
                continue
            rejected += offer.passed_over
            notices.say_rejected(candidate, inventory, rejected)
            notices.say_others(inventory, candidate.lineage)
            notices.say_divided(candidate)
            notices.say_blocked_by(candidate, offer.blocked_by)
            agreed = _check_state(met, agreed)
            with noting_failures(met, candidate):
                restored = restore(candidate, agreed, met, readers, offer.kept)
            if inventory.is_unreadable:
                restored = replace(restored, persisted_index=None)
        return _Recovery(
            restored=restored,
            is_chosen=wish.is_choice and not offer.follows,
            problems=problems(),
            blocked_by=offer.blocked_by,
        )
    try:
        planner.check_may_begin(notices, problems())
    except UnrecoverableError as error:
        if met.config.elastic.elastic:
            _wait_for_nodes(met, error)
        raise
    return _Recovery(restored=None, is_chosen=wish.is_choice, problems=problems())


def _check_state(met: Met, agreed: Agreed) -> Agreed:
    """Refuse a state of another schedule, or say whose settings count, and what of it is not exact.

    Called by all ranks. Nothing is put back yet, and no failure is noted: it is not the state that is wrong.
    """
    index, (_, optimizer, scheduler) = agreed.fetched.index, met.live.built
    assert index is not None
    kept = ", ".join(f"{key} as {each}" for key, each in agreed.fetched.lossy.items())
    lossy = f"recovered state was stored as {kept}: it is not exact" if kept else ""
    records = index.records[-len(agreed.slices) :]
    line, found = met.ranks.find_together(
        lambda: (schedule.check_changes(records, optimizer, scheduler), (index.window, lossy)),
        _STATE,
    )
    if line and met.site.rank == 0:
        warn(line)
    say_for_node(met.site, [lossy for _, lossy in found])
    # Stages that recover alone have other windows; all must continue with the same length.
    return replace(agreed, window=max(window for window, _ in found))


def _wait_for_nodes(met: Met, error: UnrecoverableError) -> None:
    """Give the launcher time to start all ranks again, with a node that has what is missing."""
    if met.site.rank == 0:
        warn(f"waiting for nodes, at most {_WAIT_S:.0f} s: {error}")
    with waiting(_WAIT_S):
        time.sleep(_WAIT_S)


@contextmanager
def _timed(phases_s: dict[str, float], phase: str) -> Iterator[None]:
    start_s = time.perf_counter()
    yield
    phases_s[phase] = time.perf_counter() - start_s


def make_identity(
    met: Met, inventory: Inventory, plan: Plan | None, *, is_chosen: bool
) -> Identity:
    """Return the identity of a start.

    Args:
        plan: the state that it continues; None if it begins a run.
        is_chosen: whether the user has named where this start begins.
    """
    config, facts, kind = met.config, met.facts, chosen(met.config)
    start = Start(
        number=number_of_next(inventory.starts),
        resumed_at=facts.iteration if plan is None else plan.iteration,
        name=met.names.name,
        is_chosen=is_chosen,
    )
    history = continue_history(() if plan is None else plan.history, start)
    return Identity(
        job_id=met.site.job_id,
        lineage=met.names.lineage if plan is None else plan.lineage,
        history=history,
        fingerprint=dict(met.fingerprint),
        world_size=facts.world_size,
        strategy=config.strategy.strategy,
        division=kind.division(config),
        replay_settings=facts.replay_settings,
        script_settings=facts.script_settings or UNSET,
        superseded=names_to_supersede(inventory.names, history),
        began_with=facts.began_with if plan is None else plan.began_with,
    )
