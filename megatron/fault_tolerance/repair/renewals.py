"""Buffers and communicators of libraries, made from process groups: which of them a repair makes again.

New backends under a group (swap.py) do not reach what a library has made from the old ones: memory of peers
that it has mapped, queue pairs, communicators of its own. Each row says what the flags make a job hold, where
Megatron keeps it, and how it is made again, or why that cannot be done. rules.py refuses the latter.

Kernels of these libraries have no abort, unlike those of NCCL. A survivor whose host or device waits in one
for the dead rank is ended by watcher.py or nccl.py, and replaced as well. So when all ranks have met, no
kernel of an old buffer runs, and nobody reads its memory.

Sources: csrc/legacy/buffer.hpp and csrc/kernels/backend/nvshmem.cu of DeepEP (main); csrc/hybrid_ep of its
branch hybrid-ep; initialize_ub in Transformer Engine.
"""

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe import fused_a2a

from megatron.fault_tolerance.seams.refusals import has_graphs

_OLDER_MODULES = "cuda_graph_scope_deprecated"  # where Megatron's validation has not run
_NO_EXPERTS = {"attn", "mlp", "moe_router", "moe_preprocess"}
# Ranks of a node that DeepEP reaches over NVLink. Beyond them it uses NVSHMEM.
_NUM_NVLINK_PEERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """One thing that a library has made from a process group.

    Attributes:
        what: the flag, with its value, that makes a job hold it.
        is_used: whether a job with Megatron's arguments does.
        why_not: why it cannot be made again in a process that lives on; empty if it can.
        renew: lets go of it, so that its next use makes it again. Called by all ranks, between two rounds of
            collectives; it must wait for no other rank.
    """

    what: str
    is_used: Callable[[argparse.Namespace], bool]
    why_not: Callable[[argparse.Namespace], str] = lambda _: ""
    renew: Callable[[], None] = lambda: None


def _dispatches_with(backend: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: (
        args.moe_token_dispatcher_type == "flex" and args.moe_flex_dispatcher_backend == backend
    )


def _why_no_deepep(args: argparse.Namespace) -> str:
    """Return a reason where DeepEP uses NVSHMEM, of which a process has one world for good."""
    expert_tp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    num_ranks = expert_tp * args.expert_model_parallel_size
    if num_ranks <= _NUM_NVLINK_PEERS:
        return ""
    return (
        f"with {num_ranks} expert-parallel ranks, more than {_NUM_NVLINK_PEERS}, DeepEP uses NVSHMEM, whose "
        "world has the dead rank: nvshmem_finalize is a barrier with it, and without that a process joins no "
        "other world. HybridEP makes its connections itself (--moe-flex-dispatcher-backend hybridep)"
    )


def _why_no_graphs(args: argparse.Namespace) -> str:
    """Return a reason where captured graphs hold communicators.

    Others hold the memory of weights, gradients and inputs, which stays where it is. A replacement captures
    its own, alone, and runs without any until then.
    """
    given = args.cuda_graph_modules or getattr(args, _OLDER_MODULES, None) or ()
    modules = {getattr(each, "name", each) for each in given}
    if args.cuda_graph_impl != "transformer_engine":
        return "only graphs of layers by Transformer Engine can leave their communicators out"
    if args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1:
        return "graphs hold communicators of tensor-parallel or context-parallel ranks"
    is_flex = args.moe_token_dispatcher_type == "flex"
    if not modules or modules - _NO_EXPERTS or ("moe_preprocess" in modules and not is_flex):
        return "graphs hold the communicator of expert-parallel ranks"
    if "global_aux_loss" in args.moe_router_load_balancing_type:
        return "graphs of routers hold the communicator of data-parallel ranks"
    return ""


def _let_go_of_deepep() -> None:
    """Have the next dispatch make a buffer; keep the old one for as long as this process lives.

    Its destructor runs a barrier on the device with all ranks, also at the end of the interpreter.
    The price is its memory: what Buffer.get_dispatch_config asks for, once for each repair.
    """
    buffer: Any = fused_a2a._buffer
    if buffer is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))  # never given back
    fused_a2a._buffer = None


def _let_go_of_hybridep() -> None:
    """Have the next dispatch make a buffer. The destructor of the old one waits for its own device."""
    fused_a2a.reset_hybrid_ep_buffer()


RENEWALS = (
    Renewal(what="--cuda-graph-impl", is_used=has_graphs, why_not=_why_no_graphs),
    Renewal(
        what="--moe-flex-dispatcher-backend deepep",
        is_used=_dispatches_with("deepep"),
        why_not=_why_no_deepep,
        renew=_let_go_of_deepep,
    ),
    Renewal(
        what="--moe-flex-dispatcher-backend hybridep",
        is_used=_dispatches_with("hybridep"),
        renew=_let_go_of_hybridep,
    ),
    Renewal(
        what="--moe-flex-dispatcher-backend ncclep",
        is_used=_dispatches_with("ncclep"),
        why_not=lambda _: (
            "Transformer Engine borrows the communicator of the group, and lets go of it in ep_finalize "
            "alone, which has to come before the abort that frees the others"
        ),
    ),
    Renewal(
        what="--tp-comm-overlap",
        is_used=lambda args: bool(args.tp_comm_overlap) and args.tensor_model_parallel_size > 1,
        why_not=lambda _: (
            "user buffers of Transformer Engine map the memory of the other tensor-parallel ranks while "
            "Megatron makes its groups (initialize_ub), and a replacement is alone then"
        ),
    ),
)


def reasons(args: argparse.Namespace) -> dict[str, str]:
    """Return why what this job holds cannot be made again, by the flags that make it hold that."""
    used = (each for each in RENEWALS if each.is_used(args))
    return {each.what: why for each in used if (why := each.why_not(args))}


def renew(args: argparse.Namespace) -> None:
    """Let go of what was made from the groups of the round before. Called by all ranks, after the swap."""
    for each in RENEWALS:
        if each.is_used(args):
            each.renew()
