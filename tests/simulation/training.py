"""The training loop of a simulated rank, as the listeners of moe_ft/loop see it.

It stands for Megatron's loop, its schedules and its optimizer. Everything else that happens to a rank when it
starts, trains, replays or leaves is the product's.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, override

import torch
import xxhash

from moe_ft.config.config import MoeFtConfig
from moe_ft.format.records import Counted
from moe_ft.launches import launch_of
from moe_ft.loop.training_loop import LoopParts, RecordSend, RunAgain, TrainingLoop
from moe_ft.planning.couplings import SharedWeights, report_couplings
from moe_ft.planning.experts import ExpertFacts
from moe_ft.recovery.borders import Borders
from moe_ft.recovery.facts import JobFacts
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.record import LoopCounters
from moe_ft.units import UnitId
from tests.simulation.active import World
from tests.simulation.links import Links, traffic_of
from tests.simulation.model import (
    NUM_MICROBATCHES,
    SAMPLES_PER_ITERATION,
    TOKENS_PER_SAMPLE,
    Model,
)
from tests.simulation.shape import Shape

COLLECTIVE_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training that the ranks of a job do."""

    shape: Shape
    iterations: int
    config: MoeFtConfig
    stop_interval: int = 0
    first: str = "seed"

    def end_after(self, iteration: int) -> int:
        if not self.stop_interval:
            return self.iterations
        return min(self.iterations, iteration + self.stop_interval)


def seed_of(first: str) -> int:
    """Return the seed that a run is started with."""
    return xxhash.xxh32_intdigest(first.encode())


class SimulatedLoop(TrainingLoop):
    """The loop of one rank. Made by all ranks.

    Attributes:
        consumed: the loop's counter of samples; where its data begin when they are built.
    """

    train_iterations = sequence_length = 0  # set for each

    def __init__(self, world: World, training: Training, rank: int) -> None:
        shape, groups, process = training.shape, world.collectives, world.process
        self._training, self._rank, self._shape = training, rank, shape
        self._world, self.consumed = world, 0
        self.train_iterations = training.iterations
        everyone = groups.new_group(process, None, COLLECTIVE_TIMEOUT_S)
        stage = shape.ranks_of(shape.stage_of(rank))
        own = groups.new_group(process, stage, COLLECTIVE_TIMEOUT_S)
        dp_cp = own
        if shape.tp > 1:
            dp_cp = groups.new_group(process, shape.dense_peers(rank), COLLECTIVE_TIMEOUT_S)
        assert everyone is not None and own is not None and dp_cp is not None
        self._everyone, self._dp_cp = everyone, dp_cp
        self._expt_dp = groups.new_group(process, shape.expert_peers(rank), COLLECTIVE_TIMEOUT_S)
        self.links = Links(world, shape, rank, COLLECTIVE_TIMEOUT_S)
        self._gather = partial(groups.exchange, own, timeout_s=COLLECTIVE_TIMEOUT_S)
        self.model = Model(shape, rank, self._gather, training.first)

    @override
    def job_facts(self, began_with: str) -> JobFacts:
        shape, training = self._shape, self._training
        has_log = training.config.memory.upstream_log
        shared = SharedWeights(num_stages=shape.stages, is_tied=False)
        pipeline = self.links.pipeline
        return JobFacts(
            launch=launch_of(os.environ),
            rank=self._rank,
            world_size=shape.num_ranks,
            stage=shape.stage_of(self._rank),
            places=shape.places(self._rank),
            groups=SimpleNamespace(dp_cp=self._dp_cp, expt_dp=self._expt_dp, pp=pipeline),
            fingerprint={
                "--seed": seed_of(training.first),
                "--num-layers": shape.num_layers,
                "--pipeline-model-parallel-size": shape.stages,
                "--tensor-model-parallel-size": shape.tp,
                "--expert-model-parallel-size": shape.ep,
                "--use-distributed-optimizer": shape.is_sharded,
            },
            replay_settings={},
            experts=ExpertFacts(
                num_experts=shape.experts,
                ep_rank=self._rank % shape.ep,
                ep_size=shape.ep,
                tokens_per_sample=TOKENS_PER_SAMPLE,
                planned_samples=training.iterations * SAMPLES_PER_ITERATION,
                samples_per_iteration=SAMPLES_PER_ITERATION,
            ),
            iteration=0,
            began_with=began_with,
            is_deterministic=True,
            timeout_s=COLLECTIVE_TIMEOUT_S,
            traffic=traffic_of(shape) if has_log else None,
            couplings=report_couplings(shared) if has_log else None,
        )

    @override
    def start_fields(self) -> dict[str, Any]:
        return {}

    @override
    def sample_counters(self, num_uncounted: int) -> dict[str, int]:
        return {}

    @override
    def samples_ahead(self) -> int:
        return SAMPLES_PER_ITERATION

    @override
    def counters(self, num_uncounted: int) -> LoopCounters:
        consumed = self.consumed + num_uncounted
        return LoopCounters(consumed_train_samples=consumed, num_microbatches=NUM_MICROBATCHES)

    @override
    def resume(self, record: Counted) -> None:
        self.consumed = record.consumed_train_samples

    @override
    def set_data_position(self, consumed_samples: int) -> None:
        self.consumed = consumed_samples

    @override
    @contextmanager
    def replaying(
        self, parts: LoopParts, parameters: Sequence[LocalParameter], borders: Borders | None
    ) -> Iterator[RunAgain]:
        self.links.player = None if borders is None else borders.player
        yield self._run_again
        self.links.player = None

    def _run_again(
        self,
        before: Counted,
        after: Counted,
        frozen: frozenset[UnitId],
        before_step: Callable[[], None],
    ) -> bool:
        model = self.model
        self.links.run(model)
        signal = model.reduce(self._gather(model.share()))
        before_step()
        if after.grad_norm is None:
            return False
        model.ready = partial(model.step, signal, float(after.grad_norm), frozen)
        model.optimizer.step_with_ready_grads()
        return True

    @override
    def open_links(self, pipeline: Any) -> None:
        self._world.collectives.exchange(pipeline, None, COLLECTIVE_TIMEOUT_S)

    @override
    @contextmanager
    def recording(self, record: RecordSend) -> Iterator[None]:
        self.links.record = record
        yield
        self.links.record = None

    @override
    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        pass

    def run_forward_backward(self) -> tuple[int, float | None]:
        """Run an iteration up to its step. Called by all ranks.

        Returns:
            The number that the gradients of this stage follow from, and their norm; None if they overflow.
        """
        model = self.model
        self.links.run(model)
        own = model.share(), model.norm_share()
        told = self._world.collectives.exchange(self._everyone, own, COLLECTIVE_TIMEOUT_S)
        shares = [each for each, _ in told]
        stage = self._shape.ranks_of(self._shape.stage_of(self._rank))
        signal = model.reduce([shares[each] for each in stage])
        if model.is_skipped(shares):
            return signal, None
        return signal, model.total_norm([each for pair in told for each in pair])


class RouterLoad:
    """Tokens of the experts, in the place of hooks on routers."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def start(self, chunks: Any, *, sums_probabilities: bool) -> None:
        """The model counts always."""

    def begin(self) -> None:
        """The model begins again in each iteration."""

    def close(self) -> None:
        """There are no hooks."""

    def counts(self) -> dict[str, Any]:
        """Return ``[expert]`` tokens of this iteration by layer name."""
        shape, model = self._model.shape, self._model
        first = shape.stage_of(model.rank) * shape.layers
        return {f"layer.{first + number}": each for number, each in enumerate(model.tokens)}

    probabilities = counts


class CapacityBoost:
    """Tokens above the capacity of experts, in the place of routers that process them."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._owed: Mapping[str, Sequence[int]] = {}

    def start(self, chunks: Any) -> None:
        """The model has no routers."""

    def begin(self) -> None:
        """Nothing is counted but the tokens of the model."""

    def use(self, owed: Mapping[str, Sequence[int]]) -> None:
        """Take what experts get from now on where they have so many tokens."""
        self._owed = dict(owed)

    def close(self) -> None:
        """Take no tokens above the capacity any more."""
        self._owed = {}

    def made_up(self) -> dict[str, Any]:
        """Return ``[expert]`` tokens above the capacity of this iteration by layer name."""
        counts = RouterLoad(self._model).counts()
        return {
            layer: torch.minimum(counts[layer] // 2, torch.tensor(owed))
            for layer, owed in self._owed.items()
        }
