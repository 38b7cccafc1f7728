"""Stand-in for CUDA's registration of host memory, which counts, and refuses what a test wants refused."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.fault_tolerance.seams.patching import Patches
from moe_ft.engine.engine import CheckpointEngine, EngineContext
from moe_ft.engine.memory import mappings
from moe_ft.loop.checkpoints import Checkpoints

REFUSED = 2


@dataclass
class Registrations:
    """Counts of what was pinned and touched.

    Attributes:
        sizes: bytes by address of what is registered.
        registered, touched: sizes since they were last forgotten, one for each call.
        refuses: whether to refuse a piece of memory, by its size.
    """

    sizes: dict[int, int] = field(default_factory=dict)
    registered: list[int] = field(default_factory=list)
    touched: list[int] = field(default_factory=list)
    refuses: Callable[[int], bool] = lambda num_bytes: False

    def install(self, patches: Patches) -> None:
        patches.set(torch.cuda, "cudart", lambda: self)
        libc, madvise = mappings._LIBC, mappings._LIBC.madvise

        def touch(address: int, num_bytes: int, advice: int) -> int:
            self.touched.append(num_bytes)
            return int(madvise(address, num_bytes, advice))

        assert libc is not None
        patches.set(mappings, "_LIBC", SimpleNamespace(madvise=touch))

    def forget(self) -> None:
        self.registered.clear()
        self.touched.clear()

    def cudaHostRegister(self, address: int, num_bytes: int, _: int) -> int:  # noqa: N802
        if self.refuses(num_bytes):
            return REFUSED
        assert address % os.sysconf("SC_PAGESIZE") == 0
        assert address not in self.sizes, "it is registered already"
        self.sizes[address] = num_bytes
        self.registered.append(num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.sizes[address]

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return "out of memory"


def count_in_job(patches: Patches, folder: Path) -> None:
    """Have this rank pin its memory as if it had a GPU; write a line for each start, and for the end."""
    counts = Registrations()
    counts.install(patches)
    patches.set(EngineContext, "is_on_gpu", property(lambda self: True))

    def writing(seam: str, original: Callable[..., None]) -> Callable[..., None]:
        def act(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            line = {"pid": os.getpid(), "seam": seam, "kept": len(counts.sizes)}
            line |= {"pinned": sum(counts.registered), "touched": sum(counts.touched)}
            with (folder / f"pins_{os.environ['RANK']}").open("a") as file:
                file.write(json.dumps(line) + "\n")
            counts.forget()

        return act

    for owner, seam in ((CheckpointEngine, "start"), (Checkpoints, "close")):
        patches.set(owner, seam, writing(seam, getattr(owner, seam)))
