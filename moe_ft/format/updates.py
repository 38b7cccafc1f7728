"""Optimizer steps in place of state: what a peer needs to make a version of a replica from the one before.

The gradients themselves follow as raw bytes, slice after slice. Reading them is state/gradients.py, keeping
them until they are sent engine/updates/capture.py, repeating the step engine/updates/adam.py.
"""

from typing import Annotated

import msgspec

from moe_ft.errors import CorruptStateError
from moe_ft.format.packings import DTYPE_BYTES
from moe_ft.format.records import Count

_GradientType = Annotated[str, msgspec.Meta(pattern="^(F32|BF16|F16)$")]


class AdamStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers of one step of Adam, of parameters that share them.

    Attributes:
        is_decoupled: whether weight decay acts on the weights (AdamW), not on the gradient.
        number: of the step, from 1.
        dtype: of the gradients that are sent, as safetensors names it.
        factors: by which these are multiplied in fp32, one after the other, to be what the optimizer gets:
            the inverse of the loss scale, the factor of clipping.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    is_decoupled: bool
    number: Annotated[float, msgspec.Meta(ge=1)]
    dtype: _GradientType = "F32"
    factors: tuple[float, ...] = ()


class GradientSlice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Flat range of a parameter that a step changes, in elements; `step` is its number in the update."""

    parameter: str
    start: Count
    end: Count
    step: Count


class Update(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Step from the state of one iteration to the next. Without slices it was skipped: nothing changed.

    Attributes:
        base_iteration: of the state that the step begins with.
        slices: in the order of the gradients that follow.
        units: names of the units in slots that it makes, besides the region.
        is_lossy: whether the owner's optimizer rounds otherwise than the one that repeats it.
        checksum: of the gradients, if it is lossy: the owner's checksums of state then prove nothing.
    """

    base_iteration: Count
    steps: tuple[AdamStep, ...] = ()
    slices: tuple[GradientSlice, ...] = ()
    units: tuple[str, ...] = ()
    is_lossy: bool = False
    checksum: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(
            (each.end - each.start) * DTYPE_BYTES[self.steps[each.step].dtype]
            for each in self.slices
        )


_DECODER = msgspec.json.Decoder(Update)


def encode_update(update: Update) -> bytes:
    """Return an update as it is sent, without its gradients."""
    return msgspec.json.encode(update)


def decode_update(content: bytes | bytearray) -> Update:
    """Return an update; raises CorruptStateError if it has another form, or a slice no step."""
    try:
        update = _DECODER.decode(content)
    except ValueError as error:
        raise CorruptStateError(f"an update is malformed: {error}") from error
    if any(each.step >= len(update.steps) or each.end < each.start for each in update.slices):
        raise CorruptStateError("an update has a slice without a step or an end")
    return update
