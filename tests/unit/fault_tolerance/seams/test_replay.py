"""Replayed iterations use what their records say, and leave the loop's settings as they were."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.enums import CudaGraphModule

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from megatron.fault_tolerance.seams.replay import can_freeze
from moe_ft.engine.boundary.player import BoundaryPlayer
from moe_ft.errors import UnrecoverableError
from moe_ft.format.records import IterationRecord, RandomStates, numbers_of
from moe_ft.loop import resumption
from moe_ft.loop.resumption import Replay
from moe_ft.loop.training_loop import LoopParts
from moe_ft.recovery.borders import Borders
from moe_ft.state.parameters import LocalParameter
from moe_ft.units import UnitId, UnitKind
from tests.unit.moe_ft.builders import make_parameter, make_record
from tests.unit.moe_ft.engine.boundary.logs import (
    NEXT,
    RANK,
    TRAFFIC,
    open_log,
    sends_of,
    small_log,
)

NORM, OUTPUT = UnitId(kind=UnitKind.FINAL_NORM), UnitId(kind=UnitKind.OUTPUT)
EXPERT = UnitId(kind=UnitKind.EXPERT, layer=0, expert=0)


class _Window:
    """A conversion whose snapshots are in place: unit OUTPUT is in the second one."""

    def __init__(self, *records: IterationRecord) -> None:
        self.records, self.num_replays = records, len(records) - 1
        self.loaded: list[int] = []

    def frozen_units(self, position: int) -> frozenset[UnitId]:
        return frozenset({OUTPUT} if position == 0 else ())

    def load(self, position: int) -> None:
        self.loaded.append(position)

    def step_scheduler(self, num_samples: int) -> None:
        """Leave the learning rates as they are."""


class _Optimizer:
    """As much of Megatron's chained optimizer as a replay uses, around one of torch's."""

    def __init__(self, parameters: list[LocalParameter]) -> None:
        self.parameters = parameters
        self.optimizer = torch.optim.SGD([each.parameter for each in parameters], lr=1.0)
        self.chained_optimizers = [self]
        self.config = Namespace(timers="timers", log_num_zeros_in_grad=True)
        self.grad_norms_by_group: dict[str, float] = {}

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def prepare_grads(self) -> bool:
        return False

    def get_grad_norm(self) -> float:
        raise AssertionError("the norm must be the logged one")

    def _compute_grad_norms_by_group(self) -> dict[str, float]:
        raise AssertionError("the norms must be the logged ones")

    def step_with_ready_grads(self) -> bool:
        self.optimizer.step()
        return True

    def step(self) -> tuple[bool, float | None, None]:
        if self.prepare_grads():
            return False, None, None
        self._compute_grad_norms_by_group()
        for each in self.parameters:
            if each.parameter.grad is not None:
                each.parameter.grad /= self.get_grad_norm()
        return self.step_with_ready_grads(), self.get_grad_norm(), None


class Loop:
    """A model of two units, each of four weights, in a loop that a replay interrupts."""

    def __init__(self, args: Namespace) -> None:
        args.check_for_nan_in_loss_and_grad = True
        self.args = args
        self.parameters = [self._parameter(unit) for unit in (NORM, OUTPUT)]
        self.ddp_config = Namespace(
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            check_for_nan_in_grad=True,
            check_for_large_grads=True,
        )
        self.config = Namespace(
            no_sync_func=1,
            grad_sync_func=2,
            param_sync_func=3,
            timers=4,
            finalize_model_grads_func=None,
            tensor_model_parallel_size=1,
            gtp_weight_remat_size=1,
            expert_gtp_weight_remat_size=1,
        )
        self.optimizer = _Optimizer(self.parameters)
        self.noted: list[int] = []
        self.computed: list[tuple[int, bool]] = []
        self.hooks: dict[str, str] = {}
        self.hooked: list[bool] = []

    def _parameter(self, unit: UnitId) -> LocalParameter:
        weight = torch.nn.Parameter(torch.ones(4))
        return make_parameter(unit, parameter=weight, master=weight)

    def forward_backward(self, *, num_microbatches: int, **options: Any) -> None:
        """Make gradients of one for every weight that is trained."""
        self.computed.append((self.args.curr_iteration, self.ddp_config.overlap_grad_reduce))
        self.hooked.append(bool(self.hooks))
        for each in self.parameters:
            if each.parameter.requires_grad:
                each.parameter.grad = torch.ones(4)

    def parts(self) -> LoopParts:
        """Return the parts that `train` would pass."""
        chunk = Namespace(
            zero_grad_buffer=lambda: None,
            ddp_config=self.ddp_config,
            bucket_groups=[],
            expert_parallel_bucket_groups=[],
            remove_forward_pre_hook_handles=self.hooks,
            disable_forward_pre_hook=lambda *, param_sync: self.hooks.clear(),
            enable_forward_pre_hook=lambda: self.hooks.update(module="handle"),
        )
        return LoopParts(
            forward_step=print,
            data_iterator=None,
            model=[chunk],
            optimizer=self.optimizer,
            config=self.config,
            forward_backward=self.forward_backward,
        )

    def replay(self, window: Any, borders: Borders | None = None) -> RandomStates:
        """Run a window again, and what follows it."""
        training, note = MegatronLoop(), self.noted.append
        return Replay(window, self.parameters, training, note, borders).run(self.parts())

    def weights(self) -> list[float]:
        """Return one weight of each unit."""
        return [float(each.parameter.detach()[0]) for each in self.parameters]


@pytest.fixture
def loop(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Loop:
    loop_args.decoder_seq_length = None
    monkeypatch.setattr(resumption, "apply_rng", lambda states: None)
    monkeypatch.setattr(resumption, "current_rng", lambda: {"drawn": "by the replay"})
    return Loop(loop_args)


def record_of(iteration: int, **changes: Any) -> IterationRecord:
    return msgspec.structs.replace(make_record(iteration), **changes)


def test_frozen_unit_stays_and_the_others_use_the_logged_norm(loop: Loop) -> None:
    window = _Window(record_of(3), record_of(4, grad_norm=4.0))
    loop.replay(window)
    assert loop.weights() == [0.75, 1.0]
    assert window.loaded == [1]
    assert loop.noted == [3]
    assert loop.optimizer.grad_norms_by_group == {"mtp": float("inf")}


def test_step_that_was_skipped_is_skipped_again(loop: Loop) -> None:
    loop.replay(_Window(record_of(3), record_of(4, grad_norm=None)))
    assert loop.weights() == [1.0, 1.0]


def test_overlap_and_checks_are_off_during_the_replay_only(loop: Loop) -> None:
    before = [dict(vars(each)) for each in (loop.ddp_config, loop.config, loop.optimizer.config)]
    loop.replay(_Window(record_of(3), record_of(4)))
    after = [dict(vars(each)) for each in (loop.ddp_config, loop.config, loop.optimizer.config)]
    assert loop.computed == [(3, False)]
    assert after == before
    assert loop.args.check_for_nan_in_loss_and_grad
    assert not {"get_grad_norm", "prepare_grads"} & vars(loop.optimizer).keys()


@pytest.mark.parametrize("is_hooked", [True, False])
def test_weights_are_not_gathered_by_hooks_during_the_replay_only(
    loop: Loop, is_hooked: bool
) -> None:
    loop.hooks.update({"module": "handle"} if is_hooked else {})
    loop.replay(_Window(record_of(3), record_of(4)))
    assert loop.hooked == [False]
    assert bool(loop.hooks) is is_hooked


FIELDS = {
    "delay_wgrad_compute": True,
    "overlap_moe_expert_parallel_comm": True,
    "overlap_dispatch_backward_with_experts_wgrad": True,
    "defer_embedding_wgrad_compute": True,
    "gtp_weight_remat_size": 2,
    "expert_gtp_weight_remat_size": 2,
}


@pytest.mark.parametrize(("name", "value"), FIELDS.items())
def test_gradients_that_are_sharded_or_computed_later_cannot_be_left_out(
    name: str, value: int
) -> None:
    args = Namespace(gtp_weight_remat_size=1, expert_gtp_weight_remat_size=1)
    assert can_freeze(args, EXPERT)
    setattr(args, name, value)
    assert not can_freeze(args, EXPERT)


@pytest.mark.parametrize(
    ("modules", "has_experts"),
    [
        ([], True),
        ([CudaGraphModule.moe], True),
        ([CudaGraphModule.attn, CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess], False),
    ],
)
def test_of_a_model_with_graphs_experts_outside_of_them_can_be_frozen_and_nothing_else(
    modules: list[CudaGraphModule], *, has_experts: bool
) -> None:
    args = Namespace(cuda_graph_impl="transformer_engine", cuda_graph_modules=modules)
    args.gtp_weight_remat_size = args.expert_gtp_weight_remat_size = 1
    assert can_freeze(args, EXPERT) != has_experts
    assert not can_freeze(args, UnitId(kind=UnitKind.ROUTER, layer=0))


def play_to(
    loop: Loop, folder: Path, num_receives: int, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Replay iteration 3 on the rank after the one of a log; return what it has received."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    with small_log(folder) as log:
        log.take(3)
    player = BoundaryPlayer(NEXT, {RANK: open_log(folder)[0]})
    link = P2PCommunicator.__new__(P2PCommunicator)
    link.prev_rank, link.next_rank = RANK, RANK
    settings = {"variable_seq_lengths": False, "mtp_standalone": False, "timers": None}
    link.config = Namespace(**settings, pipeline_dtype=torch.bfloat16)
    received: list[torch.Tensor] = []
    compute = loop.forward_backward

    def forward_backward(**options: Any) -> None:
        received.extend(
            link.recv_forward(TRAFFIC.shape, is_first_stage=False) for _ in range(num_receives)
        )
        compute(**options)

    loop.forward_backward = forward_backward  # type: ignore[method-assign]
    window: Any = _Window(record_of(3), record_of(4, grad_norm=4.0))
    loop.replay(window, Borders(ranks=frozenset({NEXT}), player=player, tail=()))
    return received


def test_stage_that_replays_alone_receives_what_its_neighbour_has_logged(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = play_to(loop, tmp_path, 2, monkeypatch)
    sent = [tensor for _, _, tensor in sends_of(3)]
    assert [each.equal(tensor) for each, tensor in zip(received, sent, strict=False)] == [True] * 2
    assert loop.weights() == [0.75, 1.0]


def test_replay_that_leaves_a_logged_tensor_fails_before_it_steps(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnrecoverableError, match="tensor 1 .* iteration 3 was not received"):
        play_to(loop, tmp_path, 1, monkeypatch)
    assert loop.weights() == [1.0, 1.0]


def tail_of(*records: IterationRecord) -> Borders:
    """Return borders without neighbours."""
    numbers = tuple(map(numbers_of, records))
    return Borders(ranks=frozenset({0}), player=BoundaryPlayer(0, {}), tail=numbers)


def test_ranks_meet_before_each_iteration_where_collectives_of_the_job_are_possible(
    loop: Loop,
) -> None:
    barrier, met = dist.monitored_barrier, list[tuple[int, int, bool]]()

    def meet(iteration: int) -> None:
        met.append((iteration, len(loop.noted), dist.monitored_barrier is barrier))

    window: Any = _Window(record_of(3), record_of(4))
    borders = tail_of(record_of(5))
    replay = Replay(window, loop.parameters, MegatronLoop(), loop.noted.append, borders, meet)
    replay.run(loop.parts())
    assert met == [(3, 0, True), (4, 1, True)]
