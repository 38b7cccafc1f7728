"""Messages of a start on state that it does not use, and its refusals to begin without it."""

from collections.abc import Callable, Sequence

from moe_ft.errors import UnrecoverableError
from moe_ft.planning.comparison import newer_than
from moe_ft.planning.recovery import Plan, Rejection
from moe_ft.planning.tiers import STORAGE
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.site import Site
from moe_ft.saying import say, some_of, warn

_MOST_REASONS = 12  # printed at a time
_IGNORING = (
    "To begin from --load or afresh without it, add --moe-ft-recover-from load: what is on storage stays, "
    "what is in memory is overwritten."
)


class Notices:
    """Messages and refusals of one start; prints on rank 0 only."""

    def __init__(self, site: Site, wish: Wish, url: str | None) -> None:
        self._site = site
        self._wish = wish
        self._incomparable: set[str] = set()
        self._has_said_changes = False
        self._has_said_data = False
        self._looked_at = (
            f"the memory of job '{site.job_id}' on nodes {', '.join(site.topology.nodes)}"
        )
        if url is not None:
            self._looked_at += f" and {url}"

    def say_rejected(self, plan: Plan, inventory: Inventory, rejected: Sequence[Rejection]) -> None:
        """Print the states that may be newer than the recovered one, and why they are not used."""
        reasons = [each.reason for each in newer_than(plan, rejected)]
        reasons += [
            each.text
            for each in inventory.problems
            if each.is_state and (each.iteration is None or each.iteration > plan.iteration)
        ]
        if reasons and self._site.rank == 0:
            warn(f"continuing from iteration {plan.iteration}; what may be newer is not used:")
            _tell_all(warn, reasons)

    def say_unreadable(self, rejected: Sequence[Rejection]) -> None:
        """Print that everything is planned again, and the first thing that could not be read."""
        if rejected and self._site.rank == 0:
            warn(f"planning again without what cannot be read: {rejected[0].reason}")

    def say_blocked_by(self, plan: Plan, blocked_by: str) -> None:
        """Print why no newer state is reached, or why no stage recovers alone; nothing if that is empty."""
        if blocked_by and self._site.rank == 0:
            recovery = "some stages recover alone" if plan.is_local else "all stages recover"
            say(f"{recovery}, up to iteration {plan.iteration}; {blocked_by}")

    def say_divided(self, plan: Plan) -> None:
        """Print that a state of another layout is divided again, and what that changes; else nothing."""
        if not plan.is_other_layout or self._site.rank != 0:
            return
        ranks, now = plan.version.world_size, len(self._site.topology.ranks)
        again = (
            f"; {plan.num_replays} iterations run again, equal up to the order of sums"
            if plan.num_replays
            else ""
        )
        say(
            f"iteration {plan.iteration} was written in another layout by {ranks} ranks: it is divided among "
            f"{now} ranks, which draw new random numbers{again}"
        )

    def say_load(self, plans: Sequence[Plan], problems: Sequence[str]) -> None:
        """Print that --load comes before the state of moe_ft."""
        if self._site.rank == 0:
            loaded = self._wish.loaded_iteration
            older = [plan.iteration for plan in plans if plan.iteration < loaded]
            than = f"usable state of iteration {older[0]}" if older else "state, none of it usable"
            say(
                f"continuing from --load at iteration {loaded}, as a new run: newer than moe_ft's {than}"
            )
            _tell_all(say, problems)

    def say_others(self, inventory: Inventory, lineage: str) -> None:
        """Print the checkpoints of other runs on storage, which nobody deletes."""
        others = sorted(
            {
                version.iteration
                for version in inventory.versions
                if version.tier == STORAGE and version.lineage != lineage
            }
        )
        if others and self._site.rank == 0:
            shown = ", ".join(map(str, others[:_MOST_REASONS]))
            more = ", ..." if len(others) > _MOST_REASONS else ""
            url = self._site.config.storage.persist_dir or ""
            say(
                f"{url} also holds checkpoints of other runs, which stay until you delete them: iterations "
                f"{shown}{more}"
            )

    def say_incomparable(self, where: str, names: Sequence[str]) -> None:
        """Print, once for each place, the settings that could not be compared with those of its state."""
        if names and self._site.rank == 0 and where not in self._incomparable:
            warn(
                f"{where} was written by another version, which noted other settings. These are not "
                f"compared, but must be the same for an exact recovery: {some_of(names, _MOST_REASONS)}"
            )
        self._incomparable.add(where)

    def say_changed(self, changes: Sequence[str]) -> None:
        """Print, once, the flags of the training script that have changed since a state was written."""
        if changes and self._site.rank == 0 and not self._has_said_changes:
            warn(
                "flags of the training script have changed. If they decide data or loss, the run is "
                f"no longer equal to an undisturbed one: {some_of(changes, _MOST_REASONS)}"
            )
        self._has_said_changes = self._has_said_changes or bool(changes)

    def say_other_data(self, differences: Sequence[str]) -> None:
        """Print, once, what is read now and was not when a state was written."""
        if differences and self._site.rank == 0 and not self._has_said_data:
            warn(f"continuing with other data: {some_of(differences, _MOST_REASONS, '; ')}")
        self._has_said_data = self._has_said_data or bool(differences)

    def check_is_empty(
        self, inventory: Inventory, plans: Sequence[Plan], problems: Sequence[str]
    ) -> None:
        """Raise unless there is nothing to continue from, and the flags allow that.

        Args:
            plans: all plans, whatever the flags ask for.

        Raises:
            UnrecoverableError: with the reasons for which what was found is not used.
        """
        reasons = "; ".join(problems[:_MOST_REASONS]) or "it is empty"
        if self._wish.only_iteration is not None:
            there = sorted({plan.iteration for plan in plans})
            found = ", ".join(map(str, there)) if there else "none"
            rejected = f"Rejected: {reasons}. " if problems else ""
            raise UnrecoverableError(
                f"--moe-ft-recover-from={self._wish.recover_from} cannot be used. Complete in "
                f"{self._looked_at}: {found}. {rejected}Name one of them, or auto. {_IGNORING}"
            )
        self._check_strategy(inventory)
        if inventory.is_unreadable or inventory.has_state or plans:
            raise UnrecoverableError(
                f"there is state of this job in {self._looked_at}, and none of it can be used: {reasons}. "
                f"Make it usable (bring back the nodes, the files, or the version that wrote it). {_IGNORING}"
            )
        if problems and self._site.rank == 0:
            say(f"nothing to recover from was found in {self._looked_at}:")
            _tell_all(say, problems)
        if self._site.config.recovery.on_missing == "fail":
            raise UnrecoverableError(
                f"--moe-ft-on-missing=fail: nothing to recover from in {self._looked_at}: {reasons}. Use "
                "--moe-ft-on-missing start to begin from --load or afresh."
            )

    def _check_strategy(self, inventory: Inventory) -> None:
        """Raise UnrecoverableError if state that was found may be usable with the strategy that wrote it."""
        ours = self._site.config.strategy.strategy
        for where, identity in inventory.identities:
            if identity.strategy != ours and identity.lineage in inventory.lineages:
                raise UnrecoverableError(
                    f"--moe-ft-strategy={ours} cannot continue from {where}, which was written with "
                    f"{identity.strategy}: experts may be of several iterations there, or frozen parts "
                    "missing. Start with that strategy until training ends, which saves everything, or "
                    "ignore this state with --moe-ft-recover-from load."
                )


def _tell_all(tell: Callable[[str], None], reasons: Sequence[str]) -> None:
    for reason in reasons[:_MOST_REASONS]:
        tell(f"  {reason}")
    if len(reasons) > _MOST_REASONS:
        tell(f"  and {len(reasons) - _MOST_REASONS} more: the event log has all of them")
