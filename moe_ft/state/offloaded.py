"""Optimizer state that Megatron keeps in memory of the host: which tensors hold it now, and when.

- --optimizer-cpu-offload: a HybridDeviceOptimizer steps part of the parameters with torch's Adam on the CPU,
  the rest with one on the device, all in fp32. Its own ``state`` shows the dictionaries of these optimizers
  from their first step on; before that nothing is there. A restore therefore makes state in both places.
- --offload-optimizer-states (dev, 2026-01 to 2026-08): between steps moments and masters are parked in
  page-locked buffers, and their tensors on the device have no memory. An iteration copies them to the buffers
  when it begins, and back while it reduces gradients. A snapshot starts the first of these copies earlier,
  and reads the buffers: they hold the state until the next step.
- --chunked-optimizer-state-offload (dev, since 2026-08, also by the name above): the optimizer itself refers
  to tensors on the host between steps, which copies on Megatron's streams fill. Masters follow when the next
  iteration begins, so a snapshot reads them from the device or from the host.

Reading is slices.py and tensors.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer


def is_hybrid(torch_optimizer: Any) -> bool:
    """Return whether an optimizer steps part of its parameters on the CPU."""
    return isinstance(torch_optimizer, HybridDeviceOptimizer)


def stepped_tensor(torch_optimizer: Any, master: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is stepped for one of an optimizer's parameters, wherever it lies.

    It changes when Megatron loads a checkpoint, so nobody may keep it.
    """
    if not is_hybrid(torch_optimizer):
        return master
    found: torch.Tensor = torch_optimizer.param_to_inner_param[master]
    return found


def state_to_fill(torch_optimizer: Any, master: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter, for a restore that is about to add tensors."""
    if not is_hybrid(torch_optimizer):
        state: dict[str, Any] = torch_optimizer.state[master]
        return state
    inner = stepped_tensor(torch_optimizer, master)
    state = _stepping(torch_optimizer, inner)[0].state[inner]
    if torch_optimizer.param_update_in_fp32:
        state["master_param"] = inner  # as Megatron puts it there after a step
    torch_optimizer.state[master] = state
    return state


def drop_state(torch_optimizer: Any, master: torch.Tensor) -> None:
    """Remove the state of a parameter."""
    torch_optimizer.state.pop(master, None)
    if is_hybrid(torch_optimizer):
        inner = stepped_tensor(torch_optimizer, master)
        _stepping(torch_optimizer, inner)[0].state.pop(inner, None)


def step_count(torch_optimizer: Any, master: torch.Tensor) -> float | None:
    """Return the steps of a parameter where they are not a number of its group; None if they are.

    Groups of a HybridDeviceOptimizer are not those that its optimizers step.
    """
    state = torch_optimizer.state.get(master)
    if not state:
        return None
    if isinstance(state.get("step"), torch.Tensor | int):  # SOAP counts in integers
        return float(state["step"])
    if not is_hybrid(torch_optimizer):
        return None
    found = _stepping(torch_optimizer, stepped_tensor(torch_optimizer, master))[1].get("step")
    return None if found is None else float(found)


def set_step_count(torch_optimizer: Any, master: torch.Tensor, count: float) -> None:
    """Put the steps of a parameter that has state back to where `step_count` finds them."""
    state = torch_optimizer.state[master]
    if isinstance(state.get("step"), torch.Tensor):
        state["step"].fill_(count)
        return
    if is_hybrid(torch_optimizer):
        optimizer, group = _stepping(torch_optimizer, stepped_tensor(torch_optimizer, master))
        if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
            group["step"] = int(count)
            return
    state["step"] = torch.tensor(count, dtype=torch.float32)


def offloader_of(optimizer: Any) -> Any:
    """Return what parks the state of one of Megatron's optimizers between steps; None if nothing does."""
    found = getattr(optimizer, "_state_offloader", None)
    return found or getattr(optimizer, "_optimizer_state_offloader", None)


def _has_buffers(offloader: Any) -> bool:
    """Return whether state is parked in buffers besides the optimizer's own tensors."""
    return hasattr(offloader, "_opt_state_cpu_buffers")


def watch(optimizer: Any) -> None:
    """Note from now on what the buffers hold, and copy nothing to them twice. Training thread."""
    offloader = offloader_of(optimizer)
    if offloader is None or not _has_buffers(offloader) or hasattr(offloader, "moe_ft_parked"):
        return
    offloader.moe_ft_parked = None
    offload, sync_before_step = offloader.offload, offloader.sync_before_step

    def offload_once(*args: Any, **kwargs: Any) -> None:
        if not offloader._offloaded:
            offload(*args, **kwargs)
        keys, has_masters = (
            offloader._offloaded_state_keys,
            offloader._offloaded_mcore_master_weights,
        )
        groups = optimizer.shard_fp32_from_float16_groups if has_masters else ()
        buffers = offloader._shard_fp32_from_float16_cpu_buffers
        masters = {
            master: buffer
            for group, of_group in zip(groups, buffers, strict=False)
            for master, buffer in zip(group, of_group, strict=True)
        }
        offloader.moe_ft_parked = (keys, masters)

    def sync_and_forget() -> None:
        offloader.moe_ft_parked = None  # the step changes the tensors on the device
        sync_before_step()

    offloader.offload, offloader.sync_before_step = offload_once, sync_and_forget


def park(optimizer: Any) -> None:
    """Start the copies to the host that the next iteration would start. Training thread, after a step."""
    offloader = offloader_of(optimizer)
    if offloader is not None and _has_buffers(offloader):
        offloader.offload()


def held_by(
    optimizer: Any, master: torch.Tensor, key: str, tensor: torch.Tensor | None
) -> torch.Tensor | None:
    """Return what holds a tensor of an optimizer now: the tensor, or the buffer that it is parked in."""
    parked = getattr(offloader_of(optimizer), "moe_ft_parked", None)
    if parked is None or tensor is None:
        return tensor
    keys, masters = parked
    if key == "param":
        found: torch.Tensor = masters.get(master, tensor)
        return found
    buffers = offloader_of(optimizer)._opt_state_cpu_buffers.get(master, {})
    return buffers.get(key, tensor) if key in keys else tensor


def settle(optimizers: Iterable[Any], stream: Any = None) -> None:
    """Wait for copies of Megatron to the host, and order those to the device before a stream.

    What was looked up before may be read then.

    Args:
        stream: that reads the device; None for the current one.
    """
    for offloader in filter(None, map(offloader_of, optimizers)):
        if _has_buffers(offloader):
            to_host, to_device = offloader._d2h_stream, offloader._h2d_stream
        else:
            to_host, to_device = offloader.transfer_streams
        (stream or torch.cuda.current_stream()).wait_stream(to_device)
        to_host.synchronize()


def bring_back(optimizer: Any) -> None:
    """Make tensors of an optimizer the ones to restore into, wherever it stopped. Training thread."""
    offloader = offloader_of(optimizer)
    if offloader is not None and _has_buffers(offloader):
        offloader.reload()  # nothing, unless their memory is gone
        offloader.sync_before_step()
    settle([optimizer])


def note_state(optimizer: Any) -> None:
    """Tell an offloader that a restore has made moments: it parks none before it knows."""
    offloader = offloader_of(optimizer)
    if offloader is not None and _has_buffers(offloader):
        offloader.mark_optimizer_states_initialized()


@torch.no_grad()
def copy_to_weights(torch_optimizer: Any) -> None:
    """Make the weights of a HybridDeviceOptimizer from its masters, as after a step."""
    for master, inner in torch_optimizer.param_to_inner_param.items():
        if inner is not master:
            master.data.copy_(inner.data)


def _stepping(hybrid: Any, inner: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Return the optimizer that steps a tensor, and its group there.

    Megatron makes new groups at each step, and new optimizers when it loads a checkpoint.
    """
    known = getattr(hybrid, "moe_ft_stepping", None)
    if known is None or known[0] is not hybrid.cpu_optimizers:
        places = {
            each: (optimizer, number)
            for optimizer in hybrid.sub_optimizers
            for number, group in enumerate(optimizer.param_groups)
            for each in group["params"]
        }
        known = hybrid.moe_ft_stepping = (hybrid.cpu_optimizers, places)
    optimizer, number = known[1][inner]
    return optimizer, optimizer.param_groups[number]
