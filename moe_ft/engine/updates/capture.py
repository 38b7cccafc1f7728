"""Gradients of the last step, kept from the step until its snapshot has been sent.

A gradient lies in Megatron's buffers until the next iteration begins, and is sent while that runs. So it is
copied once, before the optimizer steps: 4 bytes of each parameter, 2 where gradients are reduced in 16 bits.
"""

import threading
from collections.abc import Collection, Sequence

import torch

from moe_ft.engine.updates.following import LentUpdate
from moe_ft.format.updates import AdamStep, GradientSlice, Update
from moe_ft.planning.host_memory import NUM_GRADIENT_BUFFERS
from moe_ft.state.gradients import (
    gradient_bytes,
    gradients,
    has_moments,
    inverse_scales,
    is_lossy,
    is_raw,
)
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import UnitId

_FIRST = "the optimizer has not stepped before"


class _Buffer:
    """Gradients of one step. The training thread fills it, unless it is lent to the sending worker."""

    def __init__(self, num_bytes: int) -> None:
        self.data = torch.empty(num_bytes, dtype=torch.uint8).fill_(0)  # touched now
        self.is_lent = threading.Event()


class GradientCapture:
    """Keeps the gradients of the last steps. Owned by the training thread."""

    def __init__(
        self, parameters: Sequence[LocalParameter], rotating: Collection[UnitId] = ()
    ) -> None:
        """Take the parameters of a rank, whose optimizers are repeatable.

        Args:
            rotating: units of which some are followed at a time.
        """
        own = [each for each in parameters if each.optimizer is not None and each.start < each.end]
        self._parameters = sorted(own, key=is_raw)  # fp32 first, so that everything is aligned
        self._is_lossy = any(map(is_lossy, own))
        self._rotating = frozenset(rotating)
        self._followed: Collection[UnitId] | None = None
        self._chosen: list[LocalParameter] = []  # that are followed
        self._names: tuple[str, ...] = ()  # of the units among them that rotate
        self._buffers: list[_Buffer] = []
        self._scales: dict[int, float] = {}
        # The states to which the last reduced gradients were to lead, and the last step.
        self._reduced: int | None = None
        self._tried: int | None = None
        self._captured: tuple[Update, _Buffer] | None = None
        self._reason = ""

    def start(self) -> None:
        """Reserve the memory."""
        num_bytes = sum(map(gradient_bytes, self._parameters))
        self._buffers = [_Buffer(num_bytes) for _ in range(NUM_GRADIENT_BUFFERS)]

    def note_reduced(self, iteration: int, followed: Collection[UnitId] = ()) -> None:
        """Note the loss scale of the step to an iteration, before `prepare_grads` sets the next one.

        Args:
            followed: of the rotating units.
        """
        self._reduced = iteration
        self._scales = inverse_scales(self._parameters)
        if followed != self._followed:
            self._followed = followed
            left_out = self._rotating.difference(followed)
            self._chosen = [each for each in self._parameters if each.unit not in left_out]
            held = {each.unit for each in self._chosen} & self._rotating
            self._names = tuple(sorted(map(str, held)))

    def capture(self, iteration: int, grad_norm: float | None) -> None:
        """Copy the gradients of the step that leads to an iteration; the optimizer steps next."""
        self._tried = iteration
        self._captured = None
        self._reason = "gradients were not kept"
        buffer = next((each for each in self._buffers if not each.is_lent.is_set()), None)
        if buffer is None:
            self._reason = "older gradients are still being sent"
            return
        steps: dict[int, tuple[int, AdamStep]] = {}
        slices, at, data = [], 0, buffer.data
        try:
            for local, tensor, step in gradients(self._chosen, self._scales, grad_norm):
                end = at + tensor.nbytes
                data[at:end].view(tensor.dtype).copy_(tensor)
                at = end
                number, _ = steps.setdefault(id(step), (len(steps), step))
                slices.append(GradientSlice(local.name, local.start, local.end, number))
        except KeyError:
            self._reason = _FIRST
            return
        made = tuple(step for _, step in steps.values())
        update = Update(iteration - 1, made, tuple(slices), self._names, self._is_lossy)
        self._captured = update, buffer

    def lend(self, iteration: int) -> LentUpdate:
        """Return the step that has led to an iteration; a step that was skipped has changed nothing."""
        if self._tried == self._reduced == iteration:
            if self._captured is None:
                return LentUpdate(update=None, reason=self._reason)
            update, buffer = self._captured
            buffer.is_lent.set()
            content = memoryview(buffer.data.numpy())[: update.num_bytes]
            return LentUpdate(update=update, gradients=content, is_lent=buffer.is_lent)
        if self._reduced != iteration:
            return LentUpdate(update=None, reason="its step was not made in this start")
        if not has_moments(self._chosen):
            return LentUpdate(update=None, reason=_FIRST)
        skipped = Update(iteration - 1, units=self._names, is_lossy=self._is_lossy)
        return LentUpdate(update=skipped)
