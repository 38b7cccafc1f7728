"""A whole model that can be converted, wherever it comes from: its tensors, and reading one of them.

opening.py finds out what a source is; run_model.py, megatron_checkpoint.py and huggingface/release.py are the
kinds of sources.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from moe_ft.convert.tensors import GlobalTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronState:
    """The parts of a Megatron checkpoint that are no tensors.

    Attributes:
        common: the dictionary that all ranks load.
        rng: place and number of (pipeline, tensor) ranks, and the random numbers of each.
        modules: keys of the states of modules, which are left empty and made again.
        master: key of masters among the state of the optimizer.
    """

    common: Mapping[str, Any]
    rng: Sequence[tuple[tuple[int, int], tuple[int, int], Any]] = ()
    modules: Sequence[str] = ()
    master: str = "param"


class Model(Protocol):
    """A model in one state, which nothing changes while it is converted."""

    @property
    def place(self) -> str:
        """The folder or URL, for messages."""

    @property
    def kind(self) -> str:
        """One of `moe_ft`, `torch_dist` and `hf`."""

    @property
    def iteration(self) -> int:
        """The iteration that it is from; 0 if nobody knows."""

    @property
    def signature(self) -> str:
        """Checksum of what decides its content."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Megatron's settings of it, as a fingerprint has them."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Origin of the state and what was lost, as JSON values."""

    def tensors(self) -> Sequence[GlobalTensor]:
        """Return its tensors, ordered by unit and name.

        Raises:
            MoeFtError: if some are missing or damaged.
        """

    def read(self, tensor: GlobalTensor, kind: str) -> torch.Tensor:
        """Return a tensor on the CPU; its weights in their own type, or another kind.

        Raises:
            MoeFtError: if it is damaged, or has no such kind.
        """

    def megatron_state(self, *, with_optimizer: bool, for_ep: int | None) -> MegatronState:
        """Return what a Megatron checkpoint of it holds besides tensors."""
