"""Stand-in for `deep_ep`, which needs GPUs: tokens go through files in shared memory, bit for bit.

Names, signatures and the order of results follow the published source (branch hybrid-ep), as far as Megatron
calls it. So does what matters to a repair:

- a buffer is made together by all ranks of a group, and from then on has its own way to them: it does not
  notice that the backends of the group are new, and nothing that it sends reaches a buffer made later;
- a rank that waits for a peer waits for ever, and no exception or abort frees it (the kernels of DeepEP end
  after 100 s, and take the device with them);
- the destructor of `Buffer` is a barrier with all ranks, that of `HybridEPBuffer` is not.

Only GPUs show the kernels, the mapping of memory of other processes, and what a driver does with that when
one of them has died.
"""

import importlib
import os
import pickle
import sys
import time
import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

import pretrain_gpt_moe

_SHARED = Path("/dev/shm")


class _Wire:
    """Way between the ranks of a group, of one buffer."""

    def __init__(self, group: Any) -> None:
        self.rank = group.rank()
        self.size = group.size()
        names: list[Any] = [None] * self.size
        dist.all_gather_object(names, uuid.uuid4().hex, group)
        self._folder = Path(os.environ.get("DEEP_EP_FOLDER", _SHARED)) / f"deep_ep_{names[0]}"
        self._folder.mkdir(exist_ok=True)
        self._num_exchanges = 0

    def exchange(self, parts: list[Any]) -> list[Any]:
        """Return what each rank has sent to this one. Waits for all of them."""
        self._num_exchanges += 1
        for to, part in enumerate(parts):
            path = self._path(self.rank, to)
            path.with_suffix(".part").write_bytes(pickle.dumps(part))
            path.with_suffix(".part").rename(path)
        return [self._receive(self._path(each, self.rank)) for each in range(self.size)]

    def _path(self, source: int, to: int) -> Path:
        return self._folder / f"{self._num_exchanges}_{source}_{to}"

    def _receive(self, path: Path) -> Any:
        while not path.exists():
            time.sleep(0.001)
        found = pickle.loads(path.read_bytes())
        path.unlink()
        return found


class EventHandle:
    """An event of the device, which is there at once."""

    def current_stream_wait(self) -> None:
        """Wait for nothing."""


class EventOverlap:
    """An event and what it keeps."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: Any = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        assert self.event is not None
        self.event.current_stream_wait()


class Config:
    """Sizes of chunks."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """DeepEP's buffer of expert-parallel ranks, normal mode, within a node."""

    num_sms = 20

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_rdma_bytes == 0, "a stand-in for one node"
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self._wire = _Wire(group)
        self._pid = os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            self._wire.exchange([None] * self._wire.size)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        num_local = num_experts // self._wire.size
        ranks = torch.arange(self._wire.size)
        is_in_rank = (topk_idx.div(num_local, rounding_mode="floor")[:, :, None] == ranks).any(1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return is_in_rank.sum(0), None, per_expert, is_in_rank, EventOverlap(EventHandle())

    def dispatch(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        event = EventOverlap(EventHandle())
        if handle is not None:
            is_in_rank, _ = handle
            parts = [x.detach()[is_in_rank[:, to]] for to in range(self._wire.size)]
            return torch.cat(self._wire.exchange(parts)), None, None, None, None, event
        num_local = len(num_tokens_per_expert) // self._wire.size
        sent = []
        for to in range(self._wire.size):
            chosen = is_token_in_rank[:, to]
            own = topk_idx[chosen] - to * num_local
            is_own = (own >= 0) & (own < num_local)
            weights = topk_weights.detach()[chosen]
            sent.append(
                (
                    x.detach()[chosen],
                    torch.where(is_own, own, -1),
                    torch.where(is_own, weights, torch.zeros_like(weights)),
                )
            )
        received = self._wire.exchange(sent)
        tokens, indices, weights = (torch.cat(each) for each in zip(*received, strict=True))
        counts = torch.bincount(indices[indices >= 0], minlength=num_local).tolist()
        handle = (is_token_in_rank, [len(each[0]) for each in received])
        return tokens, indices, weights, counts, handle, event

    def combine(
        self,
        x: torch.Tensor,
        handle: tuple[Any, ...],
        topk_weights: torch.Tensor | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        is_in_rank, num_received = handle
        tokens = _summed(self._wire.exchange(list(x.detach().split(num_received))), is_in_rank)
        weights = None
        if topk_weights is not None:
            parts = list(topk_weights.detach().split(num_received))
            weights = _summed(self._wire.exchange(parts), is_in_rank)
        return tokens, weights, EventOverlap(EventHandle())


def _summed(parts: list[torch.Tensor], is_in_rank: torch.Tensor) -> torch.Tensor:
    """Add up what each rank has made of the tokens that were sent there, in the order of ranks."""
    total = torch.zeros(len(is_in_rank), *parts[0].shape[1:], dtype=torch.float32)
    for each, part in enumerate(parts):
        total[is_in_rank[:, each]] += part.float()
    return total.to(parts[0].dtype)


class HybridEPBuffer:
    """Buffer of DeepEP's branch hybrid-ep, which also permutes tokens by expert."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
    ) -> None:
        self._wire, self._num_local = _Wire(group), num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: Any = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
    ) -> tuple[Any, ...]:
        if handle is None:
            assert routing_map is not None
            maps = routing_map.split(self._num_local, dim=1)
        else:
            maps = handle[0]
        parts: list[Any] = []
        for own, place in zip(maps, range(self._wire.size), strict=True):
            experts, rows = own.t().nonzero(as_tuple=True)
            of_expert = experts + place * self._num_local
            chosen = None if probs is None else probs.detach()[rows, of_expert]
            parts.append((hidden.detach()[rows], chosen, experts))
        received = self._wire.exchange(parts)
        experts = torch.cat([each[2] for each in received])
        order = experts.argsort(stable=True)
        tokens = torch.cat([each[0] for each in received])[order]
        weights = None if probs is None else torch.cat([each[1] for each in received])[order]
        counts = torch.bincount(experts, minlength=self._num_local)
        if handle is None:
            handle = (maps, order, [len(each[2]) for each in received])
        return tokens, weights, None, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: tuple[Any, ...],
        pad_multiple: int | None = None,
    ) -> tuple[Any, ...]:
        maps, order, num_received = handle
        back = order.argsort()
        parts = [
            (tokens, None if probs is None else weights)
            for tokens, weights in zip(
                hidden.detach()[back].split(num_received),
                (hidden if probs is None else probs).detach()[back].split(num_received),
                strict=True,
            )
        ]
        received = self._wire.exchange(parts)
        num_tokens, width = len(maps[0]), hidden.shape[-1]
        total = torch.zeros(num_tokens, width, dtype=torch.float32)
        weights = torch.zeros(num_tokens, self._num_local * self._wire.size)
        for place, (own, (tokens, chosen)) in enumerate(zip(maps, received, strict=True)):
            experts, rows = own.t().nonzero(as_tuple=True)
            total.index_add_(0, rows, tokens.float())
            if chosen is not None:
                weights[rows, experts + place * self._num_local] = chosen.float()
        return total.to(hidden.dtype), None if probs is None else weights.to(probs.dtype)


def install() -> None:
    """Have Megatron find this module as `deep_ep`, also where it has looked for that already."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer, package.HybridEPBuffer = Buffer, HybridEPBuffer  # type: ignore[attr-defined]
    utils.EventHandle, utils.EventOverlap = EventHandle, EventOverlap  # type: ignore[attr-defined]
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    fused = importlib.import_module("megatron.core.transformer.moe.fused_a2a")
    importlib.reload(fused)
    dispatchers = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms"):
        setattr(dispatchers, name, getattr(fused, name))
    for name in ("hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(dispatchers, name, getattr(fused, name))


def train_with_flex(flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with the stand-in."""
    install()
    pretrain_gpt_moe.main(flags)
