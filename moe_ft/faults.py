"""Faults that a run can inflict on itself, parsed from KIND:RANK@ITERATION[:PHASE]; phases and sections.

Standard library only. moe_ft/loop/faults.py inflicts them; flips of bits are moe_ft/state/flips.py.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from moe_ft.errors import ConfigError


class FaultKind(StrEnum):
    """Effects of a fault on its rank."""

    KILL = "kill"  # SIGKILL: no handler runs
    EXCEPTION = "exception"  # InjectedFaultError, raised on the thread that enters the phase
    HANG = "hang"  # that thread sleeps for ever; if others wait for it, they time out
    STOP = "stop"  # SIGSTOP: no thread of the process runs
    LOSE_NODE = "lose-node"  # all ranks of its node remove the node's memory and are killed
    TERMINATE = "terminate"  # SIGTERM to all ranks on its machine: the job is ended
    FLIP = "flip"  # one bit changes in its memory, and nobody notices


class FlipTarget(StrEnum):
    """Tensors in which a fault of kind flip changes a bit. It stands in the place of a phase."""

    WEIGHTS = "weights"  # right before the module that has them runs for the first time
    GRADIENTS = "gradients"  # of a parameter, as its first backward pass returns them
    ACTIVATION = "activation"  # output of a layer in the first forward pass
    MOMENT = "moment"  # of the optimizer, before the first forward pass


class Phase(StrEnum):
    """Phases of an iteration, in the order in which a rank enters them."""

    SETUP = "setup"  # before the first iteration
    FORWARD = "forward"  # the first forward pass of the iteration begins
    BACKWARD = "backward"  # the first backward pass of the iteration begins
    BEFORE_STEP = "before-step"  # gradients are ready, no weight has changed
    IN_STEP = "in-step"  # the inner optimizer has stepped, the model weights are not yet copied
    AFTER_STEP = "after-step"  # the optimizer step is complete
    BETWEEN = "between"  # train_step has returned: logging, evaluation, stock checkpoints
    # The phases below are on other threads, in parallel with iterations. A fault strikes the first time that
    # their state is of the fault's iteration or a later one.
    SNAPSHOT = "snapshot"  # half of the units are copied to host memory
    REPLICATE = "replicate"  # half of the bytes are at the first peer
    PERSIST = "persist"  # the writer process has been told to write the state to storage
    RECOVERY = "recovery"  # half of the units are restored
    REPLAY = "replay"  # an iteration was run again up to its optimizer step


class Section(StrEnum):
    """Sections of a training loop, each with its own limit of silence (moe_ft/loop/hangs.py)."""

    SETUP = "setup"  # until the first iteration of a start, or of a repair
    ITERATION = "iteration"
    BETWEEN = "log lines"  # and whatever else comes between iterations
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoint"  # of --save
    EXIT = "exit"  # training is over


FAULT_PHASES = tuple(each for each in Phase if each not in (Phase.SETUP, Phase.BETWEEN))
# Phases that every run enters, whatever its strategy.
ITERATION_PHASES = FAULT_PHASES[:5]
BACKGROUND_PHASES = FAULT_PHASES[5:]
_FAULT = re.compile(
    r"(?P<kind>[^:@]+):(?P<rank>\d+)@(?P<iteration>\d+)(:(?P<phase>[^:@]+))?(:(?P<bit>\d+))?"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """One fault: its kind, and the rank, iteration and phase that it strikes.

    Attributes:
        target, bit: of a flip; without a bit, it is the highest of the mantissa.
    """

    kind: FaultKind
    rank: int
    iteration: int
    phase: Phase
    target: FlipTarget | None = None
    bit: int | None = None

    def is_due(self, iteration: int, phase: Phase) -> bool:
        """Return whether the fault strikes in this phase of this iteration."""
        if phase != self.phase:
            return False
        is_later = phase in BACKGROUND_PHASES and iteration > self.iteration
        return is_later or iteration == self.iteration

    def __str__(self) -> str:
        bit = "" if self.bit is None else f":{self.bit}"
        return f"{self.kind}:{self.rank}@{self.iteration}:{self.target or self.phase}{bit}"


def parse_fault(text: str) -> FaultSpec:
    """Parse ``KIND:RANK@ITERATION[:PHASE]``; the phase defaults to forward.

    Args:
        text: ``kill:3@20:backward`` kills rank 3 in the backward pass while iteration 20 runs,
            that is, while the state goes from iteration 20 to 21. ``flip:3@20:weights`` flips one bit of
            its weights in that iteration, and ``flip:3@20:weights:0`` the lowest bit of one of them.

    Raises:
        ConfigError: if the form, the kind, the phase or the target is unknown.
    """
    match = _FAULT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--moe-ft-inject-fault {text} must have the form KIND:RANK@ITERATION[:PHASE]. "
            "Write it like kill:3@20:backward."
        )
    kind, phase = match["kind"], match["phase"] or Phase.FORWARD
    if kind not in list(FaultKind):
        raise ConfigError(
            f"--moe-ft-inject-fault {text}: kind '{kind}' must be one of {', '.join(FaultKind)}. "
            "Name one of them."
        )
    if kind == FaultKind.FLIP:
        return _parse_flip(text, match)
    if match["bit"] is not None:
        raise ConfigError(
            f"--moe-ft-inject-fault {text}: bit {match['bit']} must be one of a flip. Leave it out."
        )
    if phase not in FAULT_PHASES:
        raise ConfigError(
            f"--moe-ft-inject-fault {text}: phase '{phase}' must be one of "
            f"{', '.join(FAULT_PHASES)}. Name one of them, or none for forward."
        )
    return FaultSpec(
        kind=FaultKind(kind),
        rank=int(match["rank"]),
        iteration=int(match["iteration"]),
        phase=Phase(phase),
    )


def _parse_flip(text: str, match: re.Match[str]) -> FaultSpec:
    target, iteration = match["phase"], int(match["iteration"])
    if target not in list(FlipTarget):
        raise ConfigError(
            f"--moe-ft-inject-fault {text}: the target '{target or ''}' of a flip must be one of "
            f"{', '.join(FlipTarget)}. Write it like flip:3@20:weights."
        )
    if target == FlipTarget.MOMENT and iteration == 0:
        raise ConfigError(
            f"--moe-ft-inject-fault {text}: iteration 0 must be at least 1 for a moment: there are none "
            "before the first step. Name a later iteration."
        )
    return FaultSpec(
        kind=FaultKind.FLIP,
        rank=int(match["rank"]),
        iteration=iteration,
        phase=Phase.FORWARD,
        target=FlipTarget(target),
        bit=None if match["bit"] is None else int(match["bit"]),
    )
