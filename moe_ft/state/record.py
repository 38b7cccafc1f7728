"""The iteration record: the state of an iteration apart from weights and moments.

The training thread calls `RecordTaker.capture` at the end of train_step, because buffers, random numbers,
counters and the loss scale change before the weights do. `capture` only copies. `encode` converts the copies
to the form in files and may run on any thread. `apply` restores a record but for its random numbers, which
random_states.py does. `step_ahead` makes a record of an iteration whose scheduler has not stepped yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from megatron.core import num_microbatches_calculator

from moe_ft.errors import ConfigError, SnapshotError
from moe_ft.format.encoding import finite_or_name
from moe_ft.format.records import IterationRecord, JobNumbers, OptimizerRecord
from moe_ft.state import fp8_state, offloaded, schedule
from moe_ft.state.packed_values import copied, from_json, on_cpu, pack, to_json, unpack
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.random_states import capture_rng, encode_rng
from moe_ft.state.tensors import (
    all_buffers,
    buffer_places,
    inner_optimizers,
    is_derived,
    state_scales,
)


def current_num_microbatches() -> int | None:
    """Return the micro-batches of an iteration in Megatron's loop; None in a loop of another kind."""
    calculator = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    return None if calculator is None else calculator.get()


class LoopCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of a training loop, and its own state on this rank as JSON values: fields of the record."""

    consumed_train_samples: int
    consumed_valid_samples: int = 0
    skipped_train_samples: int = 0
    num_microbatches: int
    loop_state: dict[str, Any] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationFacts:
    """Facts that the training loop knows about the iteration that has just ended.

    Attributes:
        grad_norm: as train_step returned it; None after a skipped step.
        num_tokens: with --calculate-per-token-loss, on the device; else None.
        tokens_per_expert: local counts ``[expert]`` by MoE layer.
    """

    iteration: int
    grad_norm: float | None
    num_tokens: torch.Tensor | None
    num_floating_point_operations: float
    tokens_per_expert: Mapping[str, torch.Tensor]
    counters: LoopCounters


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedRecord:
    """Copies of live values. It shares no memory with the training state."""

    facts: IterationFacts
    values: dict[str, Any]


class RecordTaker:
    """Takes the records of one rank. Finds the parts of the model once, at construction.

    The training thread captures; the copy thread completes.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        optimizer: Any,
        scheduler: Any,
        parameters: Sequence[LocalParameter],
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._inner = inner_optimizers(optimizer)
        self._buffers = buffer_places(model)
        self._extra_state = fp8_state.modules_with_extra_state(model)
        fp8_state.check_at_start(self._extra_state)
        self._owned = [
            [each for each in parameters if each.optimizer is inner and each.master is not None]
            for inner in self._inner
        ]

    def capture(self, facts: IterationFacts) -> CapturedRecord:
        """Copy the values that change before the next optimizer step. Training thread; waits for no GPU.

        The next forward pass changes FP8 scales and histories, so they are cloned here, like buffers.

        Raises:
            SnapshotError: if a module has state that cannot be kept.
        """
        values = {
            "grad_norms_by_group": _grad_norms(self._optimizer),
            "optimizers": [_capture_scalars(inner) for inner in self._inner],
            "scheduler": schedule.state_of(self._scheduler),
            "rng": capture_rng(),
            "buffers": {
                name: buffer.detach().clone()
                for name, (module, key) in self._buffers.items()
                if (buffer := module._buffers[key]) is not None
            },
            "extra_state": {
                f"{name}/{key}": tensor
                for name, module in self._extra_state.items()
                for key, tensor in fp8_state.clone_state(name, module).items()
            },
            "num_tokens": copied(facts.num_tokens),
            "tokens_per_expert": dict(facts.tokens_per_expert),
        }
        return CapturedRecord(facts=facts, values=values)

    def complete(self, captured: CapturedRecord) -> None:
        """Add the values that change with the weights (steps, scales) and copy all tensors to the CPU.

        Any thread may call this before the next optimizer step, on the stream that copies the weights. On the
        compute stream the transfer would wait for everything that is queued there.
        """
        for inner, owned, values in zip(
            self._inner, self._owned, captured.values["optimizers"], strict=True
        ):
            values.update(_capture_per_parameter(inner, owned))
        for name, value in captured.values.items():
            captured.values[name] = on_cpu(value)


def _grad_norms(optimizer: Any) -> dict[str, Any]:
    return dict(getattr(optimizer, "grad_norms_by_group", None) or {})


def _capture_scalars(inner: Any) -> dict[str, Any]:
    scaler = getattr(inner, "grad_scaler", None)
    return {
        "groups": [
            {key: copied(value) for key, value in group.items() if key != "params"}
            for group in inner.optimizer.param_groups
        ],
        "scaler": {key: copied(value) for key, value in scaler.state_dict().items()}
        if scaler
        else None,
        "found_inf": _capture_found_inf(inner),
    }


def _capture_found_inf(inner: Any) -> torch.Tensor | None:
    """Return a copy of what an optimizer with a loss scale has found in its gradients; None for any other."""
    found_inf = getattr(inner, "found_inf", None) if getattr(inner, "grad_scaler", None) else None
    return None if found_inf is None else found_inf.detach().clone()


def _capture_per_parameter(inner: Any, owned: Sequence[LocalParameter]) -> dict[str, Any]:
    torch_optimizer = inner.optimizer
    steps = {
        each.name: offloaded.step_count(torch_optimizer, each.master)
        for each in owned
        if each.master is not None
    }
    return {
        "steps": {name: count for name, count in steps.items() if count is not None},
        "scales": {
            f"{each.name}/{key}": scale.detach().clone()
            for each in owned
            if each.master is not None
            for key, scale in state_scales(torch_optimizer, each.master).items()
        },
    }


def encode(captured: CapturedRecord) -> IterationRecord:
    """Return the record in the form that files have. Any thread."""
    facts, values = captured.facts, captured.values
    return IterationRecord(
        optimizers=tuple(_encode_optimizer(each) for each in values["optimizers"]),
        scheduler=to_json(values["scheduler"]),
        rng=encode_rng(values["rng"]),
        buffers={name: pack(tensor) for name, tensor in values["buffers"].items()},
        extra_state={name: pack(tensor) for name, tensor in values["extra_state"].items()},
        tokens_per_expert={
            name: tuple(counts.tolist()) for name, counts in values["tokens_per_expert"].items()
        },
        loop_state=facts.counters.loop_state,
        **_encode_numbers(facts, values["grad_norms_by_group"], values["num_tokens"]),
    )


def _encode_numbers(
    facts: IterationFacts, grad_norms: Mapping[str, Any], num_tokens: torch.Tensor | None
) -> dict[str, Any]:
    """Return what a record and the numbers of the job have in common, by field."""
    counters = msgspec.structs.asdict(facts.counters)
    del counters["loop_state"]
    return {
        "iteration": facts.iteration,
        "grad_norm": None if facts.grad_norm is None else finite_or_name(float(facts.grad_norm)),
        "grad_norms_by_group": {
            name: finite_or_name(float(value)) for name, value in grad_norms.items()
        },
        "num_tokens": None if num_tokens is None else int(num_tokens),
        "num_floating_point_operations": float(facts.num_floating_point_operations),
        **counters,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedNumbers:
    """Numbers of the whole job, equal to those of the record, of which some may still be on the device."""

    facts: IterationFacts
    grad_norms_by_group: Mapping[str, Any]
    num_tokens: torch.Tensor | None
    found_inf: tuple[torch.Tensor | None, ...]

    def encode(self) -> JobNumbers:
        """Return them in the form that files have. Any thread."""
        checked = [bool(each) for each in self.found_inf if each is not None]
        return JobNumbers(
            found_inf=tuple(checked) if len(checked) == len(self.found_inf) else (),
            **_encode_numbers(self.facts, self.grad_norms_by_group, self.num_tokens),
        )


def capture_numbers(optimizer: Any, facts: IterationFacts) -> CapturedNumbers:
    """Copy the numbers before the next iteration changes them. Training thread; waits for no GPU.

    They cost nothing: the boundary log keeps them of every iteration, for stages that run it again alone.
    """
    return CapturedNumbers(
        facts=facts,
        grad_norms_by_group=_grad_norms(optimizer),
        num_tokens=copied(facts.num_tokens),
        found_inf=tuple(map(_capture_found_inf, inner_optimizers(optimizer))),
    )


def step_ahead(captured: CapturedRecord, scheduler: Any, increment: int) -> None:
    """Step a copy of the scheduler on captured parameter groups, and put its results into the record.

    Between the optimizer step and the scheduler's a rank may hang in a collective. Everything else that is
    captured is final by then.

    Args:
        captured: shares no memory with the training state.
        scheduler: Megatron's OptimizerParamScheduler; stays as it is.
    """
    groups = [group for each in captured.values["optimizers"] for group in each["groups"]]
    captured.values["scheduler"] = schedule.state_of(schedule.step(scheduler, groups, increment))


def _encode_optimizer(values: Mapping[str, Any]) -> OptimizerRecord:
    steps = dict(values["steps"])
    if len(set(steps.values())) == 1:
        steps = {"*": next(iter(steps.values()))}
    found_inf = values["found_inf"]
    return OptimizerRecord(
        groups=tuple(to_json(group) for group in values["groups"]),
        steps=steps,
        scaler=None if values["scaler"] is None else to_json(values["scaler"]),
        found_inf=None if found_inf is None else bool(found_inf.item()),
        scales={name: pack(scale) for name, scale in values["scales"].items()},
    )


def apply(
    record: IterationRecord,
    model: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    parameters: Sequence[LocalParameter],
) -> None:
    """Restore buffers, scheduler, loss scales and optimizer scalars.

    Random numbers are restored later, by random_states.py, because setting up data and models draws some. The
    caller restores the counters of the training loop.

    Raises:
        ConfigError: if the model lacks a buffer or extra state that the record holds.
    """
    places = all_buffers(model)
    for name, packed in record.buffers.items():
        if name not in places:
            raise ConfigError(
                f"the state of iteration {record.iteration} holds {name}, which this model lacks: it was "
                "built with other flags. Start with the run's own flags, or ignore its state with "
                "--moe-ft-recover-from load."
            )
        module, key = places[name]
        if is_derived(module):  # earlier versions recorded these too
            continue
        value, buffer = unpack(packed), module._buffers[key]
        assert buffer is not None
        if value.dtype == buffer.dtype and value.shape == buffer.shape:
            buffer.copy_(value)
        else:  # the router converts its expert bias to fp32 in the first forward pass
            buffer.data = value.to(buffer.device)
    apply_extra_state(record, model)
    schedule.put_back(record, optimizer, scheduler)
    for inner, saved in zip(inner_optimizers(optimizer), record.optimizers, strict=True):
        _apply_optimizer(inner, saved, parameters)


def apply_extra_state(record: IterationRecord, model: Sequence[torch.nn.Module]) -> None:
    """Put back the FP8 scales and histories of a record.

    Raises:
        ConfigError: if the model has no place for them.
    """
    modules = fp8_state.modules_with_extra_state(model)
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in modules}
    for name, packed in record.extra_state.items():
        module, _, key = name.partition("/")
        if key and module in states:
            states[module][key] = unpack(packed)
        elif packed.data:
            raise ConfigError(
                f"the record has extra state of {module} that this model or version of moe_ft has no place "
                "for. Start with the version and the FP8 settings that wrote it, or ignore it with "
                "--moe-ft-recover-from load."
            )
    for name, tensors in states.items():
        fp8_state.put_back(modules[name], tensors)


def _apply_optimizer(
    inner: Any, saved: OptimizerRecord, parameters: Sequence[LocalParameter]
) -> None:
    torch_optimizer = inner.optimizer
    if saved.scaler:
        inner.grad_scaler.load_state_dict(from_json(saved.scaler))
    by_name = {each.name: each for each in parameters if each.optimizer is inner}
    for name, local in by_name.items():
        step = saved.steps.get("*", saved.steps.get(name))
        master = local.master
        if step is None or master is None or master not in torch_optimizer.state:
            continue
        if "Q_L" in torch_optimizer.state[master]:
            _apply_soap(torch_optimizer.state[master], int(step))
        else:
            offloaded.set_step_count(torch_optimizer, master, step)
    _apply_scales(torch_optimizer, saved, by_name)


def _apply_soap(state: dict[str, Any], step: int) -> None:
    """Set SOAP's count, and store its eigenbases by columns as its own decompositions leave them.

    Products of matrices that lie otherwise in memory are rounded otherwise.
    """
    state["step"] = step
    for key in ("Q_L", "Q_R") if step > 0 else ():
        state[key] = state[key].t().contiguous().t()


def _apply_scales(
    torch_optimizer: Any, saved: OptimizerRecord, by_name: Mapping[str, LocalParameter]
) -> None:
    for name, packed in saved.scales.items():
        parameter, key = name.rsplit("/", 1)
        master = by_name[parameter].master
        assert master is not None
        live = state_scales(torch_optimizer, master).get(key)
        if live is not None:
            live.copy_(unpack(packed))
        elif key.partition(".")[0] in torch_optimizer.state.get(master, {}):
            # A unit that only a later snapshot holds at FULL has no state yet, and needs no place.
            raise SnapshotError(f"the optimizer has no place for the scale of {name}")
