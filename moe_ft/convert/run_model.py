"""The model of a run of moe_ft, from a checkpoint on storage or from memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_ft.convert.assembly import read_tensor
from moe_ft.convert.common_state import common_state, rng_states, uses_distributed_optimizer
from moe_ft.convert.model import MegatronState
from moe_ft.convert.source import Source
from moe_ft.convert.tensors import GlobalTensor, find_tensors
from moe_ft.recovery.inspect.experts import summarize_experts


@dataclass(frozen=True, slots=True, eq=False)
class RunModel:
    """The model. Used by one thread."""

    source: Source
    kind: str = "moe_ft"

    @property
    def place(self) -> str:
        """The folder or URL."""
        return self.source.place

    @property
    def iteration(self) -> int:
        """The iteration of the state."""
        return self.source.iteration

    @property
    def signature(self) -> str:
        """Checksum over everything that the source holds."""
        return self.source.signature

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run."""
        identity = self.source.identity
        return {**identity.replay_settings, **identity.fingerprint}

    @property
    def facts(self) -> Mapping[str, Any]:
        """The run, and the tokens that its experts have lost."""
        identity = self.source.identity
        facts: dict[str, Any] = {
            "iteration": self.iteration,
            "job_id": identity.job_id,
            "lineage": identity.lineage,
            "strategy": identity.strategy,
        }
        summary = summarize_experts(state.index for state in self.source.ranks)
        if summary is not None:
            facts |= {
                "lost_tokens": {layer: list(counts) for layer, counts in summary.lost.items()},
                "tokens_not_saved": {
                    layer: list(counts) for layer, counts in summary.missing.items()
                },
                "plt": summary.plt(summary.lost),
                "plt_not_saved": summary.plt(summary.missing),
            }
        return facts

    def tensors(self) -> Sequence[GlobalTensor]:
        """Return the tensors of the run."""
        return find_tensors(self.source)

    def read(self, tensor: GlobalTensor, kind: str) -> torch.Tensor:
        """Return a tensor, put together from those of the ranks."""
        return read_tensor(self.source, tensor, kind)

    def megatron_state(self, *, with_optimizer: bool, for_ep: int | None) -> MegatronState:
        """Return what the records say."""
        states = self.source.ranks
        return MegatronState(
            common=common_state(self.source, with_optimizer=with_optimizer, for_ep=for_ep),
            rng=tuple(rng_states(self.source)) if with_optimizer else (),
            modules=[key for state in states for key in state.index.model_places.objects],
            master="param" if uses_distributed_optimizer(self.source) else "fp32_param",
        )
