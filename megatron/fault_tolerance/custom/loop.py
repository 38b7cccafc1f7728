"""A training loop that is not Megatron's own, as the listeners see it: its facts are given as plain values.

It uses `megatron.core` alone. checkpointer.py tells it where the loop is.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.custom.facts import Position, RunFacts
from megatron.fault_tolerance.custom.settings import settings_of
from megatron.fault_tolerance.seams.core_loop import CoreLoop
from moe_ft.config.flag_table import Kind
from moe_ft.format.records import Counted, IterationRecord
from moe_ft.loop.training_loop import LoopParts, state_places
from moe_ft.planning.experts import ExpertFacts
from moe_ft.recovery.facts import JobFacts
from moe_ft.state.random_states import apply_rng
from moe_ft.state.record import LoopCounters


class CustomLoop(CoreLoop):
    """A loop on `megatron.core`. Owned by the training thread."""

    def __init__(self, run: RunFacts, settings: argparse.Namespace, groups: Any) -> None:
        """Describe a loop.

        Args:
            run: facts that the loop gives.
            settings: result of `megatron_settings`.
            groups: Megatron's ProcessGroupCollection.
        """
        self._run, self._settings, self._groups = run, settings, groups
        self._record: IterationRecord | None = None
        self._position = Position(iteration=run.iteration, consumed_samples=run.consumed_samples)
        self._num_microbatches = 1
        self._first_iteration = run.iteration

    @property
    def position(self) -> Position:
        """The point where the loop is, as far as it has told."""
        return self._position

    @property
    def first_iteration(self) -> int:
        """The iteration that this start begins with."""
        return self._first_iteration

    def end_iteration(self, position: Position, num_microbatches: int) -> None:
        """Take over what the loop says of the iteration that has just ended."""
        self._position, self._num_microbatches = position, num_microbatches
        self._record = None

    def restore_random_numbers(self) -> None:
        """Put the random numbers of the recovered state back, if one was recovered."""
        if self._record is not None:
            apply_rng(self._record.rng)

    @property
    def num_experts(self) -> int:
        """`num_moe_experts` of the model."""
        return int(self._settings.num_experts)

    @property
    def train_iterations(self) -> int:
        """As given."""
        return self._run.train_iterations

    @property
    def sequence_length(self) -> int:
        """As given."""
        return self._run.sequence_length

    @property
    def iteration(self) -> int:
        """The iteration that the loop begins with, or continues from after a recovery."""
        return self._position.iteration

    def began_with(self) -> str:
        """Return what the loop has said."""
        return self._run.began_with

    def job_facts(self, began_with: str) -> JobFacts:
        """Return the facts of the job; the process groups exist."""
        run, groups = self._run, self._groups
        is_deterministic = run.is_deterministic
        if is_deterministic is None:
            is_deterministic = cpu_device.is_active() or bool(self._settings.deterministic_mode)
        state_settings = {
            **settings_of(self._settings, Kind.FINGERPRINT),
            "sequence_length": run.sequence_length,
        }
        return JobFacts(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            stage=groups.pp.rank(),
            places=state_places(groups),
            groups=groups,
            fingerprint={**state_settings, **run.settings},
            replay_settings={**settings_of(self._settings, Kind.REPLAY), **run.replay_settings},
            experts=ExpertFacts(
                num_experts=self.num_experts,
                ep_rank=groups.ep.rank(),
                ep_size=groups.ep.size(),
                tokens_per_sample=run.sequence_length * int(self._settings.moe_router_topk),
                planned_samples=run.train_iterations * run.samples_per_iteration,
                samples_per_iteration=run.samples_per_iteration,
            ),
            iteration=run.iteration,
            began_with=began_with,
            is_deterministic=is_deterministic,
            timeout_s=run.timeout_s,
        )

    def start_fields(self) -> dict[str, Any]:
        """Return the layout of the job."""
        groups = self._groups
        return {
            "world_size": dist.get_world_size(),
            "tp": groups.tp.size(),
            "pp": groups.pp.size(),
            "ep": groups.ep.size(),
            "etp": groups.expt_tp.size(),
            "dp": groups.dp.size(),
            "seq_length": self.sequence_length,
            "num_experts": self.num_experts,
            "train_iterations": self.train_iterations,
        }

    def sample_counters(self, num_uncounted: int) -> dict[str, int]:
        """Return the training samples; those of the last iteration are counted already."""
        return {"consumed_train_samples": self._position.consumed_samples}

    def counters(self, num_uncounted: int) -> LoopCounters:
        """Return what the loop has given."""
        return LoopCounters(
            consumed_train_samples=self._position.consumed_samples,
            num_microbatches=self._num_microbatches,
            loop_state=dict(self._position.state),
        )

    def resume(self, record: Counted) -> None:
        """Take over the counters of a recovered state."""
        assert isinstance(record, IterationRecord)  # stages of such a loop do not recover alone
        self._record, self._position = record, _position_of(record)
        self._first_iteration = record.iteration
        self._num_microbatches = record.num_microbatches

    def set_data_position(self, consumed_samples: int) -> None:
        """Do nothing: the loop reads its data where a `Position` says."""

    def run_forward_backward(self, parts: LoopParts, before: Counted, after: Counted) -> None:
        """Call the function that the loop has given to `recover`. Called by all ranks."""
        parts.forward_backward(_position_of(before), after.num_microbatches)

    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        """Do nothing: the event log has them."""


def _position_of(record: Counted) -> Position:
    assert isinstance(record, IterationRecord)
    return Position(
        iteration=record.iteration,
        consumed_samples=record.consumed_train_samples,
        state=record.loop_state,
        is_recovered=True,
    )
