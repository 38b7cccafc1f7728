"""Training after which some stages go back to an earlier state and replay alone, from the logs of others.

Nothing restarts: the replay runs in the processes that have trained, while the other stages wait. The logs
are read from the files of the neighbours, as another process would read them.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import get_args, training

import pretrain_gpt_moe
from megatron.fault_tolerance.launch import pretraining
from megatron.fault_tolerance.program import forward_step
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop, pipeline_traffic
from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.engine.boundary.reading import NeighbourLog, open_log
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.format.records import IterationRecord
from moe_ft.loop import listener_order
from moe_ft.loop.checkpoints import Checkpoints
from moe_ft.loop.listeners import (
    Built,
    EndedIteration,
    Listeners,
    LoopListener,
    LoopState,
)
from moe_ft.loop.resumption import Replay
from moe_ft.loop.training_loop import LoopParts
from moe_ft.recovery.borders import Borders
from moe_ft.state import record as records
from moe_ft.state.tensors import named_buffers, named_optimizer_tensors, named_parameters
from moe_ft.units import UnitId

GOES_BACK_TO = 2  # iteration of the state
LENGTHS = (32, 16, 24, 8)  # of the micro-batches of an iteration
_DEADLINE_S = 120.0

Scopes = Sequence[Sequence[int]]


def train_with_lengths(flags: list[str]) -> None:
    """Train with sequences of several lengths. Runs on every rank."""
    _vary_lengths()
    pretrain_gpt_moe.main(flags)


def train_and_replay(folder: str, scopes: Scopes, varies: bool, flags: list[str]) -> None:
    """Train, then have stages replay. Runs on every rank.

    Args:
        folder: for the file that `replays_of` reads.
        scopes: ``[replay][stage]`` stages that go back together; links between them are live.
        varies: whether sequences have several lengths.
        flags: of the job.
    """
    if varies:
        _vary_lengths()
    iterators = _Iterators()
    make = listener_order.listeners_of

    def with_replays(*args: Any, **kwargs: Any) -> Listeners:
        listeners = make(*args, **kwargs)
        (checkpoints,) = (each for each in listeners._listeners if isinstance(each, Checkpoints))
        own = _LocalReplays(Path(folder), scopes, checkpoints, listeners.loop, iterators)
        listeners._listeners = (*listeners._listeners, own)
        return listeners

    pretraining.listeners_of = with_replays  # type: ignore[attr-defined]
    pretrain_gpt_moe.main(flags)


def replays_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return what a rank has found in each of its replays."""
    found: list[dict[str, Any]] = json.loads((folder / f"replays_{rank}.json").read_text())
    return found


def _vary_lengths() -> None:
    """Cut the batches of each stage to lengths that follow each other in the same way in every iteration."""
    read, lengths = forward_step._read_batch, itertools.cycle(LENGTHS)

    def read_part(*args: Any) -> dict[str, Any]:
        batch, length = read(*args), next(lengths)
        cut = {name: each if each is None else each[:, :length] for name, each in batch.items()}
        if cut["attention_mask"] is not None:
            cut["attention_mask"] = batch["attention_mask"][:, :, :length, :length]
        return cut

    forward_step._read_batch = read_part  # type: ignore[assignment]
    begin = Listeners.begin_training

    def begin_training(self: Listeners, parts: LoopParts) -> None:
        parts.config.variable_seq_lengths = True  # no flag of Megatron sets it for a GPT
        begin(self, parts)

    Listeners.begin_training = begin_training  # type: ignore[method-assign]


class _Iterators:
    """Makes the data iterators of the run again, from another position."""

    def __init__(self) -> None:
        self._providers: list[Any] = []
        self._build = training.build_train_valid_test_data_iterators
        training.build_train_valid_test_data_iterators = self._note

    def _note(self, provider: Any) -> Any:
        self._providers.append(provider)
        return self._build(provider)

    def again(self, consumed_samples: int) -> Any:
        """Return iterators as `train` gets them. Called by all ranks."""
        get_args().consumed_train_samples = consumed_samples
        found = [self._build(provider)[0] for provider in self._providers]
        has_chunks = get_args().virtual_pipeline_model_parallel_size is not None
        return found if has_chunks else found[0]


class _Window:
    """Iterations that are run again, each from the state that the one before has left."""

    def __init__(self, found: Sequence[IterationRecord]) -> None:
        self.records, self.num_replays = found, len(found) - 1

    def frozen_units(self, position: int) -> frozenset[UnitId]:
        return frozenset()

    def load(self, position: int) -> None:
        """Leave the state as it is."""

    def step_scheduler(self, num_samples: int) -> None:
        """Fail: every iteration has a record."""
        raise AssertionError


class _LocalReplays(LoopListener):
    def __init__(
        self,
        folder: Path,
        scopes: Scopes,
        checkpoints: Checkpoints,
        loop: LoopState,
        iterators: _Iterators,
    ) -> None:
        self._folder, self._scopes = folder, scopes
        self._checkpoints, self._loop, self._iterators = checkpoints, loop, iterators
        self._records: list[IterationRecord] = []
        self._before: dict[str, torch.Tensor] = {}
        self._is_new = False

    def after_setup(self, built: Built) -> None:
        self._built = built

    def begin_training(self, parts: LoopParts) -> None:
        self._parts = parts

    def end_iteration(self, ended: EndedIteration) -> None:
        self._is_new = ended.iteration >= GOES_BACK_TO

    def before_batch(self) -> None:
        """Take the record of the last iteration; evaluation has moved the random numbers since."""
        if not self._is_new:
            return
        self._is_new = False
        running, seam = self._checkpoints._running, self._checkpoints._seam
        assert running is not None and seam is not None
        captured = running.capture(seam.last_facts())
        running.met.live.records.complete(captured)
        self._records.append(records.encode(captured))
        if self._records[-1].iteration == GOES_BACK_TO:
            self._before = self._state()

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._live().items()}

    def _live(self) -> dict[str, torch.Tensor]:
        model, optimizer, _ = self._built
        return {
            **{f"parameter {name}": each for name, each in named_parameters(model)},
            **{f"buffer {name}": each for name, each in named_buffers(model)},
            **{
                f"optimizer {name}": each
                for name, each in named_optimizer_tensors(model, optimizer)
            },
        }

    def after_training(self) -> None:
        self.before_batch()
        log = self._checkpoints.boundary_log
        assert log is not None and log.flush(_DEADLINE_S)
        pipeline = ProcessGroupCollection.use_mpu_process_groups().pp
        stage, ranks = pipeline.rank(), dist.get_process_group_ranks(pipeline)
        logs = {rank: self._open(rank) for rank in ranks}
        stages = [0] * dist.get_world_size()
        dist.all_gather_object(stages, stage)
        after, found = self._state(), []
        for scope in self._scopes:
            iterators = self._iterators.again(self._records[0].consumed_train_samples)
            dist.barrier()
            if stage in scope:
                outside = {
                    rank: logs[rank] for other, rank in enumerate(ranks) if other not in scope
                }
                together = frozenset(rank for rank, each in enumerate(stages) if each in scope)
                player = BoundaryPlayer(ranks[stage], outside)
                self._replay(Borders(ranks=together, player=player, tail=()), iterators)
                found.append(self._compare(after, scope))
            dist.barrier()
        sent = self._sent(stage, logs[ranks[stage]])
        path = self._folder / f"replays_{dist.get_rank()}.json"
        path.write_text(json.dumps([{**each, **sent} for each in found]))

    def _open(self, rank: int) -> NeighbourLog:
        running = self._checkpoints._running
        assert running is not None
        log, problems = open_log(own_directory(running.met.site.node_dir, rank))
        assert not problems, problems
        return log

    def _replay(self, borders: Borders, iterators: Any) -> None:
        running = self._checkpoints._running
        assert running is not None
        parameters = running.met.live.parameters
        with torch.no_grad():
            for name, tensor in self._live().items():
                tensor.copy_(self._before[name])
        records.apply(self._records[0], *self._built, parameters)
        self._loop.is_replaying = True
        window: Any = _Window(self._records)
        parts = replace(self._parts, data_iterator=iterators)
        Replay(window, parameters, MegatronLoop(), lambda iteration: None, borders).run(parts)
        self._loop.is_replaying = False

    def _compare(self, after: dict[str, torch.Tensor], scope: Sequence[int]) -> dict[str, Any]:
        now = self._live()
        assert now.keys() == after.keys()
        return {
            "scope": list(scope),
            "replayed": len(self._records) - 1,
            "moved": sum(not torch.equal(after[name], self._before[name]) for name in now),
            "different": [name for name in now if not torch.equal(after[name], now[name])],
        }

    def _sent(self, stage: int, own: NeighbourLog) -> dict[str, Any]:
        """Return the sizes of the rank's own log, and what they must be."""
        traffic = pipeline_traffic(get_args())
        sizes = [
            [len(each.index.sent), sum(sent.num_bytes for sent in each.index.sent)]
            for _, each in sorted(own.items())
        ]
        return {
            "iterations": sorted(own),
            "sent": sizes,
            "computed": [traffic.num_sends(stage), traffic.sent_bytes(stage)],
        }
