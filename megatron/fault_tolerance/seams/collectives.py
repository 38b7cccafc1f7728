"""Collectives that are answered by something else than the ranks of their group: who answers, and with what.

    layer     while                                     answers
    REPLAY    some ranks run iterations again alone     numbers of the record; refuses what reaches others
    REPAIR    the optimizer of a replacement is built   what the others have gathered, from the job's store
              the timeout of the groups is changed      nothing: each rank does it in its second iteration
    PLAN      a job is planned                          one rank: all are as if like it

stack.py has the order. An answer gets a `Call`. It answers the call or runs it, which asks the next layer and
at last torch. Groups of a replacement, and of a plan, have fake backends, which exchange nothing.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import COLLECTIVES, Layer, Layers

_GATHER = "all_gather_object"


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a collective.

    Attributes:
        group: never None: the group of all ranks is the default.
        given: other arguments by the name of their parameter.
        run: does what lies below, and returns its result.
    """

    name: str
    group: Any
    given: dict[str, Any]
    run: Callable[[], Any]

    @property
    def ranks(self) -> list[int]:
        """Ranks of the group in the job."""
        return dist.get_process_group_ranks(self.group)

    def __str__(self) -> str:
        return f"torch.distributed.{self.name} of ranks {self.ranks}"


Answer = Callable[[Call], Any]


class EndedWork:
    """Handle of an operation that has ended."""

    def wait(self, *_: Any) -> bool:
        """Return at once."""
        return True


@contextmanager
def answering(layer: Layer, answer: Answer, names: Sequence[str] = COLLECTIVES) -> Iterator[None]:
    """Have a layer answer collectives in this context."""
    with Layers().put(layer, {name: partial(_ask, name, answer) for name in names}):
        yield


def _ask(name: str, answer: Answer, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = dict(inspect.signature(original).bind(*args, **kwargs).arguments)
    group = given.pop("group", None) or dist.group.WORLD
    return answer(Call(name, group, given, partial(original, *args, **kwargs)))


def recording(layer: Layer, keep: Callable[[list[Any]], None]) -> AbstractContextManager[None]:
    """Have objects kept in a context that all ranks gather."""

    def answer(call: Call) -> None:
        call.run()
        if call.group == dist.group.WORLD:
            keep(list(call.given["object_list"]))

    return answering(layer, answer, [_GATHER])


def recorded(layer: Layer, kept: Iterator[list[Any]]) -> AbstractContextManager[None]:
    """Have objects that all ranks would gather answered in a context by those that were kept."""

    def answer(call: Call) -> None:
        if call.group == dist.group.WORLD:
            call.given["object_list"][:] = next(kept)
        else:
            call.run()

    return answering(layer, answer, [_GATHER])


@contextmanager
def fake_world(args: Any) -> Iterator[None]:
    """Have Megatron make groups whose backends exchange nothing: the other ranks need not exist."""
    with Patches() as patches:
        patches.set(args, "fake_process_group", True)
        yield


def alone() -> AbstractContextManager[None]:
    """Have sums and gathers of a fake world answered in a context as if all ranks were like this one."""

    def answer(call: Call) -> None:
        if call.name == _GATHER:
            values = call.given["object_list"]
            values[:] = [call.given["obj"]] * len(values)

    return answering(Layer.PLAN, answer, ["all_reduce", _GATHER])
