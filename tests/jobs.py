"""Small jobs of tests: one that takes checkpoints, and one whose dead ranks are replaced in place."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_ft.events import read_progress
from moe_ft.loop.refusing import EXIT_REFUSED
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import (
    DEADLINE_S,
    JobResult,
    Train,
    digests,
    events,
    run_training,
    run_with_restarts,
)
from tests.kept_job import KeptResult, logged_in, run_kept
from tests.kept_nodes import KeptNodes
from tests.namespaces import Namespaces
from tests.nodes import Nodes
from tests.recoveries import Expected, RecoveryWatch
from tests.references import Digests, Place
from tests.waiting import wait_for

NUM_RANKS = 2
NUM_ITERATIONS = 6
TWO_NODES = ("node0", "node1")
NUM_REPAIRED = 8  # iterations of a job that is repaired
PP_EP = {"pp": 2, "ep": 2}
DENSE = ("dense",)
SPARSE = ("sparse", "--moe-ft-window", "3")
LOCAL = ("--moe-ft-upstream-log", "--moe-ft-breakpoints")
PHASES = ("forward", "backward", "in-step", "after-step")
# Ends of jobs of two ranks whose collectives hang then.
LEAVING = (
    *("terminate:0@4:backward", "terminate:1@4:in-step"),
    *("kill:1@4:backward", "kill:0@4:after-step"),
)


def fault_flags(faults: Sequence[str]) -> list[str]:
    return [word for fault in faults for word in ("--moe-ft-inject-fault", fault)]


class Job:
    """Job of two ranks with expert parallelism, unless it trains something else.

    Attributes:
        base: flags of the job without checkpoints and faults.
        train: runs instead of pretrain_gpt_moe.py.
    """

    num_iterations = NUM_ITERATIONS

    def __init__(self, place: Place) -> None:
        self.place, self.folder, self.memory_dir = place, place.folder, place.memory_dir
        self.events_dir = self.folder / "events"
        self.train: Train | None = None
        self.set_model(NUM_RANKS, {"ep": 2})

    def set_model(
        self, num_ranks: int, layout: Mapping[str, int], *flags: str, **changes: Any
    ) -> None:
        """Train in a layout, with changes as in `model_flags`."""
        self.num_ranks = num_ranks
        common = {"train_iters": self.num_iterations, "hidden_dropout": 0.1}
        model = model_flags(**{**common, **changes})
        self.base = [*model, *layout_flags(layout), *self.place.dataset_flags, *flags]

    def reference(self, *flags: str) -> Digests:
        """Return the digests of the job without checkpoints and faults."""
        return self.place.references.digests([*self.base, *flags], self.num_ranks, self.train)

    def events(self, event: str, rank: int = 0) -> list[dict[str, Any]]:
        return events(self.events_dir, rank, event)

    def faults_fired(self) -> list[dict[str, Any]]:
        """Return the events of all ranks that say which faults fired."""
        ranks = range(self.num_ranks)
        return [line for rank in ranks for line in self.events("fault_injected", rank)]

    def digests(self) -> Digests:
        return digests(self.events_dir, self.num_ranks)


class CheckpointJob(Job):
    """Job on one or two nodes, with the tiers that a test needs.

    Attributes:
        recoveries: ``[restart]`` what the windows had for those of `run_with_faults`, which was recovered.
    """

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.recoveries: list[Expected | None] = []
        self.storage = self.folder / "storage"

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
        log = self.folder / f"run_{len(list(self.folder.glob('run_*')))}"
        return run_training(
            self.flags(*flags, storage=storage),
            self.num_ranks,
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
            self.events_dir, self.num_ranks, memory, storage_dir, nodes, has_begun=has_begun
        )

    def run_with_faults(
        self,
        *faults: str,
        flags: Sequence[str] = (),
        storage: bool = False,
        nodes: Callable[[int], Sequence[str]] | None = None,
        between: Callable[[int], None] | None = None,
        is_intact: bool = True,
        has_breakpoints: bool = False,
        max_restarts: int = 5,
        deadline_s: float = DEADLINE_S,
    ) -> list[JobResult]:
        """Restart the job until it ends by itself.

        Checks the last result, and that each restart recovers the right state, see tests/recoveries.py.

        Args:
            between: called after a start that failed, with its number, before its remains are read.
            is_intact: False if the test makes the newest state unusable and checks the recovery itself.
            has_breakpoints: whether ranks may leave newer states than their windows.
            deadline_s: of each start.
        """
        watch = self._watch(nodes, storage=storage)

        def act(start: int) -> None:
            if between is not None:
                between(start)
            watch.look(start)

        results = run_with_restarts(
            self.flags(*fault_flags(faults), *flags, storage=storage),
            self.num_ranks,
            log_dir=self.folder,
            max_restarts=max_restarts,
            deadline_s=deadline_s,
            nodes=nodes,
            between=act,
            train=self.train,
        )
        results[-1].check()
        if is_intact:
            self.recoveries = watch.check(len(results), has_breakpoints=has_breakpoints)
        return results

    def recovered(self) -> list[tuple[int, int]]:
        """Return for each recovery the iterations restored and continued from; fail if the ranks differ."""
        found = [
            [
                (line["incarnation"], line["restored_iteration"], line["target_iteration"])
                for line in self.events("recovery", rank)
            ]
            for rank in range(self.num_ranks)
        ]
        assert all(each == found[0] for each in found), found
        return [(restored, target) for _, restored, target in found[0]]

    def stored(self) -> list[int]:
        """Return the iterations of the checkpoints on storage, ascending."""
        manifests = self.storage.glob("iter_*/manifest.json")
        return sorted(int(path.parent.name.removeprefix("iter_")) for path in manifests)


class RepairedJob(Job):
    """Job under `moe_ft keep` with --moe-ft-repair auto."""

    num_iterations = NUM_REPAIRED

    def flags(
        self,
        faults: Sequence[str],
        strategy: Sequence[str],
        layout: Mapping[str, int],
        extra: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Return the flags of the job; changes are those of `model_flags`."""
        self.set_model(self.num_ranks, layout, *extra, **(changes or {}))
        return [
            *(*self.base, *event_flags(self.events_dir)),
            *("--moe-ft-repair", "auto", "--moe-ft-strategy", *strategy),
            *("--moe-ft-memory-dir", str(self.memory_dir), "--moe-ft-fault-report-grace-s", "0.2"),
            *fault_flags(faults),
        ]

    def run(
        self,
        *faults: str,
        strategy: Sequence[str] = DENSE,
        layout: Mapping[str, int] = PP_EP,
        num_ranks: int = 4,
        extra: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> KeptResult:
        """Run the job to its end; options are those of `run_kept`."""
        self.num_ranks = num_ranks
        flags = self.flags(faults, strategy, layout, extra, changes)
        return run_kept(flags, num_ranks, log=self.folder / "log", **options).check()

    def logged(self) -> list[int]:
        """Return the iterations that have a log line, in their order."""
        return logged_in((self.folder / "log").read_text())

    def nodes(
        self,
        *faults: str,
        num_nodes: int = 1,
        num_ranks: int = 4,
        layout: Mapping[str, int] = PP_EP,
        changes: Mapping[str, Any] | None = None,
        max_restarts: int = 0,
        script: str = "pretrain_gpt_moe.py",
        env: Mapping[str, str] | None = None,
    ) -> Nodes:
        """Return nodes that run the job under torchrun."""
        self.num_ranks = num_ranks
        return Nodes(
            self.folder,
            [script, *self.flags(faults, DENSE, layout, changes=changes)],
            num_nodes=num_nodes,
            num_ranks=num_ranks,
            max_restarts=max_restarts,
            keeps=True,
            env=env,
        )

    def kept_nodes(
        self,
        *flags: str,
        num_nodes: int = 2,
        train_iters: int = 40,
        lost_after_s: int = 10,
        networks: Namespaces | None = None,
        store: int = 0,
        max_restarts: int = 0,
    ) -> KeptNodes:
        """Return nodes that run the job of four ranks under `keep` alone."""
        self.num_ranks = 4
        strategy, changes = (*DENSE, *flags), {"train_iters": train_iters}
        return KeptNodes(
            self.folder,
            ["pretrain_gpt_moe.py", *self.flags((), strategy, PP_EP, changes=changes)],
            num_nodes=num_nodes,
            ranks_per_node=self.num_ranks // num_nodes,
            lost_after_s=lost_after_s,
            networks=networks,
            store=store,
            max_restarts=max_restarts,
        )

    def wait_for_iteration(self, iteration: int) -> None:
        """Wait until rank 0 has trained an iteration."""

        def is_there() -> bool:
            progress = read_progress(self.events_dir, 0)
            return progress is not None and progress.iteration >= iteration

        wait_for(is_there, f"iteration {iteration}", DEADLINE_S)

    def run_under_torchrun(self, *faults: str, num_nodes: int = 1, **options: Any) -> None:
        """Run the job to its end, with an agent of torchrun a node; options are those of `nodes`."""
        names = [f"node{number}" for number in range(num_nodes)]
        with self.nodes(*faults, num_nodes=num_nodes, **options) as nodes:
            nodes.start(*names)
            codes = nodes.wait()
        text = "".join(map(nodes.log, names))
        (self.folder / "log").write_text(text)
        assert codes == [0] * num_nodes, text[-3000:]

    def check(
        self,
        dead: Sequence[int],
        broken: Sequence[int],
        recovered: Sequence[set[int]],
        *,
        logged: Iterable[int] = range(1, NUM_REPAIRED + 1),
        is_exact: bool = True,
    ) -> None:
        """Check rounds that repaired one rank each.

        Args:
            dead: ``[round]`` the rank.
            broken: ``[round]`` the iteration in which it died.
            recovered: ``[round]`` the iterations from which training may have run again.
            logged: iterations that have a log line.
            is_exact: whether the result is that of the job without faults.
        """
        seen = []
        for rank in range(self.num_ranks):
            lines = self.events("repair", rank)
            assert [line["round"] for line in lines] == list(range(1, len(dead) + 1))
            assert [line["dead_ranks"] for line in lines] == [[each] for each in dead]
            assert [line["is_replacement"] for line in lines] == [rank == each for each in dead]
            assert [line["broken_iteration"] for line in lines] == list(broken)
            targets = [line["target_iteration"] for line in self.events("recovery", rank)]
            assert [line["recovered_iteration"] for line in lines] == targets
            seen.append(targets)
            pids = [line["pid"] for line in self.events("start", rank)]
            assert len(pids) == 1 + len(dead)
            assert len(set(pids)) == 1 + list(dead).count(rank), "survivors keep their processes"
            assert self.events("stopped", rank) == []
        assert all(each == seen[0] for each in seen)
        for found, allowed in zip(seen[0], recovered, strict=True):
            assert found in allowed
        assert self.logged() == list(logged), "each log line comes once"
        if is_exact:
            assert self.digests() == self.reference()


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
