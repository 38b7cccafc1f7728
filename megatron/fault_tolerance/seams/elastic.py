"""Starts of an elastic job: the layout of the ranks that are there, and ranks that wait.

`fit` chooses the layout before Megatron validates its arguments: it changes the command line and the
environment, so that the ranks that train are a world of their own. Ranks that are left over never join it.
They wait until training has ended, or until the launcher starts all ranks again, because nodes have come or
gone: torchrun, or `keep` (moe_ft/cluster/law.py). moe_ft/planning/cells.py has the rule, uneven_batches.py
the batches that ranks cannot share equally.
"""

import argparse
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from megatron.fault_tolerance.seams.refusals import (
    check_refusals,
    refused_flag_with,
    refused_with,
)
from megatron.fault_tolerance.seams.settings import checked_config
from megatron.fault_tolerance.seams.uneven_batches import allow_uneven_batches
from moe_ft.cluster import job_store
from moe_ft.cluster.member import own_member
from moe_ft.cluster.store_client import JobStore
from moe_ft.config.fields import flag_of
from moe_ft.config.rules import Rule
from moe_ft.errors import ConfigError, PlanError, RepairError
from moe_ft.launches import shares_store
from moe_ft.planning.cells import Fit, fit_ranks, ranks_of_model
from moe_ft.saying import say, warn

_POLL_S = 1.0
# The launcher notices a dead rank, and starts the others again, long before.
_LEFT_ALONE_S = 60.0
# Keys of a start that tell that training has ended, and how many ranks know it.
_OVER, _HEARD = "moe_ft/elastic/over", "moe_ft/elastic/heard"
_HEARD_S = 10.0  # for ranks that wait to hear of the end
_FLAG = flag_of("elastic")
_DEPENDS = "it depends on the number of ranks which samples an iteration has"


ELASTIC_REFUSALS: tuple[Rule, ...] = (
    refused_with(
        "elastic",
        lambda args: not args.global_batch_size,
        "needs --global-batch-size",
        "Megatron's default grows with the number of ranks",
        "Give it",
    ),
    refused_flag_with("elastic", "rampup_batch_size", _DEPENDS),
    refused_flag_with("elastic", "step_batch_size_schedule", _DEPENDS),
    refused_flag_with("elastic", "decrease_batch_size_if_needed", _DEPENDS),
    refused_with(
        "elastic",
        lambda args: args.dataloader_type not in (None, "single"),
        "needs --dataloader-type single",
        _DEPENDS,
        "Give it, or leave the flag out",
    ),
    refused_flag_with(
        "elastic",
        "use_checkpoint_args",
        "layouts come from the command line and the ranks alone",
    ),
)


_waiting: tuple[int, ...] | None = None  # ranks of the launcher, once `fit` has chosen the layout


def waiting_ranks() -> tuple[int, ...]:
    """Return the ranks of the launcher that take no part."""
    return _waiting or ()


def fit(args: argparse.Namespace) -> bool:
    """Adapt the command line and the environment to the ranks that there are. Called by all ranks.

    Does not return on ranks that are left over.

    Args:
        args: as parsed; Megatron has not validated them.

    Returns:
        Whether there is something to parse again.

    Raises:
        ConfigError: if the job cannot have another number of ranks.
    """
    global _waiting
    if not getattr(args, "moe_ft_elastic", False) or _waiting is not None or not _has_sizes(args):
        return False
    check_elastic(args, os.environ)
    found = _choose(args)
    num_training = args.world_size - found.num_waiting
    _waiting = tuple(range(num_training, args.world_size))
    if args.rank == 0:
        for line in _lines(args, found):
            say(line)
    if args.rank >= num_training:
        _wait_for_end(args)
    if not _is_even(args, found):
        allow_uneven_batches()
    os.environ["WORLD_SIZE"] = str(num_training)
    sys.argv += _words(args, found)
    return True


def check_fitted(is_elastic: bool) -> None:
    """Raise ConfigError if an elastic job has made its arguments in another way than by Megatron's parser."""
    if is_elastic and _waiting is None:
        raise ConfigError(
            f"{_FLAG} is read too late: the layout is chosen where megatron.training.arguments.parse_args "
            "reads the command line. Call it through that module, or leave the flag out."
        )


def release(rank: int) -> None:
    """Tell the ranks that wait that training has ended. Called by all ranks that train, after the end."""
    num_waiting = len(waiting_ranks())
    if rank != 0 or not num_waiting:
        return
    try:
        store = _connect(_HEARD_S)
        store.set(_OVER, "1")
        deadline_s = time.monotonic() + _HEARD_S
        while store.add(_HEARD, 0) < num_waiting and time.monotonic() < deadline_s:
            time.sleep(_POLL_S / 10)
    except (RuntimeError, RepairError) as error:
        warn(f"the ranks that wait do not hear of the end, and fail in a minute: {error}")


def _has_sizes(args: argparse.Namespace) -> bool:
    """Return whether sizes are there and fit each other; the usual checks refuse others."""
    sizes = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
        args.expert_tensor_parallel_size or 1,
        args.micro_batch_size or 0,
        args.global_batch_size or 1,
    )
    experts = args.num_experts or args.expert_model_parallel_size
    return bool(min(sizes) >= 1 and experts % args.expert_model_parallel_size == 0)


def check_elastic(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Raise ConfigError if an elastic job cannot have another number of ranks, or its launcher none."""
    check_refusals(args, ELASTIC_REFUSALS)
    check_refusals(args, [_sharing(args)])
    if shares_store(environment):
        raise ConfigError(
            f"{_FLAG} needs a launcher that can start the ranks again: torchrun with --nnodes MIN:MAX, "
            "--rdzv-backend=c10d and the environment variable TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1. Set "
            "them before torchrun starts."
        )


def _choose(args: argparse.Namespace) -> Fit:
    """Return the layout of the ranks that there are; does not return if no whole model fits.

    Raises:
        ConfigError: if no whole model fits, and more ranks would be refused.
    """
    try:
        return _fit(args, args.world_size)
    except PlanError as error:
        smallest = {
            "world_size": _ranks_of_model(args, 1),
            "expert_model_parallel_size": 1,
        }
        checked_config(argparse.Namespace(**{**vars(args), **smallest}))
        _wait_for_nodes(args, str(error))


def _fit(args: argparse.Namespace, num_ranks: int) -> Fit:
    return fit_ranks(
        num_ranks,
        **_sizes(args),
        ep=args.expert_model_parallel_size,
        batch=(args.global_batch_size, args.micro_batch_size),
        is_even=bool(_why_even(args)),
        num_experts=(args.num_experts or 0) * args.moe_ft_min_replicas,
        num_slots=args.moe_ft_expert_slots,
    )


def _sizes(args: argparse.Namespace) -> dict[str, int]:
    tp = args.tensor_model_parallel_size
    return {
        "num_stages": args.pipeline_model_parallel_size,
        "tensor_ranks": tp,
        "context_ranks": args.context_parallel_size,
        "expert_ranks": args.expert_tensor_parallel_size or tp,
    }


def _ranks_of_model(args: argparse.Namespace, ep: int) -> int:
    return ranks_of_model(**_sizes(args), ep=ep)


def _sharing(args: argparse.Namespace) -> Rule:
    """Return the rule that some number of ranks can share the batch: the most that can, if any."""
    whole = ranks_of_model(**{**_sizes(args), "num_stages": 1})
    readers = whole // (args.tensor_model_parallel_size * args.context_parallel_size)
    why = _why_even(args)
    least, shares = readers, "a sample for each of"
    if why:
        least, shares = readers * args.micro_batch_size, "equal shares of whole micro-batches for"

    def is_never_shared(args: argparse.Namespace) -> bool:
        with suppress(PlanError):
            _fit(args, args.global_batch_size // least * _ranks_of_model(args, 1))
            return False
        return True

    return Rule(
        "global_batch_size",
        "--global-batch-size",
        is_never_shared,
        f"a whole model needs {shares} its {readers} data-parallel ranks"
        + (f" {why}" if why else ""),
        f"Give a multiple of {least}" + (", or change what needs equal shares" if why else ""),
        problem=f"with {_FLAG} fits no number of ranks",
    )


def _why_even(args: argparse.Namespace) -> str:
    """Return why ranks must share a batch equally; empty if they need not."""
    if not args.calculate_per_token_loss:
        return "without --calculate-per-token-loss"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
    ):
        if (size := getattr(args, name)) > 1:  # tensors that ranks exchange have one size
            return f"with --{name.replace('_', '-')} {size}"
    expert_ranks = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or 1)
    if expert_ranks > 1 or args.moe_ft_expert_slots:
        # Only the lengths of an all-to-all are told to the other ranks.
        if (dispatcher := args.moe_token_dispatcher_type) != "alltoall":
            return f"with --moe-token-dispatcher-type {dispatcher}"
        if args.moe_pad_expert_input_to_capacity:
            return "with --moe-pad-expert-input-to-capacity"
    if args.cuda_graph_impl not in (None, "none"):
        return f"with --cuda-graph-impl {args.cuda_graph_impl}"
    return ""


def _is_even(args: argparse.Namespace, found: Fit) -> bool:
    sizes = {size for row in found.sizes for size in row}
    return sizes == {args.micro_batch_size}


def _lines(args: argparse.Namespace, found: Fit) -> list[str]:
    """Return what a start says about its layout."""
    num, ep = args.world_size, found.ep
    num_training = num - found.num_waiting
    wanted = args.expert_model_parallel_size
    why = _why_even(args)
    share = f"share {args.global_batch_size} samples" + (f" equally ({why})" if why else "")
    lines = []
    if ep != wanted:
        cause = f"too few ranks for --expert-model-parallel-size {wanted}"
        if num >= _ranks_of_model(args, wanted):
            cause = f"ranks of --expert-model-parallel-size {wanted} cannot {share}"
        lines.append(f"{cause}: experts are on {ep} ranks each, which need memory for more of them")
    if found.num_waiting:
        is_whole = found.num_waiting >= _ranks_of_model(args, ep)
        cause = f"more whole models cannot {share}" if is_whole else "more do not make whole models"
        lines.append(
            f"{num_training} of {num} ranks train, and ranks {num_training} to {num - 1} wait: {cause}. "
            "The memory of a node whose ranks all wait is not read"
        )
    if not _is_even(args, found):
        cells = [each for row in found.sizes for each in row]
        lines.append(
            f"{args.global_batch_size} samples are {len(found.sizes)} micro-batches of "
            f"{len(found.sizes[0])} ranks, {min(cells)} to {max(cells)} samples each"
        )
    return lines


def _words(args: argparse.Namespace, found: Fit) -> list[str]:
    """Return the flags that say the layout, and a batch of evaluations that the ranks can share."""
    words = []
    if found.ep != args.expert_model_parallel_size:
        words += ["--expert-model-parallel-size", str(found.ep)]
    wanted = args.eval_global_batch_size or args.global_batch_size
    shared = (args.eval_micro_batch_size or args.micro_batch_size) * len(found.sizes[0])
    if wanted % shared:
        size = max(1, wanted // shared) * shared
        words += ["--eval-global-batch-size", str(size)]
        if args.eval_iters and args.rank == 0:
            say(
                f"evaluations read {size} samples an iteration instead of {wanted}, which do not divide"
            )
    return words


def _wait_for_nodes(args: argparse.Namespace, why: str) -> NoReturn:
    """Give the launcher time to start all ranks again, with more nodes; then fail."""
    limit_s = args.distributed_timeout_minutes * 60.0
    if args.rank == 0:
        warn(f"training waits for nodes, at most {limit_s:.0f} s: {why}")
    time.sleep(limit_s)
    say(
        f"rank {args.rank} fails: no node has come within {limit_s:.0f} s "
        f"(--distributed-timeout-minutes), and {why}"
    )
    raise SystemExit(1)


def _wait_for_end(args: argparse.Namespace) -> NoReturn:
    """Wait until training has ended, and end with it; fail if rank 0 has gone without a word."""
    say(f"rank {args.rank} waits: it takes no part in training until the ranks start again")
    with suppress(RuntimeError, RepairError):  # of a store that is gone
        timeout_s = args.distributed_timeout_minutes * 60.0
        store, member = _connect(timeout_s), own_member()
        if member is not None and member.assignment.is_watched:
            member.connect(store).note_waiting()
        while not store.check([_OVER]):
            time.sleep(_POLL_S)
        store.add(_HEARD, 1)
        raise SystemExit(0)
    time.sleep(_LEFT_ALONE_S)
    warn(f"rank {args.rank} has waited for ranks that have ended without a word")
    raise SystemExit(1)


def _connect(timeout_s: float) -> dist.Store | JobStore:
    """Return a connection to the store of the ranks that train, which rank 0 keeps, or an agent."""
    if (member := own_member()) is not None:
        return job_store.connect(os.environ, member.token, timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
