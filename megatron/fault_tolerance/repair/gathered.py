"""Values that all ranks tell each other while they build the optimizer: a replacement builds its own alone.

Megatron gives all ranks the same groups of parameters, also one whose stage has none for a group.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron.fault_tolerance.seams.patching import Patches


class Gathered:
    """The values of one start, in the job's store. Owned by the training thread."""

    def __init__(self, store: Any, *, is_replacement: bool) -> None:
        """Prepare.

        Args:
            store: of the job.
            is_replacement: whether this process reads what the others have gathered at their start.
        """
        self._store, self._is_replacement = store, is_replacement
        self._count = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Keep what the ranks tell each other in this context, or get it from there."""
        with Patches() as patches:
            patches.wrap(dist, "all_gather_object", self._gather)
            yield

    def _gather(
        self, original: Callable[..., None], values: list[Any], value: Any, group: Any = None
    ) -> None:
        if group is not None:
            original(values, value, group)
            return
        key = f"gathered_{self._count}"
        self._count += 1
        if self._is_replacement:
            values[:] = pickle.loads(self._store.get(key))
            return
        original(values, value)
        if dist.get_rank() == 0:
            self._store.set(key, pickle.dumps(values))
