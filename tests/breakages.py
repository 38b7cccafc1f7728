"""Ways to break recovery on purpose, which the tests must notice; see tests/power.py.

Each breakage is a function that changes the product in the process of a rank before training starts. It
changes a function in every module that has imported it, so that moving an import hides nothing. A name that
no longer exists is an error. A breakage that has done damage leaves a mark.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

BREAKAGE, MARKS = "TEST_BREAKAGE", "TEST_BREAKAGE_MARKS"
BREAKAGES: dict[str, Callable[[], None]] = {}
# Names of quick tests of `make test` that a breakage affects, which tests/power.py runs with it.
NOTICED_BY: dict[str, tuple[str, ...]] = {}


def breakage(*noticed_by: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a breakage to the list, under the name of its function."""

    def add(act: Callable[[], None]) -> Callable[[], None]:
        BREAKAGES[act.__name__], NOTICED_BY[act.__name__] = act, noticed_by
        return act

    return add


def apply_breakage() -> None:
    """Apply the breakage that the environment names, if any. Call it before the product runs."""
    if name := os.environ.get(BREAKAGE):
        BREAKAGES[name]()


def mark() -> None:
    """Note that a breakage has done damage."""
    name = os.environ[BREAKAGE]
    (Path(os.environ[MARKS]) / f"{name}_{os.getpid()}").touch()


def wrap(original: Callable[..., Any], act: Callable[..., Any]) -> None:
    """Replace a function in every module of the product; the new one gets it before its own arguments."""
    changed = partial(act, original)
    found = [
        (module, name)
        for module in list(sys.modules.values())
        for name, value in list(vars(module).items())
        if value is original and module.__name__.startswith(("moe_ft", "megatron.fault_tolerance"))
    ]
    assert found, f"{original} is nowhere"
    for module, name in found:
        setattr(module, name, changed)


@breakage("dense", "sparse")
def never_restore() -> None:
    """Make recovery find nothing."""
    from moe_ft.recovery.inventory import Inventory
    from moe_ft.recovery.look import look

    def changed(original: Callable[..., Any], *args: Any) -> Any:
        found = original(*args)
        if found.inventory.versions:
            mark()
        return replace(found, inventory=Inventory())

    wrap(look, changed)


@breakage("dense")
def restore_the_older_iteration() -> None:
    """Skip the newest iteration where there is an older one."""
    from moe_ft.planning.recovery import plan_recovery

    def changed(original: Callable[..., Any], *args: Any) -> Any:
        plans, rejected = original(*args)
        older = [plan for plan in plans if plan.iteration < plans[0].iteration]
        if older:
            mark()
        return older or plans, rejected

    wrap(plan_recovery, changed)


@breakage("dense", "sparse")
def skip_the_random_numbers() -> None:
    """Keep the random number states of the fresh start."""
    from moe_ft.state.random_states import apply_rng

    wrap(apply_rng, lambda original, record: mark())


@breakage("dense", "sparse")
def skip_the_data_position() -> None:
    """Begin to read the data one micro-batch too early, in the loop and in a replay.

    The beginning of the data would not do: Megatron takes position 0 for one that an old checkpoint lacks.
    """
    from megatron.training import get_args

    from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
    from moe_ft.loop.resumption import Replay

    def too_early(position: int) -> int:
        args = get_args()
        mark()
        return int(position - args.micro_batch_size * args.data_parallel_size)

    resume = MegatronLoop.resume

    def resume_too_early(loop: MegatronLoop, record: Any) -> None:
        resume(loop, record)
        get_args().consumed_train_samples = too_early(get_args().consumed_train_samples)

    _set_method(MegatronLoop, "resume", resume_too_early)
    first_record = Replay.first_record.fget  # type: ignore[attr-defined]

    def changed(replay: Replay) -> Any:
        record = first_record(replay)
        position = too_early(record.consumed_train_samples)
        return msgspec.structs.replace(record, consumed_train_samples=position)

    _set_method(Replay, "first_record", property(changed))


@breakage("dense", "sparse", "partial")
def skip_one_expert() -> None:
    """Keep the first expert of the last rank as the fresh start made it."""
    from moe_ft.recovery.put_back import put_back
    from moe_ft.units import UnitKind

    def changed(original: Callable[..., Any], units: Sequence[Any], *args: Any) -> None:
        experts = [each.unit for each in units if each.unit.kind is UnitKind.EXPERT]
        if experts and dist.get_rank() == dist.get_world_size() - 1:
            units = [each for each in units if each.unit != min(experts)]
            mark()
        original(units, *args)

    wrap(put_back, changed)


@breakage("dense", "sparse", "partial")
def skip_one_moment() -> None:
    """Set one moment of one parameter on the last rank to 0."""
    from moe_ft.recovery.put_back import put_back
    from moe_ft.state.slices import live_tensor

    def changed(
        original: Callable[..., Any], units: Sequence[Any], catalog: Any, *args: Any
    ) -> None:
        original(units, catalog, *args)
        if dist.get_rank() < dist.get_world_size() - 1:
            return
        for unit in units:
            for local in catalog.parameters_of(unit.unit):
                moment = live_tensor(local, "exp_avg_sq")
                if moment is not None and torch.any(moment != 0):
                    moment.zero_()
                    mark()
                    return

    wrap(put_back, changed)


@breakage("scaled")
def skip_the_loss_scale() -> None:
    """Keep the loss scale of the fresh start."""
    from moe_ft.state.record import apply
    from moe_ft.state.tensors import inner_optimizers

    def changed(
        original: Callable[..., Any], record: Any, model: Any, optimizer: Any, *args: Any
    ) -> None:
        scalers = [getattr(each, "grad_scaler", None) for each in inner_optimizers(optimizer)]
        before = [scaler.state_dict() if scaler else None for scaler in scalers]
        original(record, model, optimizer, *args)
        for scaler, state in zip(scalers, before, strict=True):
            if scaler and scaler.state_dict() != state:
                scaler.load_state_dict(state)
                mark()

    wrap(apply, changed)


@breakage("buffers")
def skip_a_buffer() -> None:
    """Keep the first buffer that the record would change as the fresh start made it."""
    from moe_ft.state.packed_values import unpack
    from moe_ft.state.record import apply
    from moe_ft.state.tensors import named_buffers

    def changed(original: Callable[..., Any], record: Any, model: Any, *args: Any) -> None:
        buffers = dict(record.buffers)
        for name, live in sorted(named_buffers(model), key=lambda named: named[0]):
            saved = unpack(buffers[name])
            if not torch.equal(saved.double(), live.detach().cpu().double()):
                del buffers[name]
                mark()
                break
        original(msgspec.structs.replace(record, buffers=buffers), model, *args)

    wrap(apply, changed)


@breakage("dense", "sparse")
def restore_another_ranks_slice() -> None:
    """Give each rank the master weights of the next rank for one parameter, whose slices are equally long."""
    from moe_ft.recovery.put_back import exchange_state
    from moe_ft.state.slices import live_tensor
    from moe_ft.units import Level

    def changed(
        original: Callable[..., Any],
        parameters: Sequence[Any],
        restored: Any,
        level: Level,
        groups: Any,
    ) -> None:
        if level is Level.FULL:
            swap(parameters)
        original(parameters, restored, level, groups)

    def swap(parameters: Sequence[Any]) -> None:
        owned = (live_tensor(each, key) for each in parameters for key in ("param", "master_param"))
        own = {each.numel(): each for each in owned if each is not None and each.numel()}
        sent: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sent, {size: each.detach().cpu() for size, each in own.items()})
        other = sent[(dist.get_rank() + 1) % len(sent)]
        for size in sorted(own.keys() & other.keys()):
            if not torch.equal(own[size], other[size]):
                own[size].copy_(other[size])
                mark()
                return

    wrap(exchange_state, changed)


@breakage("sparse")
def replay_one_iteration_too_few() -> None:
    """End a replay before its last iteration."""
    from moe_ft.loop.resumption import Replay

    original = Replay._run_iteration

    def changed(replay: Replay, run_again: Any, before: Any, after: Any, frozen: Any) -> bool:
        if after.iteration < replay.last_record.iteration:
            return original(replay, run_again, before, after, frozen)
        mark()
        return False

    _set_method(Replay, "_run_iteration", changed)


@breakage("shared")
def count_the_tokens_of_empty_micro_batches() -> None:
    """Leave routers as in any pass: they count tokens that change nothing, and add losses for them."""
    from megatron.core.transformer.moe.router import Router

    def changed(router: Router) -> Router:
        mark()
        return router

    Router.eval = changed


@breakage("slots")
def skip_the_tables_of_slots() -> None:
    """Keep the tables of the fresh start."""
    from moe_ft.state.record import apply

    def changed(original: Callable[..., Any], record: Any, *args: Any) -> None:
        kept = {name: each for name, each in record.buffers.items() if "slot_table" not in name}
        if len(kept) < len(record.buffers):
            mark()
        original(msgspec.structs.replace(record, buffers=kept), *args)

    wrap(apply, changed)


@breakage("checked")
def keep_the_random_numbers_of_another_replica() -> None:
    """Leave random numbers where a repeated pass has left them."""
    from megatron.fault_tolerance.seams.iteration_check import Before
    from moe_ft.state.random_states import capture_rng

    restore = Before.restore

    def changed(before: Before, optimizer: Any) -> None:
        mark()
        before._rng = capture_rng()
        restore(before, optimizer)

    _set_method(Before, "restore", changed)


@breakage("checked")
def keep_the_buffers_of_another_replica() -> None:
    """Count tokens twice: leave buffers as a repeated pass has left them."""
    from megatron.fault_tolerance.seams.iteration_check import Before

    restore = Before.restore

    def changed(before: Before, optimizer: Any) -> None:
        if before._buffers:
            mark()
        before._buffers = []
        restore(before, optimizer)

    _set_method(Before, "restore", changed)


def _set_method(owner: type, name: str, method: object) -> None:
    assert name in vars(owner), f"{owner} has no {name}"
    setattr(owner, name, method)
