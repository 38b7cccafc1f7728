"""Small jobs whose dead ranks are replaced in place, and checks of what each repair did."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import digests, events
from tests.kept_job import KeptResult, run_kept
from tests.nodes import Nodes
from tests.references import Digests, References

NUM_ITERATIONS = 8
PP_EP = {"pp": 2, "ep": 2}
DENSE = ("dense",)
SPARSE = ("sparse", "--moe-ft-window", "3")
LOCAL = ("--moe-ft-upstream-log", "--moe-ft-breakpoints")
PHASES = ("forward", "backward", "in-step", "after-step")
_LOG_LINE = re.compile(r"iteration +(\d+)/ +\d+ \|")


class RepairedJob:
    """Small job under `moe_ft keep` with --moe-ft-repair auto."""

    def __init__(
        self, dataset_flags: Sequence[str], folder: Path, memory: Path, references: References
    ) -> None:
        self.folder, self._memory, self._references = folder, memory, references
        self._data = tuple(dataset_flags)
        self.num_ranks = 4
        self._base: list[str] = []

    def flags(
        self,
        faults: Sequence[str],
        strategy: Sequence[str],
        layout: Mapping[str, int],
        extra: Sequence[str] = (),
        changes: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Return the flags of the job; changes are those of `model_flags`."""
        common = {"train_iters": NUM_ITERATIONS, "hidden_dropout": 0.1}
        model = model_flags(**{**common, **(changes or {})})
        self._base = [*model, *layout_flags(layout), *self._data, *extra]
        return [
            *(*self._base, *event_flags(self.folder / "events")),
            *("--moe-ft-repair", "auto", "--moe-ft-strategy", *strategy),
            *("--moe-ft-memory-dir", str(self._memory), "--moe-ft-fault-report-grace-s", "0.2"),
            *(word for fault in faults for word in ("--moe-ft-inject-fault", fault)),
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

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind of a rank."""
        return events(self.folder / "events", rank, kind)

    def logged(self) -> list[int]:
        """Return the iterations that have a log line, in their order."""
        return [int(number) for number in _LOG_LINE.findall((self.folder / "log").read_text())]

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
        words = ["-m", "moe_ft", "keep", "--", script]
        words += self.flags(faults, DENSE, layout, changes=changes)
        return Nodes(
            self.folder,
            words,
            num_nodes=num_nodes,
            num_ranks=num_ranks,
            max_restarts=max_restarts,
            env=env,
        )

    def run_under_torchrun(self, *faults: str, num_nodes: int = 1, **options: Any) -> None:
        """Run the job to its end, with an agent of torchrun a node; options are those of `nodes`."""
        names = [f"node{number}" for number in range(num_nodes)]
        with self.nodes(*faults, num_nodes=num_nodes, **options) as nodes:
            nodes.start(*names)
            codes = nodes.wait()
        text = "".join(map(nodes.log, names))
        (self.folder / "log").write_text(text)
        assert codes == [0] * num_nodes, text[-3000:]

    def digests(self) -> Digests:
        """Return the last digests of all ranks."""
        return digests(self.folder / "events", self.num_ranks)

    def expected(self) -> Digests:
        """Return the digests of the job without checkpoints and faults."""
        return self._references.digests(self._base, self.num_ranks)

    def check(
        self,
        dead: Sequence[int],
        broken: Sequence[int],
        recovered: Sequence[set[int]],
        *,
        logged: Iterable[int] = range(1, NUM_ITERATIONS + 1),
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
            lines = self.events(rank, "repair")
            assert [line["round"] for line in lines] == list(range(1, len(dead) + 1))
            assert [line["dead_ranks"] for line in lines] == [[each] for each in dead]
            assert [line["is_replacement"] for line in lines] == [rank == each for each in dead]
            assert [line["broken_iteration"] for line in lines] == list(broken)
            targets = [line["target_iteration"] for line in self.events(rank, "recovery")]
            assert [line["recovered_iteration"] for line in lines] == targets
            seen.append(targets)
            pids = [line["pid"] for line in self.events(rank, "start")]
            assert len(pids) == 1 + len(dead)
            assert len(set(pids)) == 1 + list(dead).count(rank), "survivors keep their processes"
            assert self.events(rank, "stopped") == []
        assert all(each == seen[0] for each in seen)
        for found, allowed in zip(seen[0], recovered, strict=True):
            assert found in allowed
        assert self.logged() == list(logged), "each log line comes once"
        if is_exact:
            assert self.digests() == self.expected()
