"""Collectives of process groups some of whose members are dead, answered by the live ones.

Megatron's groups stay the objects that they are, with the sizes of the healthy job: its buffers, shards and
scales follow from them. A collective over a group with dead members runs over a group of those that live. A
dead rank's part of a buffer is its deputy's business: a reduction leaves it in the buffer of every live
rank, a gather takes it from there. A collective whose answer nobody knows raises an error.

A rank that divides tensors or experts with a dead one is *idle*: peers play the role of the whole group. It
takes part in what the whole job decides, such as the end of training, and nothing else: its weights are old
until it is given new ones.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import timers
from megatron.core.distributed import param_and_grad_buffer
from megatron.training import get_args
from torch.distributed.distributed_c10d import (
    Backend,
    _get_default_store,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
)

from megatron.fault_tolerance.seams import collectives
from megatron.fault_tolerance.seams.collectives import Call, EndedWork
from megatron.fault_tolerance.seams.megatron_loop import timeout_of_groups_s
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Layer
from moe_ft.errors import RepairError

Recording = Callable[[], AbstractContextManager[Any]]
# Megatron took these when it was imported.
_CAPTURED = (
    (param_and_grad_buffer, "dist_reduce_scatter_func", "reduce_scatter_tensor"),
    (param_and_grad_buffer, "dist_all_gather_func", "all_gather_into_tensor"),
    (timers, "dist_all_gather_func", "all_gather_into_tensor"),
)
_UNKNOWN = object()  # of what no live rank knows


class LiveGroups:
    """Groups of live ranks instead of those with dead ones. Owned by the training thread.

    Attributes:
        everyone: all live ranks of the job, also idle ones; None if there is one.
        ranks: these, ascending.
        idle: those that play no role.
    """

    def __init__(
        self,
        dead: frozenset[int],
        deputies: Mapping[int, int],
        name: str,
        recording: Recording = nullcontext,
        connect_s: float | None = None,
    ) -> None:
        """Make the groups. Called by all live ranks.

        Args:
            dead: global ranks.
            deputies: by dead or idle rank, the one of its data-parallel group that has its shard.
            name: of this loss, one that no earlier one of the job has had.
            recording: a context in which each group is made.
            connect_s: for members to connect; None for as long as an operation may take.
        """
        self._recording = recording
        self._connect_s = connect_s
        self._answers: dict[str, Callable[..., object]] = {
            "all_reduce": self._all_reduce,
            "reduce_scatter_tensor": self._reduce_scatter,
            "all_gather_into_tensor": self._all_gather,
            "all_gather_object": self._all_gather_object,
            "broadcast": self._broadcast,
            "barrier": self._barrier,
        }
        self._dead = dead
        self._deputies = deputies
        self._name = name
        self.idle = deputies.keys() - dead
        self._known: torch.Tensor | None = None
        self._num_made = 0  # for agreements
        own, made = dist.get_rank(), dict[tuple[int, ...], Any]()
        self._live: dict[Any, Any] = {}
        found = [(sorted(ranks), group) for group, ranks in _world.pg_group_ranks.items()]
        broken = [
            (ranks, group)
            for ranks, group in found
            if own in ranks and not deputies.keys().isdisjoint(ranks)
        ]
        # In one order on all ranks, or they wait for each other.
        for ranks, group in sorted(broken, key=lambda each: (len(each[0]), each[0])):
            absent = self._absent(group)
            live = tuple(rank for rank in ranks if rank not in absent) if own not in absent else ()
            if live not in made:
                made[live] = self._make(live, _world.pg_map[group][0], self._name)
            self._live[group] = made[live]
        self.everyone = self._live[dist.group.WORLD]
        self.ranks = sorted(set(range(dist.get_world_size())) - dead)

    def make_for_agreement(self, ranks: Sequence[int]) -> Any:
        """Return a new group of gloo of some live ranks; None for others. Called by all live ranks."""
        self._num_made += 1
        if dist.get_rank() not in ranks:
            return None
        return self._make(tuple(ranks), "gloo", f"{self._name}_agreement_{self._num_made}")

    def _absent(self, group: Any) -> Set[int]:
        """Return the ranks that take no part in collectives of a group."""
        return self._dead if group == dist.group.WORLD else self._deputies.keys()

    def _make(self, ranks: tuple[int, ...], backend: str, name: str) -> Any:
        """Return a new group, made by its members alone; None for one rank, or none.

        `dist.new_group` needs all ranks of the job, or as many groups in each of them.
        """
        own = dist.get_rank()
        if len(ranks) < 2:
            return None
        timeout_s = timeout_of_groups_s(get_args())
        with self._recording():
            group, _ = _new_process_group_helper(
                len(ranks),
                ranks.index(own),
                list(ranks),
                Backend(backend),
                _get_default_store(),
                f"{name}_{'_'.join(map(str, ranks))}",  # type: ignore[arg-type]
                timeout=timedelta(seconds=self._connect_s or timeout_s),
            )
        _set_pg_timeout(timedelta(seconds=timeout_s), group)
        _world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        return group

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer collectives of torch.distributed in this context."""
        with collectives.answering(Layer.ROLES, self._answer), Patches() as patches:
            for module, name, original in _CAPTURED:
                patches.set(module, name, getattr(dist, original))
            yield

    def count(self, num_tokens: torch.Tensor) -> None:
        """Sum a number of tokens over all live ranks; what else is done with it is answered with the sum.

        Megatron would send it along each pipeline, and some are broken. Called by all live ranks.
        """
        if self.everyone is not None:
            dist.all_reduce(num_tokens, group=self.everyone)
        self._known = num_tokens

    def _answer(self, call: Call) -> Any:
        if call.given.get("tensor") is self._known is not None:
            return None
        if call.group not in self._live:
            return call.run()
        answer = self._answers.get(call.name)
        given = dict(call.given)
        is_later = given.pop("async_op", False)
        if answer is None or answer(call.group, **given) is _UNKNOWN:
            raise RepairError(
                f"{call} has no answer without ranks {sorted(self._dead)}, which are dead. Start the job "
                "again, and report the model's flags"
            )
        return EndedWork() if is_later else None

    def _all_reduce(self, group: Any, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        is_mean = op == dist.ReduceOp.AVG
        if self._live[group] is not None:
            dist.all_reduce(
                tensor, op=dist.ReduceOp.SUM if is_mean else op, group=self._live[group]
            )
        if is_mean:  # deputies have the parts of the dead ones in theirs
            tensor.div_(group.size())

    def _reduce_scatter(
        self,
        group: Any,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002 - the name is torch's
        op: Any = dist.ReduceOp.SUM,
    ) -> None:
        """Reduce the whole input in place: a deputy finds the dead rank's part in its own."""
        self._all_reduce(group, input, op)
        part = input.view(-1).chunk(group.size())[group.rank()]
        if part.data_ptr() != output.data_ptr():
            output.copy_(part.view_as(output))

    def _all_gather(
        self, group: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor
    ) -> None:
        """Have each part sent by its owner, or by the deputy, whose output has it already."""
        parts = output_tensor.view(-1).chunk(group.size())
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        live = self._live[group]
        for rank, part in zip(dist.get_process_group_ranks(group), parts, strict=True):
            source = self._deputies.get(rank, rank)
            if live is not None and source in dist.get_process_group_ranks(live):
                dist.broadcast(part, src=source, group=live)

    def _all_gather_object(self, group: Any, object_list: list[Any], obj: Any) -> object:
        """Have a dead rank's value be that of its deputy."""
        ranks, live = dist.get_process_group_ranks(group), self._live[group]
        values, owners = [obj], [dist.get_rank()]
        if live is not None:
            owners = dist.get_process_group_ranks(live)
            values = [None] * len(owners)
            dist.all_gather_object(values, obj, group=live)
        found = dict(zip(owners, values, strict=True))
        absent = self._absent(group)
        speakers = [self._deputies[rank] if rank in absent else rank for rank in ranks]
        if not found.keys() >= set(speakers):
            return _UNKNOWN
        object_list[:] = [found[each] for each in speakers]
        return None

    def _broadcast(
        self,
        group: Any,
        tensor: torch.Tensor,
        src: int | None = None,
        group_src: int | None = None,
    ) -> None:
        ranks = dist.get_process_group_ranks(group)
        source = ranks[group_src] if group_src is not None else src
        absent = self._absent(group)
        if dist.get_rank() in absent:
            return
        if source in absent:
            raise RepairError(
                f"rank {source}, which broadcasts to ranks {ranks}, is dead or plays no role"
            )
        if self._live[group] is not None:
            dist.broadcast(tensor, src=source, group=self._live[group])

    def _barrier(self, group: Any, device_ids: Any = None) -> None:
        if self._live[group] is not None:
            dist.barrier(self._live[group], device_ids=device_ids)
