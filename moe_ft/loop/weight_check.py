"""Check of weights and moments (--moe-ft-check-weights), every N iterations.

Right after an optimizer step, and right before the next one, exact sums of the bits of all that this rank
holds must be equal: else its memory has changed. And ranks that must hold the same weights compare their sums
then: data-parallel copies, weights that all tensor-parallel ranks have, tied embeddings. The majority names
the rank; of two copies nobody knows which one is wrong, unless another group has one of them too.

What is summed up is moe_ft/state/rest.py. Megatron's --check-weight-hash-across-dp-replicas-interval copies
all weights to the CPU, compares with the first replica alone, and names no rank.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from moe_ft.config.fields import flag_of
from moe_ft.engine import exchange
from moe_ft.events import EventLog
from moe_ft.loop.corruption import Check, Finding, accuse
from moe_ft.loop.listeners import Built, EndedIteration, LoopListener, LoopState
from moe_ft.loop.training_loop import TrainingLoop
from moe_ft.planning.opinions import right_run
from moe_ft.saying import warn
from moe_ft.state import rest
from moe_ft.state.bit_sums import MIX
from moe_ft.state.parameters import name_in_model

_GROUPS = {
    "dp_cp": "data-parallel ranks",
    "expt_dp": "data-parallel ranks of its experts",
    "tp": "tensor-parallel ranks",
    "embd": "stages with the same embedding",
}
_MOST_CHARACTERS = 90  # of a name that all ranks exchange
Sum = tuple[int, int]  # first rank of a group, and the sum of what its ranks must all have
Sums = Mapping[int, int]  # by rank
_EXCHANGED = msgspec.json.Decoder(tuple[str, dict[str, Sum]])
_PLACE = msgspec.json.Decoder(str)


def suspects_of(sums: Sums) -> tuple[set[int], bool]:
    """Return the ranks whose sum is not that of most, and True; without a majority all ranks, and False."""
    values = [*sums.values()]
    right = right_run(values)
    if right is None:
        return {*sums}, False
    return {rank for rank, each in sums.items() if each != values[right]}, True


def accused(groups: Sequence[Sums]) -> tuple[list[int], bool]:
    """Return the ranks that explain all groups whose sums differ, and whether they alone do."""
    found = [each for sums in groups if (each := suspects_of(sums))[0]]
    decided = set[int]().union(*(ranks for ranks, is_decided in found if is_decided))
    if decided or not found:
        return sorted(decided), True
    common = set.intersection(*(ranks for ranks, _ in found))
    everyone = set[int]().union(*(ranks for ranks, _ in found))
    return sorted(common or everyone), len(common) == 1


class WeightCheck(LoopListener):
    """Sums up weights and moments, and compares. Owned by the training thread."""

    def __init__(
        self, interval: int, training: TrainingLoop, loop: LoopState, event_log: EventLog
    ) -> None:
        """Check every so many iterations; 0 for never."""
        self._interval = interval
        self._training = training
        self._loop = loop
        self._log = event_log
        self._built: Built | None = None
        self._groups: Any = None
        self._before: Mapping[str, int] | None = None  # sums after a step that was due
        self._passed: int | None = None

    def after_setup(self, built: Built) -> None:
        """Remember what holds the state; raises ConfigError if it cannot be checked."""
        if self._interval and built[1] is not None:
            rest.check_kind(built[0], built[1])
            self._built = built
            self._groups = self._training.process_groups
            if self._log.rank == 0 and (parts := rest.left_out(built[0])):
                warn(f"{flag_of('check_weights')} does not check {', or '.join(parts)}")

    def suspend(self, iteration: int) -> None:
        """Forget sums: a recovery changes the state."""
        self._built = self._before = None

    def end_iteration(self, ended: EndedIteration) -> None:
        """Sum up the new state, if it is due."""
        if self._built is not None and ended.iteration % self._interval == 0:
            self._before = rest.bit_sums(rest.tensors_at_rest(self._built[0], self._built[1]))

    def before_step(self) -> None:
        """Compare, if sums were taken after the step before. Called by all ranks.

        Raises:
            CorruptionError: on all ranks, if a rank has other bits than it must.
        """
        if self._built is None or self._before is None:
            return
        before, self._before = self._before, None
        model, optimizer, _ = self._built
        copies = rest.copies(model)
        now = rest.bit_sums(chain(rest.tensors_at_rest(model, optimizer), *copies.values()))
        changed = next((name for name in before if before[name] != now.get(name)), "")
        shared = {
            key: {name: now[name] for name, _ in tensors}
            for key, tensors in copies.items()
            if getattr(self._groups, key, None) is not None
        }
        own = {key: (self._ranks(key)[0], _fold(sums.values())) for key, sums in shared.items()}
        met = exchange.meet((self._place(changed), own), _EXCHANGED)
        finding = self._of_memory([name for name, _ in met])
        finding = finding or self._of_copies([sums for _, sums in met], shared)
        if finding is not None:
            accuse(self._log, self._loop, finding)
        self._passed = self._loop.iteration

    def _place(self, name: str) -> str:
        """Return a name as it is in the whole model, or its end: all ranks exchange it."""
        assert self._built is not None
        return name and name_in_model(self._built[0], name)[-_MOST_CHARACTERS:]

    def _ranks(self, key: str) -> list[int]:
        return dist.get_process_group_ranks(getattr(self._groups, key))

    def _of_memory(self, changed: Sequence[str]) -> Finding | None:
        ranks = [rank for rank, name in enumerate(changed) if name]
        if not ranks:
            return None
        return Finding(
            check=Check.AT_REST,
            ranks=ranks,
            is_decided=True,
            where=changed[ranks[0]],
            since=self._passed,
        )

    def _of_copies(
        self, met: Sequence[Mapping[str, Sum]], shared: Mapping[str, Mapping[str, int]]
    ) -> Finding | None:
        """Find who has other weights. Called by all ranks, which all know whether anybody has."""
        groups = {key: sums for key, sums in _by_group(met) if suspects_of(sums)[0]}
        if not groups:
            return None
        ranks, is_decided = accused([*groups.values()])
        shown = next(key for key, sums in groups.items() if not {*ranks}.isdisjoint(sums))
        name, first = shown
        is_in = self._log.rank in groups[shown]
        place = self._first_difference(name, shared[name]) if is_in else ""
        places = exchange.meet(self._place(place), _PLACE)
        return Finding(
            check=Check.EQUAL,
            ranks=ranks,
            is_decided=is_decided,
            where=f"{places[first]}, among {_GROUPS[name]} {', '.join(map(str, groups[shown]))}",
            since=self._passed,
        )

    def _first_difference(self, key: str, sums: Mapping[str, int]) -> str:
        """Return the first weight that differs. Called by all ranks of the group."""
        device = next(iter(self._built[0][0].parameters())).device  # type: ignore[index]
        own = torch.tensor([*sums.values()], device=device)
        others = [torch.empty_like(own) for _ in self._ranks(key)]
        dist.all_gather(others, own, group=getattr(self._groups, key))
        differs = (torch.stack(others) != own).any(0).tolist()
        return next(name for name, each in zip(sums, differs, strict=True) if each)


def _by_group(met: Sequence[Mapping[str, Sum]]) -> Iterator[tuple[tuple[str, int], dict[int, int]]]:
    """Yield the sums of each group by rank, with the group's name and first rank."""
    found: dict[tuple[str, int], dict[int, int]] = {}
    for rank, sums in enumerate(met):
        for name, (first, each) in sums.items():
            found.setdefault((name, first), {})[rank] = each
    yield from found.items()


def _fold(sums: Iterable[int]) -> int:
    return reduce(lambda found, each: (found * MIX + each) % (1 << 64), sums, 0)
