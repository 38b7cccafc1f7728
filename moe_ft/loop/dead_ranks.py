"""Checkpoints of dead ranks, next to those of the live rank that speaks for them (engine/voices.py).

Each dead rank has checkpoints as if it were alive, with its own part of the state, its own snapshots and
replicas, and its own event log. Idle ranks, which are left of a group that has lost one, count as dead. At
each seam of the loop all of them act together, each on its thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, override

from moe_ft.engine.background import ThreadWorker
from moe_ft.engine.voices import Voices
from moe_ft.events import EventLog
from moe_ft.files.progress import awaiting
from moe_ft.loop.checkpoints import Checkpoints
from moe_ft.loop.listeners import Built, LoopListener, of_each

_CLOSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadRank:
    """A dead rank for which this process speaks.

    Attributes:
        shard: Megatron's optimizer of its part of the state.
        log: its events, which this process opens.
    """

    checkpoints: Checkpoints
    shard: Any
    log: EventLog
    worker: ThreadWorker


class Together(LoopListener):
    """Checkpoints of this rank and of the dead ranks for which it speaks. Owned by the training thread.

    Attributes:
        own: checkpoints of this rank.
    """

    begin_training = of_each(LoopListener.begin_training)
    after_recovery = of_each(LoopListener.after_recovery)
    before_batch = of_each(LoopListener.before_batch)
    begin_iteration = of_each(LoopListener.begin_iteration)
    before_step = of_each(LoopListener.before_step)
    end_iteration = of_each(LoopListener.end_iteration)
    after_iteration = of_each(LoopListener.after_iteration)
    end_training = of_each(LoopListener.end_training)
    end = of_each(LoopListener.end)

    def __init__(
        self,
        own: Checkpoints,
        dead: Mapping[int, DeadRank],
        voices: Voices,
        limit_s: float,
        tell: Callable[[], None],
    ) -> None:
        """Start the threads.

        Args:
            limit_s: for dead ranks to finish a seam after this one has.
            tell: tells idle ranks where the loop continues, once a recovery has set that.
        """
        self._tell = tell
        self.own = own
        self._dead = dead
        self._voices = voices
        self._limit_s = limit_s
        for each in dead.values():
            each.worker.start()

    def _call(self, act: Callable[[Checkpoints], None]) -> None:
        dead = {rank: partial(act, each.checkpoints) for rank, each in self._dead.items()}
        self._act(partial(act, self.own), dead)

    def _act(self, own: Callable[[], None], dead: Mapping[int, Callable[[], None]]) -> None:
        """Act on all ranks at the same time.

        Raises:
            Exception: what one of them raises; the others do not wait for it.
        """
        futures = [
            self._dead[rank].worker.submit(partial(self._guarded, act))
            for rank, act in dead.items()
        ]
        # Who watches this thread sees theirs get further, or wait for storage, while it waits for them.
        with awaiting([self._dead[rank].worker.ident for rank in dead]):
            self._guarded(own)
            for each in futures:
                each.result(self._limit_s)

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:
            self._voices.leave(error)
            raise

    @override
    def after_setup(self, built: Built) -> None:
        model, _, scheduler = built
        for each in self._dead.values():
            if self.own.log.is_open:
                each.log.start()
                each.log.incarnation = self.own.log.incarnation
        self._act(
            partial(self.own.after_setup, built),
            {
                rank: partial(each.checkpoints.after_setup, (model, each.shard, scheduler))
                for rank, each in self._dead.items()
            },
        )
        self._tell()

    @override
    def failed(self, error: Exception) -> None:
        self.own.failed(error)

    @override
    def suspend(self, iteration: int) -> None:
        """End checkpointing of this start, and the dead ranks' part for good."""
        self._call(lambda each: each.suspend(iteration))
        for each in self._dead.values():
            each.checkpoints.close()  # another process may speak for it next
        self._end()

    @override
    def close(self) -> None:
        self._call(lambda each: each.close())
        self._end()

    def _end(self) -> None:
        dead, self._dead = self._dead, {}
        for each in dead.values():
            each.worker.close(_CLOSE_S)
            each.log.close()


class Idle(LoopListener):
    """Stands in for the checkpoints of an idle rank, for which its deputy speaks.

    Its state is old. It takes part in no agreement, and continues where the others do. Owned by the training
    thread.

    Attributes:
        own: checkpoints of this rank, which are suspended.
    """

    def __init__(self, own: Checkpoints, follow: Callable[[], None]) -> None:
        self.own = own
        self._follow = follow

    @override
    def after_setup(self, built: Built) -> None:
        self._follow()
