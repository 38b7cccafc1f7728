"""A training loop as the listeners see it: facts that they ask of it, and counters that they set in it.

Megatron's own loop and loops of other kinds are in megatron/fault_tolerance. The position of the loop, which
all listeners share, is `LoopState` in listeners.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from moe_ft.format.boundary import Direction
from moe_ft.format.records import Counted
from moe_ft.recovery.borders import Borders
from moe_ft.recovery.facts import JobFacts
from moe_ft.state.parameters import GroupPlace, LocalParameter, StatePlaces
from moe_ft.state.record import LoopCounters
from moe_ft.units import UnitId

# Runs an iteration again between the states of two records, with frozen units, and calls the last argument
# before the optimizer's step; returns False if the step was skipped. Called by all ranks that replay.
RunAgain = Callable[[Counted, Counted, frozenset[UnitId], Callable[[], None]], bool]
# Gets the global rank of the receiver, the direction, and the tensor before it is sent and may be freed.
RecordSend = Callable[[int, Direction, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """Arguments with which a training loop runs an iteration.

    Attributes:
        model: ``[chunk]``.
        forward_backward: runs forward and backward, with the arguments that it has in this loop.
        forward_step, data_iterator: of Megatron's loop.
    """

    model: Any
    optimizer: Any
    config: Any
    forward_backward: Callable[..., Any]
    forward_step: Callable[..., Any] | None = None
    data_iterator: Any = None


class TrainingLoop(ABC):
    """One training loop on one rank. Owned by the training thread.

    Attributes of the job are known when model and optimizer exist.
    """

    @property
    @abstractmethod
    def train_iterations(self) -> int | None:
        """The iteration at which training is complete; None if nothing says it."""

    @property
    @abstractmethod
    def sequence_length(self) -> int:
        """Tokens of a sample."""

    @property
    def process_groups(self) -> Any:
        """Megatron's ProcessGroupCollection of the job, once model and optimizer exist; None without."""
        return None

    def began_with(self) -> str:
        """Return what begins a run from the weights of another; empty if nothing does.

        Called before model and optimizer are built.
        """
        return ""

    def lines_on_load(self) -> list[str]:
        """Return what differs in this run from the one whose checkpoint the loop has loaded itself."""
        return []

    @abstractmethod
    def job_facts(self, began_with: str) -> JobFacts:
        """Return the facts of the job; `began_with` was called before the model was built."""

    @abstractmethod
    def start_fields(self) -> dict[str, Any]:
        """Return the layout of the job for the event "start"."""

    @abstractmethod
    def sample_counters(self, num_uncounted: int) -> dict[str, int]:
        """Return the samples consumed so far, by counter, with those that the loop has not counted yet."""

    def exit_signal(self) -> str | None:
        """Return the signal at which the loop ends as planned; empty for none, None if nobody knows."""
        return None

    def own_states(self) -> str | None:
        """Return words for the checkpoints that the loop itself writes; empty for none, None if unknown."""
        return None

    def timeout_s(self) -> float | None:
        """Return the timeout of the groups; None if nobody notes the loop's evaluations and checkpoints."""
        return None

    def is_used(self, iteration: int) -> bool:
        """Return whether the loop evaluates, saves or ends with a state before it continues to train."""
        return False

    def is_logged(self, iteration: int) -> bool:
        """Return whether the loop prints the results of an iteration."""
        return False

    def samples_ahead(self) -> int | None:
        """Return the samples of the iteration that runs, by which the scheduler steps at its end.

        None if that, or anything else of the record at its end, is not known while it runs.
        """
        return None

    def num_operations_so_far(self) -> float:
        """Return the floating-point operations of all iterations so far; 0 if nobody counts them."""
        return 0.0

    def num_operations_of(self, num_samples: int) -> float:
        """Return the floating-point operations of an iteration; 0 if nobody counts them."""
        return 0.0

    @abstractmethod
    def counters(self, num_uncounted: int) -> LoopCounters:
        """Return those of the state that an iteration has just made, with samples not counted yet."""

    @abstractmethod
    def resume(self, record: Counted) -> None:
        """Set the counters of the loop to those of a state."""

    @abstractmethod
    def set_data_position(self, consumed_samples: int) -> None:
        """Set the training samples after which the loop, or a replay in it, begins to read."""

    @abstractmethod
    def replaying(
        self, parts: LoopParts, parameters: Sequence[LocalParameter], borders: Borders | None
    ) -> AbstractContextManager[RunAgain]:
        """Return a context in which iterations can be run again; see `Replay` for what is given."""

    @abstractmethod
    def open_links(self, pipeline: Any) -> None:
        """Use the group of a pipeline once. Called by all its ranks, before some of them use it alone."""

    @abstractmethod
    def recording(self, record: RecordSend) -> AbstractContextManager[None]:
        """Return a context in which what this rank sends to other pipeline stages is recorded."""

    @abstractmethod
    def write_numbers(self, numbers: Mapping[str, float], *, iteration: int) -> None:
        """Write numbers by name, under moe-ft/, where the loop writes its own."""


def state_places(groups: Any) -> StatePlaces:
    """Return this rank's places in the groups of Megatron's ProcessGroupCollection that divide state."""

    def place(group: Any) -> GroupPlace:
        return GroupPlace(rank=group.rank(), size=group.size())

    return StatePlaces(
        dp=place(groups.dp_cp),
        expt_dp=place(groups.expt_dp),
        tp=place(groups.tp),
        expt_tp=place(groups.expt_tp),
    )
