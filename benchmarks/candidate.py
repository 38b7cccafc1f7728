"""The interface of a way to save state, which benchmarks/stall.py measures."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

State = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Surroundings of a candidate: its rank, and two folders that all ranks share."""

    rank: int
    num_ranks: int
    disk: Path
    tmpfs: Path


class Candidate:
    """One way to save the state of a rank. Owned by the rank's main thread.

    The benchmark calls, on all ranks: `start`; then for each checkpoint `save` and, in each of the
    following iterations until it is complete, `poll` at its beginning and `before_step` right before the
    state changes; at last `load` and `close`.
    """

    requires: ClassVar[Sequence[str]] = ()  # modules that may be missing
    complete_means: ClassVar[str] = "fsync"

    def __init__(self, state: State, site: Site) -> None:
        self.state, self.site = state, site
        self.completed_s: float | None = None  # on time.perf_counter; set to None before each save
        # Iterations of loaded tensors that are not of their checkpoint's, by name.
        self.iteration_of: dict[str, int] = {}

    def start(self) -> None:
        """Open files, groups, threads and processes."""

    def save(self, iteration: int) -> None:
        """Begin a checkpoint of the state as it is now; the previous one is complete."""
        raise NotImplementedError

    def poll(self) -> None:
        """Do what the library wants done now and then; raise what failed in the background."""

    def before_step(self) -> None:
        """Return when the state may change."""

    def is_complete(self) -> bool:
        """Return whether the latest checkpoint is what `complete_means` says."""
        return self.completed_s is not None

    def load(self, iteration: int) -> Mapping[str, torch.Tensor]:
        """Return this rank's state from the latest checkpoint, which is complete."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what `start` opened."""

    def complete(self) -> None:
        """Note that the latest checkpoint is complete as of now; adapters call it, on any thread."""
        self.completed_s = time.perf_counter()

    def folder(self, iteration: int) -> Path:
        """Return a checkpoint's folder on disk, which exists and all ranks share."""
        folder = self.site.disk / f"iteration_{iteration}"
        folder.mkdir(exist_ok=True)
        return folder

    def file(self, iteration: int) -> Path:
        """Return this rank's file in that folder, for candidates that write one."""
        return self.folder(iteration) / f"rank_{self.site.rank}"
