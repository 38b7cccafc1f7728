"""Setup of a replacement, alone: Megatron's own program runs to its first iteration in a world that is fake.

Model, optimizer, data and all process groups are made as at a start, and nothing is communicated. At the same
time the survivors leave their iteration.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_args, training

from megatron.fault_tolerance.repair import leftovers
from megatron.fault_tolerance.repair.recipes import Recipes
from megatron.fault_tolerance.seams.patching import Patches

Function = Callable[..., Any]


class Joining:
    """A replacement until its first iteration. Owned by the training thread."""

    def __init__(self, recipes: Recipes) -> None:
        """Prepare.

        Args:
            recipes: of the groups, which notes what the fake ones stand for.
        """
        self._recipes, self._groups = recipes, Patches()
        self._gather: Function | None = None
        self.is_alone = True
        self.gathers_weights = False  # as the others do, with --overlap-param-gather
        self.leaves_out_log = False  # once: the others have logged the iteration, and evaluate it

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make the world fake until `meet`."""
        args = get_args()
        with self._groups, Patches() as patches:
            patches.set(args, "fake_process_group", True)
            self._groups.wrap(dist, "init_process_group", self._make_fake_world)
            # Megatron also makes groups that name a backend.
            self._groups.wrap(dist, "new_group", self._recipes.make_fake)
            patches.wrap(training, "setup_model_and_optimizer", _without_loading)
            patches.wrap(training, "training_log", self._continue_log)
            patches.wrap(training, "disable_forward_pre_hook", self._keep_hooks)
            patches.wrap(training, "enable_forward_pre_hook", _enable_hooks)
            patches.wrap(training, "train_step", self._with_gather)
            patches.wrap(training, "check_param_hashes_across_dp_replicas", self._check_hashes)
            yield

    def meet(self) -> None:
        """Communicate from here on."""
        self.is_alone = False
        self._groups.__exit__()

    def _make_fake_world(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Make the group of all ranks, for which Megatron asks for a fake backend."""
        default = get_args().distributed_backend
        return self._recipes.make_fake(original, *args, default=default, **kwargs)

    def _keep_hooks(self, original: Function, model: Any, *args: Any, **kwargs: Any) -> None:
        """Have modules gather weights from the first iteration of this loop on, if others do."""
        if self.is_alone and self.gathers_weights:
            self._gather = get_model_config(
                model[0]
            ).param_sync_func  # which the loop takes away next
        else:
            original(model, *args, **kwargs)

    def _with_gather(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        config = args[5]
        if config.param_sync_func is None:
            config.param_sync_func = self._gather
        return original(*args, **kwargs)

    def _check_hashes(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Leave out the comparison at the beginning of the loop: nothing has been recovered yet."""
        return True if self.is_alone else original(*args, **kwargs)

    def _continue_log(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        """Log as the others do: the loop logs the first iteration of a process, together with all ranks."""
        if self.leaves_out_log:
            self.leaves_out_log = False
            leftovers.clear_metrics()
            return args[5]  # whether memory is still to be reported
        kwargs["is_first_iteration"] = False
        return original(*args, **kwargs)


def change_timeout(original: Function, *args: Any, **kwargs: Any) -> None:
    """Change the timeout of the groups without the others: each loop does it in its own second iteration."""
    with Patches() as patches:
        patches.set(dist, "barrier", lambda *args, **kwargs: None)
        original(*args, **kwargs)


def _enable_hooks(original: Function, model: Any) -> None:
    if not any(chunk.remove_forward_pre_hook_handles for chunk in model):
        original(model)


def _without_loading(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Build model and optimizer; their state comes from a recovery, not from --load."""
    with Patches() as patches:
        for name in ("load", "pretrained_checkpoint"):
            patches.set(get_args(), name, None)
        return original(*args, **kwargs)
