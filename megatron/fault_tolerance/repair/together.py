"""End of what all ranks do together, such as an iteration: outside of it nothing is repaired."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.training import get_args, training
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.recipes import Recipes
from megatron.fault_tolerance.seams.patching import Patches

Function = Callable[..., Any]


class Together:
    """The common end on one rank. Owned by the training thread."""

    def __init__(self, links: Links, recipes: Recipes) -> None:
        """Prepare.

        Args:
            links: of the present round.
            recipes: of the groups.
        """
        self._links, self._recipes = links, recipes
        self._group: Any = None  # all ranks

    def prepare(self) -> None:
        """Make a group of gloo, unless that of all ranks is one. Called by all ranks, once.

        A barrier of NCCL is work for the device, and passes if it is aborted.
        """
        if "cpu" not in self._recipes.of_default().by_device:
            timeout = timedelta(minutes=get_args().distributed_timeout_minutes)
            self._group = dist.new_group(
                backend="gloo", timeout=timeout, group_desc="moe_ft-together"
            )

    def install(self, patches: Patches) -> None:
        """Watch log lines, if their sums may be wrong without an exception, and changes of the timeout."""
        patches.wrap(training, "update_pg_timeout", self._change_timeout)
        if self._links.fail_silently:
            patches.wrap(training, "training_log", self._log)

    def finish(self) -> None:
        """Return when all ranks have come here with results that count. Called by all ranks.

        Raises:
            RuntimeError: if one has not, among them LinksEndedError.
        """
        self._links.check()
        dist.barrier(self._group)

    def _change_timeout(
        self, original: Function, timeout: timedelta, *args: Any, **kwargs: Any
    ) -> None:
        """Change the timeout of this group too, which Megatron does not know."""
        original(timeout, *args, **kwargs)
        if self._group is not None:
            _set_pg_timeout(timeout, self._group)

    def _log(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self._links.check()
        return result
