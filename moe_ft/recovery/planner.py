"""Planning of a start by rank 0 for all ranks: each gets the best plan, with the copies that it may read.

recovery/plan.py plans, planning/shares.py divides the result. An error of rank 0 is raised on all ranks.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from msgspec.msgpack import Decoder

from moe_ft.planning.comparison import passed_over
from moe_ft.planning.recovery import Plan, Rejection, plan_to_keep
from moe_ft.planning.scope import Place
from moe_ft.planning.shares import Common, Share, share_out, take_share
from moe_ft.recovery.look import Found
from moe_ft.recovery.meet import Met
from moe_ft.recovery.notices import Notices
from moe_ft.recovery.plan import (
    Candidates,
    check_all_is_read,
    check_plan,
    check_settings,
    plan,
    plan_without,
    unread,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The best way to recover that is left, as one rank needs it.

    Attributes:
        plan: with the sources of this rank alone; None if there is none, or if all state is ignored.
        kept: likewise the state that must stay in memory, see `plan_to_keep`.
        follows, most_iteration, blocked_by: see `Choice` and `Candidates`.
        rejected: state that no plan uses, and plans that are excluded.
        passed_over: state that could have been used instead of the plan.
        unread: what could not be read and may be newer than the plan; empty if there is nothing.
    """

    plan: Plan | None = None
    kept: Plan | None = None
    follows: bool
    most_iteration: int | None
    blocked_by: str
    rejected: Sequence[Rejection]
    passed_over: Sequence[Rejection]
    unread: str


_NOTHING = Decoder(None)
_PLACES = Decoder(tuple[Place, ...])
_OFFER = Decoder(tuple[Offer, Common | None])
_SHARE = Decoder(Share)


class Planner:
    """Plans of a start, which rank 0 has. All methods are called by all ranks. Owned by the training thread.

    Attributes:
        found: on other ranks than rank 0 what these need of it.
    """

    def __init__(self, met: Met, found: Found) -> None:
        self.found = found
        self._met = met
        self._candidates: Candidates | None = None

    def plan(self) -> Offer:
        """Plan the ways to recover.

        Raises:
            ConfigError: if the flags begin a run from other weights than the run that was found.
        """
        return self._offer(lambda: plan(self.found, self._met))

    def plan_without(
        self, lacking: Sequence[Rejection], unreadable: Collection[Place], notices: Notices
    ) -> Offer:
        """Plan again, after all ranks have tried the best plan in vain.

        Args:
            lacking: what ranks lack of it.
            unreadable: places of it that this rank could not read.
        """
        gathered = self._met.ranks.everyone.collect(tuple(unreadable), _PLACES)

        def again() -> Candidates:
            assert gathered is not None
            before, known = self._known, frozenset[Place]().union(*gathered)
            best = before.choice.plans[0]
            found, candidates = plan_without(best, lacking, known, self.found, before, self._met)
            if found is not self.found:
                notices.say_unreadable(lacking)
                self.found = found
            return candidates

        return self._offer(again)

    def check(self, notices: Notices) -> None:
        """Check that the best plan belongs to this job; raises what `check_plan` does."""
        self._met.ranks.on_first(
            lambda: check_plan(self._known.choice.plans[0], self.found, self._met, notices),
            _NOTHING,
        )

    def check_all_is_read(self, deadline_s: float) -> None:
        """Raise StorageAwayError if something that could not be read may be newer, after a time of rank 0."""

        def check() -> None:
            if time.monotonic() > deadline_s:
                check_all_is_read(next(iter(self._known.choice.plans), None), self.found)

        self._met.ranks.on_first(check, _NOTHING)

    def check_may_begin(self, notices: Notices, problems: Sequence[str]) -> None:
        """Refuse to begin without state, unless there is none or the flags say so."""

        def check() -> None:
            choice, inventory = self._known.choice, self.found.inventory
            if choice.prefers_load:
                notices.say_load(self._known.plans, problems)
            elif not choice.ignores_others:
                for _, identity in inventory.identities:
                    check_settings(identity, inventory, self._met, notices)
                notices.check_is_empty(inventory, self._known.plans, problems)

        self._met.ranks.on_first(check, _NOTHING)

    @property
    def _known(self) -> Candidates:
        assert self._candidates is not None, "only rank 0 plans"
        return self._candidates

    def _offer(self, find: Callable[[], Candidates]) -> Offer:
        """Offer the best of the plans that rank 0 finds."""
        met, shares = self._met, list[bytes]()

        def head() -> tuple[Offer, Common | None]:
            self._candidates = candidates = find()
            best = next(iter(candidates.choice.plans), None)
            offer = Offer(
                follows=candidates.choice.follows,
                most_iteration=candidates.most_iteration,
                blocked_by=candidates.blocked_by,
                rejected=candidates.rejected,
                passed_over=() if best is None else passed_over(best, candidates.plans),
                unread=unread(best, self.found),
            )
            if best is None:
                return offer, None
            common, found = share_out(
                best,
                plan_to_keep(best, candidates.plans),
                len(met.site.topology.ranks),
                needs_elsewhere=not met.strategy.rotation.is_empty,
            )
            shares.extend(found)
            return offer, common

        offer, common = met.ranks.on_first(head, _OFFER)
        if common is None:
            return offer
        share = met.ranks.everyone.hand_out(shares, _SHARE)
        own, kept = take_share(
            common, share, rank=met.site.rank, stage=met.facts.stage, node=met.site.node
        )
        return replace(offer, plan=own, kept=kept)
