"""Digests of undisturbed runs, made once for all tests and all processes of a test run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

import filelock

from tests.demo_model import event_flags
from tests.harness import DEADLINE_S, Train, digests, events, run_training

Digests = list[tuple[str, str]]
_PACKAGES = ("torch", "megatron-core", "numpy")  # which decide what a run computes


class References:
    """Runs without checkpoints and faults, kept in a folder that the processes of a test run share."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def digests(
        self,
        flags: Sequence[str],
        world_size: int,
        train: Train | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Digests:
        """Return every rank's digests at the end of a run; train only if nobody has yet.

        Args:
            flags: of the job, without an event log.
            train: see `run_training`; a function of a module.
        """
        folder = self._folder_of(flags, world_size, train)
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / "digests.json"
        with filelock.FileLock(folder / "lock"):
            if not known.exists():
                words = [*flags, *event_flags(folder / "events")]
                run_training(
                    words, world_size, log_dir=folder, train=train, deadline_s=deadline_s
                ).check()
                known.write_text(json.dumps(digests(folder / "events", world_size)))
        return [(own, whole) for own, whole in json.loads(known.read_text())]

    def losses(self, flags: Sequence[str], world_size: int) -> dict[int, float]:
        """Return by iteration the losses of a run; train only if nobody has yet."""
        self.digests(flags, world_size)
        folder = self._folder_of(flags, world_size, None) / "events"
        lines = (line for rank in range(world_size) for line in events(folder, rank, "iteration"))
        return {line["iteration"]: line["loss"] for line in lines if line["loss"] is not None}

    def _folder_of(self, flags: Sequence[str], world_size: int, train: Train | None) -> Path:
        versions = [version(name) for name in _PACKAGES]
        what = json.dumps([world_size, train and train.__qualname__, versions, *flags])
        return self._folder / sha256(what.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Place:
    """Data and folders of a test's jobs; see the fixtures of these names."""

    dataset_flags: Sequence[str]
    folder: Path
    memory_dir: Path
    references: References
