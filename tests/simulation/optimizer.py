"""Optimizer and schedule of a simulated model: made up, or torch's Adam where peers follow by gradients."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.adam import adam


class Optimizer:
    """An inner optimizer as Megatron's look from outside."""

    def __init__(
        self, masters: Sequence[torch.Tensor], refresh: Callable[[], None], *, is_adam: bool
    ) -> None:
        group = {"params": list(masters), "lr": 0.05, "step": 0}
        self.optimizer: Any = SimpleNamespace(param_groups=[group], state=defaultdict(dict))
        if is_adam:
            self.optimizer = torch.optim.AdamW([group], betas=(0.9, 0.99), eps=1e-3)
        self.config = SimpleNamespace(optimizer="adam")
        self._copy_main_params_to_model_params = refresh


class Scheduler:
    """A schedule of learning rates as Megatron's looks from outside."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.num_steps = optimizer, 0

    def step(self, increment: int) -> None:
        """Count samples, and set the learning rate."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + 0.01 * self.num_steps)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}


def step_with_adam(
    owned: Sequence[tuple[Any, dict[str, torch.Tensor]]], group: Mapping[str, Any]
) -> None:
    """Step masters, which have their gradients, and their states; the group counts the step already."""
    for _, state in owned:
        state.setdefault("step", torch.tensor(float(group["step"] - 1)))
    adam(
        [master for master, _ in owned],
        [master.grad for master, _ in owned],
        [state["exp_avg"] for _, state in owned],
        [state["exp_avg_sq"] for _, state in owned],
        [],
        [state["step"] for _, state in owned],
        foreach=False,
        decoupled_weight_decay=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
