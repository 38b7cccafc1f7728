"""Choice among the plans of a recovery, as the flags of a start ask for. Pure.

planning/recovery.py makes the plans; recovery/look.py tells whether this start repeats an earlier one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from moe_ft.errors import ConfigError
from moe_ft.format.identity import History
from moe_ft.planning.branches import is_alive, known_names
from moe_ft.planning.recovery import Plan, Rejection


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """Wish of the user: the state that a start is to continue from, according to the flags.

    Attributes:
        only_iteration: the iteration that it names; None if it names none.
        is_restart: whether a launcher has started the job with these flags before.
        known_before: names of the starts that had left something before its first start.
        has_last_memory: whether the memory of the nodes is what the start before this one has left.
        loaded_iteration: iteration of the checkpoint that --load has put in place; 0 for none.
        began_with: flags with values that begin a run from another's weights, such as --finetune; empty
            without.
    """

    recover_from: str
    only_iteration: int | None
    is_restart: bool
    loaded_iteration: int
    began_with: str
    known_before: frozenset[str] = frozenset()
    has_last_memory: bool = False

    @property
    def ignores_all(self) -> bool:
        """True if no state of moe_ft is to be used."""
        return self.recover_from == "load" and not self.is_restart

    @property
    def is_choice(self) -> bool:
        """True if the user has chosen where to continue."""
        return self.recover_from != "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Plans that a start may continue from.

    Attributes:
        plans: best first.
        follows: whether they continue what an earlier start with these flags has chosen.
        prefers_load: whether --load comes before all other state of moe_ft, because it is newer.
        ignores_others: whether to ignore everything else that was found.
    """

    plans: Sequence[Plan]
    follows: bool = False
    prefers_load: bool = False
    ignores_others: bool = False


def without_left(plans: Sequence[Plan], wish: Wish) -> tuple[list[Plan], list[Rejection]]:
    """Leave out states that the user has left by naming where to continue, unless one is named now."""
    names_one = wish.only_iteration is not None and not wish.is_restart
    chosen = [start for start in plans[0].history if start.is_chosen] if plans else []
    if names_one or not chosen:
        return list(plans), []
    best, run = plans[0].version, plans[0].history
    until = run[: run.index(chosen[-1]) + 1]
    known = known_names(best.history, best.superseded)
    kept, rejected = [], []
    for plan in plans:
        history = plan.version.history
        is_of_run = chosen[-1] in history or is_alive(plan.iteration, history, until)
        if is_of_run or plan.start.name not in known:
            kept.append(plan)
        else:
            reason = (
                f"iteration {plan.iteration}: left when --moe-ft-recover-from named another one"
            )
            rejected.append(Rejection(iteration=plan.iteration, start=plan.start, reason=reason))
    return kept, rejected


def choose(
    plans: Sequence[Plan], wish: Wish, *, has_begun: bool, newest_iteration: int | None = 0
) -> Choice:
    """Return the plans that a start may use.

    --moe-ft-recover-from holds for the first start only: later ones continue what it began.

    Args:
        has_begun: whether the run that an earlier start by this launcher has chosen has had a state.
        newest_iteration: the newest that was found, usable or not; None if that is not known.

    Raises:
        ConfigError: if the flags begin a run from other weights than the run that was found.
    """
    if wish.is_restart and wish.is_choice:
        following = [plan for plan in plans if follows(plan.history, wish)]
        if following or wish.only_iteration is None:
            ignores_others = not following and not has_begun
            return Choice(plans=following, follows=bool(following), ignores_others=ignores_others)
    if wish.only_iteration is not None:
        return Choice(plans=[plan for plan in plans if plan.iteration == wish.only_iteration])
    if plans and wish.began_with and plans[0].began_with != wish.began_with:
        began = f"with {plans[0].began_with}" if plans[0].began_with else "without it"
        raise ConfigError(
            f"{wish.began_with} begins a new run, but there is already state of a run that began {began}, at "
            f"iteration {plans[0].iteration}. To continue that run leave the flag out; to begin with it add "
            "--moe-ft-recover-from load, or name another --moe-ft-job-id and --moe-ft-persist-dir."
        )
    # Plans after an older one are left out: they belong to branches that the run has left.
    newer = list(takewhile(lambda plan: plan.iteration >= wish.loaded_iteration, plans))
    is_newest = newest_iteration is not None and 0 < newest_iteration <= wish.loaded_iteration
    return Choice(plans=newer, prefers_load=len(newer) < len(plans) or (is_newest and not newer))


def follows(history: History, wish: Wish) -> bool:
    """Return whether a history is of a run that an earlier start by this launcher has chosen."""
    starts = history[:1] if wish.only_iteration is None else history
    return any(
        start.is_chosen
        and start.name not in wish.known_before
        and wish.only_iteration in (None, start.resumed_at)
        for start in starts
    )
