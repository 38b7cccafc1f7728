"""Small job that takes checkpoints, for tests of everything around them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_ft.loop.refusing import EXIT_REFUSED
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import (
    JobResult,
    Train,
    digests,
    events,
    run_training,
    run_with_restarts,
)
from tests.recoveries import RecoveryWatch
from tests.references import Digests, References

NUM_RANKS = 2
NUM_ITERATIONS = 6
TWO_NODES = ("node0", "node1")


class CheckpointJob:
    """Job of two ranks with expert parallelism, on one or two nodes, with the tiers that a test needs."""

    def __init__(
        self,
        dataset_flags: Sequence[str],
        folder: Path,
        memory_dir: Path,
        references: References,
    ) -> None:
        self.folder, self.memory_dir = folder, memory_dir
        self._references = references
        self.storage = folder / "storage"
        self.events_dir = folder / "events"
        self.train: Train | None = None  # runs instead of pretrain_gpt_moe.py
        self.base = [
            *model_flags(train_iters=NUM_ITERATIONS, hidden_dropout=0.1),
            *layout_flags({"ep": 2}),
            *dataset_flags,
        ]

    def reference(self, *flags: str) -> Digests:
        """Return the digests of the job without checkpoints and faults."""
        return self._references.digests([*self.base, *flags], NUM_RANKS, self.train)

    def flags(self, *flags: str, storage: bool = False) -> list[str]:
        """Return the job's flags with checkpoints in memory, and on storage if asked for."""
        tiers = ["--moe-ft-persist-dir", str(self.storage), "--moe-ft-persist-interval", "2"]
        return [
            *self.base,
            *event_flags(self.events_dir),
            *("--moe-ft-strategy", "dense", "--moe-ft-job-id", "test"),
            *("--moe-ft-memory-dir", str(self.memory_dir)),
            *("--moe-ft-fault-report-grace-s", "0.5"),
            *(tiers if storage else ()),
            *flags,
        ]

    def run(
        self, *flags: str, storage: bool = False, nodes: Sequence[str] | None = None
    ) -> JobResult:
        """Start the job once."""
        log = self.folder / f"run_{len(list(self.folder.glob('run_*')))}"
        return run_training(
            self.flags(*flags, storage=storage),
            NUM_RANKS,
            log_dir=log,
            nodes=nodes,
            train=self.train,
        )

    def resume(
        self, *flags: str, storage: bool = False, nodes: Sequence[str] | None = None
    ) -> JobResult:
        """Start the job again; check that it recovers the newest state that the last start left."""
        watch = self._watch(lambda start: nodes, storage=storage, has_begun=True)
        watch.look(0)
        assert watch.expected != [None], "nothing is left to recover"
        result = self.run(*flags, storage=storage, nodes=nodes).check()
        watch.check(2)
        return result

    def _watch(
        self,
        nodes: Callable[[int], Sequence[str] | None] | None,
        *,
        storage: bool,
        has_begun: bool = False,
    ) -> RecoveryWatch:
        storage_dir = self.storage if storage else None
        memory = self.memory_dir / "test"
        return RecoveryWatch(
            self.events_dir, NUM_RANKS, memory, storage_dir, nodes, has_begun=has_begun
        )

    def run_with_faults(
        self,
        *faults: str,
        flags: Sequence[str] = (),
        storage: bool = False,
        nodes: Callable[[int], Sequence[str]] | None = None,
        between: Callable[[int], None] | None = None,
        is_intact: bool = True,
    ) -> list[JobResult]:
        """Restart the job until it ends by itself.

        Checks the last result, and that each restart recovers the right state, see tests/recoveries.py.

        Args:
            faults: to inject.
            flags: further flags of the job.
            storage: whether there is a persist directory.
            nodes: see `run_with_restarts`.
            between: called after a start that failed, with its number.
            is_intact: False if the test makes the newest state unusable and checks the recovery itself.
        """
        watch = self._watch(nodes, storage=storage)

        def act(start: int) -> None:
            if between is not None:
                between(start)
            watch.look(start)

        injected = [word for fault in faults for word in ("--moe-ft-inject-fault", fault)]
        results = run_with_restarts(
            self.flags(*injected, *flags, storage=storage),
            NUM_RANKS,
            log_dir=self.folder,
            max_restarts=4,
            nodes=nodes,
            between=act,
            train=self.train,
        )
        results[-1].check()
        if is_intact:
            watch.check(len(results))
        return results

    def events(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        """Return the events of one kind of a rank."""
        return events(self.events_dir, rank, event)

    def recovered(self) -> list[tuple[int, int]]:
        """Return for each recovery the iterations restored and continued from; fail if the ranks differ."""
        found = [
            [
                (line["incarnation"], line["restored_iteration"], line["target_iteration"])
                for line in self.events("recovery", rank)
            ]
            for rank in range(NUM_RANKS)
        ]
        assert all(each == found[0] for each in found), found
        return [(restored, target) for _, restored, target in found[0]]

    def stored(self) -> list[int]:
        """Return the iterations of the checkpoints on storage, ascending."""
        manifests = self.storage.glob("iter_*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("iter_")) for path in manifests)

    def digests(self) -> Digests:
        """Return the last digests of all ranks."""
        return digests(self.events_dir, NUM_RANKS)


def refusal(result: JobResult) -> str:
    """Return the reason of a refused start; fail if the start was not refused."""
    assert result.exit_codes[0] == EXIT_REFUSED, result.output(0)[-2000:]
    (line,) = [line for line in result.output(0).splitlines() if ".py: error: " in line]
    return line


def flip_byte(path: Path, position: int) -> None:
    """Change one byte of a file; negative positions count from its end."""
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    with path.open("r+b") as file:  # in place: others may have it mapped
        file.write(content)
