"""The whole state of a job, put together from what its ranks have, and what training makes of it.

It is the judge's own: nothing of the product takes part, and ranks are asked for their arrays, not for files.
So a start in another layout can be compared with a training that goes on in that layout from the whole state
which the ranks of the layout before had at that iteration.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import numpy as np
import xxhash

from tests.simulation.model import (
    NUM_MICROBATCHES,
    SAMPLES_PER_ITERATION,
    Counters,
    Held,
    Model,
)
from tests.simulation.shape import Shape
from tests.simulation.training import seed_of

Values = tuple[np.ndarray | None, ...]  # of a whole parameter: masters, then moments
_SEEDS_APART = 1_000_003  # of two iterations, as the documentation says
_TRAJECTORIES = 64  # kept


def put_together(held: Iterable[Held]) -> dict[str, Values]:
    """Return the parameters all of whose elements are there, and the same in all ranks that have them."""
    found: dict[str, list[np.ndarray | None]] = {}
    seen: dict[str, np.ndarray] = {}
    broken = set()
    for each in held:
        name, size = each.weight.name, prod(each.weight.whole)
        if name not in found:
            found[name] = [
                None if part is None else np.zeros(size, part.dtype) for part in each.values
            ]
            seen[name] = np.zeros(size, dtype=bool)
        again = each.indices[seen[name][each.indices]]
        known = np.isin(each.indices, again)
        for whole, part in zip(found[name], each.values, strict=True):
            if (whole is None) != (part is None):
                broken.add(name)
            elif whole is not None and part is not None:
                if whole[again].tobytes() != part[known].tobytes():
                    broken.add(name)
                whole[each.indices] = part
        seen[name][each.indices] = True
    return {
        name: tuple(values)
        for name, values in found.items()
        if seen[name].all() and name not in broken
    }


def bits_of(values: Values) -> str:
    """Return a checksum of a whole parameter."""
    state = xxhash.xxh3_64()
    for each in values:
        state.update(b"-" if each is None else each)
    return str(state.hexdigest())


@dataclass(frozen=True, eq=False)
class Whole:
    """The state of a job, but for random numbers.

    Attributes:
        biases: by layer of the model.
    """

    iteration: int
    values: dict[str, Values]
    biases: dict[int, np.ndarray]
    counters: Counters

    @cached_property
    def _key(self) -> str:
        state = xxhash.xxh3_128(struct.pack("<q", self.iteration))
        for name in sorted(self.values):
            state.update((name + bits_of(self.values[name])).encode())
        state.update(self.rest.encode())
        return str(state.hexdigest())

    @property
    def rest(self) -> str:
        """Checksum of everything that no expert has."""
        state = xxhash.xxh3_64(struct.pack("<3Qd", *self.counters))
        for layer in sorted(self.biases):
            state.update(self.biases[layer])
        for name in sorted(self.values):
            if ".expert." not in name:
                state.update((name + bits_of(self.values[name])).encode())
        return str(state.hexdigest())

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Whole) and self._key == other._key


def whole_of(iteration: int, exports: Sequence[Any]) -> Whole:
    """Return the whole state of ranks that have all finished an iteration."""
    biases = {layer: each for export in exports for layer, each in export.biases.items()}
    values = put_together(held for export in exports for held in export.held)
    return Whole(iteration, values, biases, exports[0].counters)


@dataclass(eq=False, kw_only=True)
class Trajectory:
    """Training without checkpoints or failures, from a fresh model or a whole state on.

    Attributes:
        digests: ``[rank]`` by iteration.
        wholes: by iteration, if they are kept.
    """

    shape: Shape
    digests: tuple[dict[int, str], ...]
    wholes: dict[int, Whole] = field(default_factory=dict)


def seeded_draws(first: str, iteration: int, stage: int) -> int:
    """Return the random numbers with which a rank goes on in another layout."""
    return draws_of((seed_of(first) + _SEEDS_APART * iteration) % (1 << 31) + 100 * stage)


def draws_of(seed: int) -> int:
    """Return the random numbers that follow from a seed."""
    return int(xxhash.xxh64_intdigest(f"seed {seed}".encode()))


@lru_cache(_TRAJECTORIES)
def undisturbed(
    shape: Shape,
    iterations: int,
    first: str,
    *,
    begin: Whole | None = None,
    keeps_wholes: bool = False,
) -> Trajectory:
    """Return the training of a job without checkpoints or failures.

    Args:
        begin: of a job in another layout, that this one goes on with.
        keeps_wholes: whether whole states are kept.
    """
    models: list[Model] = []

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(_: Any) -> list[Any]:
            return [models[each].own_weights() for each in shape.ranks_of(shape.stage_of(rank))]

        return gather

    models += [Model(shape, rank, gather_of(rank), first) for rank in range(shape.num_ranks)]
    at = 0 if begin is None else begin.iteration
    if begin is not None:
        for model in models:
            draws = seeded_draws(first, at, shape.stage_of(model.rank))
            model.begin_with(begin.values, begin.biases, begin.counters, draws)
        for model in models:
            model.sync()
    found = Trajectory(shape=shape, digests=tuple({} for _ in models))
    for iteration in range(at, iterations + 1):
        for digests, model in zip(found.digests, models, strict=True):
            digests[iteration] = model.digest()
        if keeps_wholes:
            found.wholes[iteration] = whole_of(iteration, [each.export() for each in models])
        _iterate(models, shape)
    return found


def _iterate(models: Sequence[Model], shape: Shape) -> None:
    _run_pass(models, shape)
    shares = [model.share() for model in models]
    norms = [model.norm_share() for model in models]
    signals = [
        model.reduce([shares[each] for each in shape.ranks_of(shape.stage_of(model.rank))])
        for model in models
    ]
    told = [each for pair in zip(shares, norms, strict=True) for each in pair]
    norm = models[0].total_norm(told)
    if not models[0].is_skipped(shares):
        for model, signal in zip(models, signals, strict=True):
            model.step(signal, norm)
            model.refresh()
        for model in models:
            model.sync()
            model.scheduler.step(SAMPLES_PER_ITERATION)


def _run_pass(models: Sequence[Model], shape: Shape) -> None:
    """Run forward and backward of all ranks, without links."""
    for model in models:
        model.begin_pass()
    for number in range(shape.width):
        pipeline = models[number :: shape.width]
        for stages in (pipeline, pipeline[::-1]):
            for _ in range(NUM_MICROBATCHES):
                received = b""
                for model in stages:
                    received = model.compute(received)


class Truth:
    """Trainings that the starts of a job may be part of, found by the states that ranks begin with."""

    def __init__(self, iterations: int, first: str, *, keeps_wholes: bool) -> None:
        self._iterations, self._first, self._keeps_wholes = iterations, first, keeps_wholes
        self._known: list[Trajectory] = []

    def follow(self, shape: Shape, iteration: int, digests: dict[int, str]) -> Trajectory | None:
        """Return the training that ranks continue; None if their state is in none.

        Args:
            iteration: that the start has recovered.
            digests: by rank, of that state; not of all ranks if some have died.
        """
        for each in self._candidates(shape, iteration):
            if all(each.digests[rank].get(iteration) == own for rank, own in digests.items()):
                self._known = [each, *(other for other in self._known if other is not each)]
                return each
        return None

    def _candidates(self, shape: Shape, iteration: int) -> Iterator[Trajectory]:
        keeps = self._keeps_wholes
        yield undisturbed(shape, self._iterations, self._first, keeps_wholes=keeps)
        for each in self._known:
            if each.shape == shape:
                yield each
            elif iteration in each.wholes:
                yield undisturbed(
                    shape,
                    self._iterations,
                    self._first,
                    begin=each.wholes[iteration],
                    keeps_wholes=True,
                )
