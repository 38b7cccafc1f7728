"""State that Megatron keeps on the host is read where it is, and restored where it will be stepped."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron.fault_tolerance.cpu import adam
from megatron.fault_tolerance.cpu.device import _Stream
from moe_ft.state import offloaded
from tests.few_bits_adam import FewBitsAdam
from tests.parked_state import OptimizerStateOffloader

KEYS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def _streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
    monkeypatch.setattr(torch.cuda, "Stream", _Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    divide = HybridDeviceOptimizer._get_sub_optimizer_param_groups
    name = "_get_sub_optimizer_param_groups"
    monkeypatch.setattr(HybridDeviceOptimizer, name, adam._on_two_devices(divide))


def hybrid(*, overlaps: bool) -> tuple[Any, list[torch.Tensor]]:
    """Return an optimizer that offloads half of four parameters, whose other Adam counts by group."""
    torch.manual_seed(3)
    parameters = [torch.nn.Parameter(torch.randn(8).bfloat16()) for _ in range(4)]
    made = HybridDeviceOptimizer(
        parameters,
        offload_fraction=0.5,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=FewBitsAdam,
        param_update_in_fp32=True,
        pin_cpu_grads=False,
        overlap_cpu_optimizer_d2h_h2d=overlaps,
        lr=1e-2,
        weight_decay=0.1,
        betas=(0.9, 0.99),
        eps=1e-8,
        fused=True,
    )
    assert len(made.gpu_params_map_cpu_copy) == 2
    return made, list(parameters)


def step(optimizer: Any, parameters: list[torch.Tensor], seed: int) -> None:
    torch.manual_seed(seed)
    for each in parameters:
        each.decoupled_grad = torch.randn(8)  # type: ignore[attr-defined]
    optimizer.step()


def state_of(optimizer: Any, parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "param": offloaded.stepped_tensor(optimizer, each).detach().clone(),
            "step": offloaded.step_count(optimizer, each),
            **{key: optimizer.state[each][key].clone() for key in KEYS},
        }
        for each in parameters
    ]


@pytest.mark.usefixtures("_streams")
@pytest.mark.parametrize("overlaps", [True, False])
def test_hybrid_optimizer_that_has_not_stepped_continues_from_what_is_restored(
    overlaps: bool,
) -> None:
    (old, of_old), (new, of_new) = hybrid(overlaps=overlaps), hybrid(overlaps=overlaps)
    for seed in (5, 6):
        step(old, of_old, seed)
    saved = state_of(old, of_old)
    assert [each["step"] for each in saved] == [2.0] * 4
    with torch.no_grad():
        for parameter, values in zip(of_new, saved, strict=True):
            offloaded.stepped_tensor(new, parameter).copy_(values["param"])
            offloaded.state_to_fill(new, parameter).update({key: values[key] for key in KEYS})
            offloaded.set_step_count(new, parameter, values["step"])
    offloaded.copy_to_weights(new)
    for one, other in zip(of_old, of_new, strict=True):
        assert torch.equal(one, other)
    step(old, of_old, 7)
    step(new, of_new, 7)
    for left, right in zip(state_of(old, of_old), state_of(new, of_new), strict=True):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[key])), key
    offloaded.drop_state(new, of_new[0])
    assert offloaded.step_count(new, of_new[0]) is None
    assert all(not each.state for each in new.cpu_optimizers[:1]) or not overlaps


def parked() -> tuple[Any, torch.Tensor, OptimizerStateOffloader]:
    """Return an optimizer that has stepped, its only master and its offloader, as an engine watches it."""
    master = torch.ones(4)
    state = {master: {key: torch.full((4,), 2.0) for key in KEYS}}
    optimizer: Any = SimpleNamespace(
        optimizer=SimpleNamespace(state=state), shard_fp32_from_float16_groups=[[master]]
    )
    optimizer._state_offloader = offloader = OptimizerStateOffloader(optimizer)
    offloader.mark_optimizer_states_initialized()
    offloaded.watch(optimizer)
    offloaded.watch(optimizer)
    return optimizer, master, offloader


def test_parked_state_is_copied_once_and_read_from_its_buffers_until_the_step() -> None:
    optimizer, master, offloader = parked()
    moment = optimizer.optimizer.state[master]["exp_avg"]
    offloaded.park(optimizer)  # a snapshot begins
    offloader.offload()  # and then the next iteration
    assert offloader.num_copied == 3
    offloader.release_gpu_memory()

    def held() -> list[Any]:
        pairs = (("param", master), ("exp_avg", moment), ("step", None))
        return [offloaded.held_by(optimizer, master, key, each) for key, each in pairs]

    for _ in range(2):
        one, other, none = held()
        assert none is None
        assert one is not master
        assert one.tolist() == [1.0] * 4
        assert other.tolist() == [2.0] * 4
        offloader.reload()  # the buffers still hold the state
    offloader.sync_before_step()
    assert held()[:2] == [master, moment]


def test_restore_in_the_middle_of_an_iteration_finds_tensors_with_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: _Stream())
    optimizer, master, offloader = parked()
    offloader.offload()
    offloader.release_gpu_memory()
    offloaded.bring_back(optimizer)
    assert offloaded.held_by(optimizer, master, "param", master) is master
    assert master.tolist() == [1.0] * 4
    assert offloader._d2h_stream.num_waits == 1
