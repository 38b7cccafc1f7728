"""Options of the strategy `selective`, and its selection of experts within a budget of bytes per rank.

The rule is tokens x age, or MoEtion's Algorithm 1. Everything is about the experts of one pipeline stage,
whose ranks all choose the same. A target is the memory of this node, that of peers, or storage; each has its
own count of the tokens that an expert has got since it went there.

If all experts had to wait equally many tokens (most tokens first), the mean loss would be that of round
robin. With steady rates the best periods are proportional to 1 / sqrt(rate): tokens x age leads there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, override

import numpy as np
import numpy.typing as npt

from moe_ft.config.fields import PEERS, Bounds, ConfigPart, flag_of, parse_size, setting
from moe_ft.errors import ConfigError
from moe_ft.planning.experts import Counts, ExpertLayout
from moe_ft.planning.lost_tokens import NEVER
from moe_ft.strategies.rotating import ExpertVersions, Selection

NAME = "selective"
AGE, PAPER = "age", "paper"


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveConfig(ConfigPart):
    """Selective checkpoints: how much a snapshot may hold, and which experts those are."""

    TITLE: ClassVar[str] = "strategy selective"
    PAGE: ClassVar[str] = "selective.md"
    local_budget: str = setting(
        "auto",
        "bytes of a rank in a snapshot, like 2GiB; auto = as many as can be copied while forward and "
        "backward run, and committed until the next snapshot",
        metavar="{SIZE,auto}",
    )
    remote_budget: str = setting(
        "auto",
        "bytes of a snapshot that each peer of a rank gets; auto = as many as can be sent until the next one",
        metavar="{SIZE,auto}",
        needs=(PEERS,),
    )
    selective_rule: str = setting(
        AGE,
        "which experts: those with the most tokens x age since their last save, or MoEtion's Algorithm 1 as "
        "printed",
        choices=(AGE, PAPER),
    )
    age_limit: int = setting(
        200,
        "iterations without a save after which an expert comes first, with or without tokens; not with "
        "Algorithm 1",
        metavar="N",
        bounds=Bounds(at_least=1),
        reason="an expert has an age after an iteration",
        remedy="Give a number of iterations, larger than the interval between snapshots",
        needs=(f"selective_rule={AGE}",),
    )

    @property
    def local_bytes(self) -> int | None:
        """Bytes of a snapshot, None for automatic; raises ConfigError if it is neither."""
        return self._size("local_budget")

    @property
    def remote_bytes(self) -> int | None:
        """Bytes that a peer gets of a snapshot, None for automatic; raises ConfigError if it is neither."""
        return self._size("remote_budget")

    def _size(self, name: str) -> int | None:
        text = getattr(self, name)
        return None if text == "auto" else parse_size(flag_of(name), text)

    @override
    def check(self, world_size: int) -> None:
        for name in ("local_budget", "remote_budget"):
            if self._size(name) == 0:
                raise ConfigError(
                    f"{flag_of(name)}={getattr(self, name)} must be more than 0 bytes: every snapshot holds "
                    "the state outside experts. Give more, or auto."
                )


STATE_BYTES = 12  # of Adam's state of one parameter
STAYS = 1.32  # an expert is followed until its rate is so many times below what it takes: 15 % in its period
OLD_SHARE = 4  # experts beyond the age limit take one in so many places
Order = npt.NDArray[np.int64]  # numbers of experts: layer times experts per layer, plus expert


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Need:
    """Gain of a save for each expert of a stage at one target, ``[layer, expert]``.

    Attributes:
        tokens: since the version that the target has.
        age: iterations since then.
        is_missing: whether the target has no version at all.
        is_new: whether it does not have the version that it would get.
    """

    tokens: Counts
    age: Counts
    is_missing: npt.NDArray[np.bool_]
    is_new: npt.NDArray[np.bool_]

    @classmethod
    def between(cls, at_target: ExpertVersions, offered: ExpertVersions) -> "Need":
        """Return the gain where a target gets the offered versions in the place of its own."""
        return cls(
            tokens=np.maximum(0, offered.trained - at_target.trained),
            age=np.maximum(0, offered.iterations - at_target.iterations),
            is_missing=at_target.iterations == NEVER,
            is_new=offered.iterations > at_target.iterations,
        )


class RankLoads:
    """Bytes of the experts on each rank of a stage, and what fits into a budget of each.

    Attributes:
        costs: ``[rank, number of the expert]`` bytes that a save takes there.
        has_units: ``[number of the expert]`` whether any rank saves something of it: it is trained.
        per_gradient: bytes of state for each byte of gradients.
    """

    def __init__(
        self, always: Sequence[int], costs: npt.NDArray[np.int64], gradient_bytes: int = 4
    ) -> None:
        """Take ``[rank]`` bytes that every snapshot holds, those of experts, and those of a gradient."""
        self._always = np.asarray(always, np.int64)
        self.costs = costs
        self.per_gradient = STATE_BYTES // gradient_bytes
        self.has_units = costs.any(axis=0)
        self._holders = [np.flatnonzero(costs[:, each]) for each in range(costs.shape[1])]
        positive = np.where(costs > 0, costs, np.iinfo(np.int64).max)
        self._least = positive.min(axis=1, initial=np.iinfo(np.int64).max)
        self._most = costs.max(axis=1, initial=0)

    @property
    def least_budget(self) -> int:
        """Budget with which every snapshot can hold an expert, and none holds more than its budget."""
        return int((self._always + self._most).max(initial=0))

    @property
    def least_sent(self) -> int:
        """The same where gradients are sent in the place of what every snapshot holds."""
        return int((-(-self._always // self.per_gradient) + self._most).max(initial=0))

    def as_gradients(self) -> "RankLoads":
        """Return the same with gradients in the place of all state."""
        return RankLoads(
            [*-(-self._always // self.per_gradient)], -(-self.costs // self.per_gradient)
        )

    def rooms(self, budget_bytes: int | None) -> npt.NDArray[np.int64]:
        """Return ``[rank]`` bytes that are left for experts; None for a budget without limit."""
        if budget_bytes is None:
            return np.full_like(self._always, np.iinfo(np.int64).max // 2)
        return np.asarray(budget_bytes - self._always)

    def without_place(
        self, rooms: npt.NDArray[np.int64], wanted: "RankLoads"
    ) -> npt.NDArray[np.int64]:
        """Return ``[rank]`` bytes that are left besides one expert, or all where all that is wanted fits."""
        fit_all = wanted.costs.sum(axis=1) <= rooms
        return np.where(fit_all, rooms, rooms - self._most)

    def bytes_of(self, numbers: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return ``[rank]`` bytes of some experts."""
        return np.asarray(self.costs[:, list(numbers)].sum(axis=1, dtype=np.int64))

    def old_rooms(self, rooms: npt.NDArray[np.int64], turn: int) -> npt.NDArray[np.int64]:
        """Return ``[rank]`` bytes for experts beyond the age limit: a quarter, in whole experts.

        Where a quarter is less than an expert, they get one in some turns and none in others.
        """
        most = np.maximum(1, self._most)
        places = (np.maximum(1, rooms // most) + turn % OLD_SHARE) // OLD_SHARE
        return np.asarray(np.minimum(places * most, np.maximum(rooms, most)))

    def most_on_rank(self, rank: int, budget_bytes: int) -> int:
        """Return the most experts of a rank that fit into its budget; one always does."""
        own = np.sort(self.costs[rank][self.costs[rank] > 0]).cumsum()
        room = int(self.rooms(budget_bytes)[rank])
        return min(len(own), max(1, int(np.searchsorted(own, room, "right"))))

    def fill(
        self,
        order: Order | Sequence[int],
        rooms: npt.NDArray[np.int64],
        used: npt.NDArray[np.int64],
        *,
        may_exceed: bool = True,
    ) -> list[int]:
        """Take experts in an order, each where all ranks that have a part of it have room.

        Args:
            used: ``[rank]`` bytes that are taken; those of the result are added.
            may_exceed: whether a rank takes one expert even if it has no room for any.
        """
        numbers = [*map(int, order)]
        everything = used + self.bytes_of(numbers)
        if (everything <= rooms).all():
            used[:] = everything
            return numbers
        taken = []
        for each in numbers:
            ranks = self._holders[each]
            after = used[ranks] + self.costs[ranks, each]
            fits = after <= rooms[ranks]
            if may_exceed:
                fits |= used[ranks] == 0
            if fits.all():
                used[ranks] = after
                taken.append(each)
                is_full = used + self._least > rooms
                if may_exceed:
                    is_full &= (used > 0) | (self._most == 0)
                if is_full.all():
                    break
        return taken


def by_age(need: Need, among: npt.NDArray[np.bool_]) -> Order:
    """Return experts by tokens x age since their last save; ties by age, then number."""
    tokens, age = need.tokens.ravel(), need.age.ravel()
    order = np.lexsort((-age, -tokens * age))
    return np.asarray(order[among[order]])


def oldest(need: Need, among: npt.NDArray[np.bool_]) -> Order:
    """Return experts by age, the oldest first; ties by number."""
    order = np.argsort(-need.age.ravel(), kind="stable")
    return np.asarray(order[among[order]])


def divide_quota(risk: Sequence[int], total: int, most: Sequence[int]) -> list[int]:
    """Divide experts over layers in proportion to their tokens at risk, at most so many each.

    Largest remainder; ties go to the lower layer. What a full layer cannot take goes to the others. Without
    tokens, equal parts. Source: MoEtion, Algorithm 1 (S[i]), which does not say what becomes of a remainder.
    """
    given = [0] * len(risk)
    while (rest := min(total, sum(most)) - sum(given)) > 0:
        room = [limit - has for has, limit in zip(given, most, strict=True)]
        weights = [value * (each > 0) for value, each in zip(risk, room, strict=True)]
        if not any(weights):
            weights = [int(each > 0) for each in room]
        exact = [divmod(weight * rest, sum(weights)) for weight in weights]
        parts = [min(whole, each) for (whole, _), each in zip(exact, room, strict=True)]
        left = rest - sum(whole for whole, _ in exact)
        for i in sorted(range(len(risk)), key=lambda i: -exact[i][1])[:left]:  # stable
            parts[i] += parts[i] < room[i]
        given = [has + more for has, more in zip(given, parts, strict=True)]
    return given


def by_quota(
    need: Need,
    among: npt.NDArray[np.bool_],
    loads: RankLoads,
    rooms: npt.NDArray[np.int64],
    experts: ExpertLayout,
) -> Order:
    """Return the experts that MoEtion's Algorithm 1 selects, for each expert-parallel rank by itself.

    The number of all that fit, divided over the layers by their tokens at risk; in each layer the experts
    with the most tokens since they were last saved; ties by age, then number.
    """
    shape = need.tokens.shape
    is_open = among.reshape(shape)
    group_of = np.array([experts.rank_of(each) for each in range(experts.num_experts)])
    chosen: list[int] = []
    for group in range(experts.ep_size):
        members = is_open & (group_of == group)
        own = members.ravel()
        ranks = np.flatnonzero(loads.costs[:, own].any(axis=1))
        if not len(ranks):
            continue
        mean_bytes = loads.costs[np.ix_(ranks, own)].sum() / own.sum()
        room = float(np.maximum(0, rooms[ranks]).sum(dtype=np.float64))
        total = max(1, int(min(room // mean_bytes, own.sum())))
        quota = divide_quota(
            np.where(members, need.tokens, 0).sum(axis=1).tolist(),
            total,
            members.sum(axis=1).tolist(),
        )
        for layer, count in enumerate(quota):
            order = np.lexsort((-need.age[layer], -need.tokens[layer]))
            ranked = order[members[layer][order]][:count]
            chosen += (layer * shape[1] + ranked).tolist()
    return np.array(chosen, np.int64)


def by_rate(
    rates: npt.NDArray[np.int64],
    held: npt.NDArray[np.bool_],
    loads: RankLoads,
    rooms: npt.NDArray[np.int64],
    experts: ExpertLayout,
) -> Order:
    """Return the experts that peers follow by gradients, for each expert-parallel rank by itself.

    They are so many of those with the most tokens per byte that the fewest tokens are at risk on average:
    none of theirs, and (sum of sqrt(rate x bytes))^2 / 2 bytes of the others, which have the best periods
    with what is left. It pays where an expert would be sent every 5.4 iterations or more often, or 11.5 if
    gradients have 2 bytes: with r bytes of state for each of them, r + sqrt(r^2 - r).

    Args:
        rates: ``[number of the expert]`` tokens per iteration, in any unit.
        held: likewise, whether it is followed already; then it stays until another one is clearly better.
        rooms: ``[rank]`` bytes that peers get of experts in an iteration.
    """
    group_of = np.array([experts.rank_of(each) for each in range(experts.num_experts)])
    groups = np.tile(group_of, experts.num_layers)
    chosen: list[npt.NDArray[np.int64]] = []
    for group in range(experts.ep_size):
        own = np.flatnonzero((groups == group) & loads.has_units)
        ranks = np.flatnonzero(loads.costs[:, own].any(axis=1))
        state = loads.costs[np.ix_(ranks, own)].sum(axis=0)
        rate = np.where(held[own], STAYS, 1.0) * rates[own]
        order = np.lexsort((own, -rate / np.maximum(1, state)))
        # Sums in the order of the experts: all ranks get the same numbers.
        each = -(-state // loads.per_gradient), np.sqrt(rate * state), rate
        spent, roots, routed = (np.cumsum([0.0, *values[order]]) for values in each)
        left = np.maximum(0, rooms[ranks]).sum(dtype=np.float64) - spent
        num_left = len(own) - np.arange(len(left))
        is_possible = (left >= state.max(initial=0)) | ((num_left == 0) & (left >= 0))
        is_possible[0] = True
        rest = roots[-1] - roots
        lost = rest**2 / np.maximum(1, left) - (routed[-1] - routed)
        lost = np.where(is_possible, np.maximum(0, lost), np.inf)
        # One that would be sent in every iteration takes less if it is followed.
        has_none = rest[:-1] * np.sqrt(state[order]) < left[:-1] * np.sqrt(rate[order])
        lost[:-1][has_none & is_possible[1:]] = np.inf
        # If nothing is at risk either way, gradients take fewer bytes.
        count = len(lost) - 1 - int(np.argmin(lost[::-1]))
        chosen.append(own[order[:count]])
    return np.concatenate(chosen) if chosen else np.zeros(0, np.int64)


def select(
    need: Need,
    loads: RankLoads,
    rooms: npt.NDArray[np.int64],
    experts: ExpertLayout,
    rule: str,
    *,
    age_limit: int,
    turn: int,
    first: Sequence[int] = (),
) -> Selection:
    """Select the experts of a stage that a target gets, within the room that each rank has.

    Experts that the target has no version of come first. Then, by the rule `age`, those beyond the age limit,
    the oldest first, in a quarter of the room; then the others by tokens x age.

    Args:
        turn: number of the snapshot, which all ranks count alike.
        first: experts that it gets in any case, beyond this room.
    """
    among = need.is_new.ravel() & loads.has_units
    among[list(first)] = False
    used = np.zeros(len(rooms), np.int64)
    missing = among & need.is_missing.ravel()
    taken = loads.fill(oldest(need, missing), rooms, used)
    rest = among & ~missing
    if rule == PAPER:
        taken += loads.fill(by_quota(need, rest, loads, rooms - used, experts), rooms, used)
    else:
        old = rest & (need.age.ravel() > age_limit)
        old_rooms = used + loads.old_rooms(np.maximum(0, rooms - used), turn)
        old_rooms = np.where(used > 0, np.minimum(old_rooms, rooms), old_rooms)
        found = loads.fill(oldest(need, old), old_rooms, used, may_exceed=False)
        rest[found] = False
        taken += found
        taken += loads.fill(by_age(need, rest), rooms, used)
    return as_selection([*taken, *first], experts)


def as_selection(numbers: Sequence[int], experts: ExpertLayout) -> Selection:
    """Return experts by layer instead of by number."""
    chosen = np.zeros((experts.num_layers, experts.num_experts), np.bool_)
    chosen.ravel()[list(numbers)] = True
    return tuple(tuple(np.flatnonzero(layer).tolist()) for layer in chosen)
