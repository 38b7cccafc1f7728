"""Jobs on two nodes of which one is lost again and again: a preset of examples/presets with a recovery.

simulator_vs_measured.py runs and compares them.
"""

import math
import os
import random
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.event_logs import Log, digests_of, events_of
from benchmarks.measured_profile import WARM_ITERATIONS, iteration_s_of, read_profile
from benchmarks.output import ROOT
from benchmarks.quickstart import MODEL
from benchmarks.sparse_jobs import job_folder
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events
from tests.nodes import Nodes

NUM_RANKS, NUM_NODES = 4, 2
LAYOUT = {"pp": 2, "ep": 2}  # a node is a stage
BASELINE = "none"
LEAST_DISTANCE = (
    8  # iterations from a failure to the next: a recovery, and a state that is complete again
)
# Iterations between states on storage. `auto` profiles the first iterations of each start, which are most of
# those between two failures here, and next to none where failures are hours apart.
INTERVAL = 4
TAIL = 8  # iterations after the last failure
_DEADLINE_S = 900.0
_REPAIR = ("--moe-ft-repair", "auto")
_LOCAL = (*_REPAIR, "--moe-ft-upstream-log", "--moe-ft-breakpoints", "--moe-ft-recovery", "local")


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A preset of examples/presets.

    Attributes:
        settings: environment variables of its script.
        flags: after those that it prints.
        replicas: nodes that keep a copy; 0 if states are on storage.
        recoveries: those that it can have.
    """

    title: str
    settings: Mapping[str, str]
    replicas: int
    is_exact: bool
    flags: Sequence[str] = ()
    recoveries: Sequence[str] = ("keep", "repair", "restart")


PRESETS = {
    "moevement": Preset(
        title="MoEvement",
        settings={"WINDOW": "3"},
        replicas=1,
        is_exact=True,
        recoveries=("local", "keep", "repair", "restart"),
    ),
    "gemini": Preset(title="Gemini", settings={}, replicas=1, is_exact=True),
    "checkfreq": Preset(
        title="CheckFreq",
        settings={},
        replicas=0,
        is_exact=True,
        flags=("--moe-ft-interval", f"{INTERVAL}"),
    ),
    "moc": Preset(
        title="MoC-System", settings={"INTERVAL": f"{INTERVAL}"}, replicas=0, is_exact=False
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A job: a preset with a recovery, or without both."""

    preset: str
    recovery: str

    @property
    def name(self) -> str:
        """Its name in the results."""
        return self.preset if self.preset == BASELINE else f"{self.preset}-{self.recovery}"

    def flags(self, persist_dir: Path) -> list[str]:
        """Return the flags of moe_ft."""
        if self.preset == BASELINE:
            return []
        settings = dict(PRESETS[self.preset].settings)
        if not PRESETS[self.preset].replicas:
            settings["PERSIST_DIR"] = str(persist_dir)
        printed = subprocess.run(
            [ROOT / "examples" / "presets" / f"{self.preset}.sh"],
            env={"PATH": os.environ["PATH"], **settings},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        more = {"repair": _REPAIR, "local": _LOCAL}.get(self.recovery, ())
        return [*printed, *PRESETS[self.preset].flags, *more]


def rows(names: Sequence[str]) -> list[Row]:
    """Return the rows to run, that without fault tolerance first."""
    found = [Row(preset=BASELINE, recovery="")]
    order = ("keep", "repair", "local", "restart")  # the slowest last
    found += [
        Row(preset=preset, recovery=recovery)
        for recovery in order
        for preset, each in PRESETS.items()
        if recovery in each.recoveries
    ]
    return [each for each in found if not names or each.name in (*names, BASELINE)]


def draw_failures(num_failures: int, every: int) -> list[tuple[int, int]]:
    """Return iterations that are interrupted, and a rank of the node that is lost in each."""
    drawn = random.Random(40)  # noqa: S311 - no secret
    iteration, found = WARM_ITERATIONS, []
    for _ in range(num_failures):
        rest = drawn.expovariate(1 / (every - LEAST_DISTANCE))
        iteration += LEAST_DISTANCE + math.ceil(rest)
        found.append((iteration, drawn.randrange(NUM_RANKS)))
    return found


def run_row(
    row: Row, failures: Sequence[tuple[int, int]], data: Sequence[str], folder: Path
) -> Any:
    """Run a job, check it, and return what is kept of it.

    Raises:
        AssertionError: if it fails, or a failure was answered otherwise than it should be.
    """
    with job_folder(folder) as job:
        flags = [
            *model_flags(
                **MODEL, train_iters=failures[-1][0] + TAIL, distributed_timeout_minutes=3
            ),
            *(*layout_flags(LAYOUT), *data, *event_flags(job.events)),
            *row.flags(job.log / "persisted"),
        ]
        if row.preset != BASELINE:
            flags += ["--moe-ft-memory-dir", str(job.memory), "--moe-ft-job-id", "benchmark"]
            for iteration, rank in failures:
                flags += ["--moe-ft-inject-fault", f"lose-node:{rank}@{iteration}:backward"]
        is_kept = row.recovery not in ("", "restart")
        answers_alone = row.recovery in (
            "repair",
            "local",
        )  # one that falls back to a restart fails
        with Nodes(
            job.log,
            ["pretrain_gpt_moe.py", *flags],
            num_nodes=NUM_NODES,
            num_ranks=NUM_RANKS,
            max_restarts=0 if answers_alone else len(failures) + 2,
            keeps=is_kept,
            env={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        ) as nodes:
            nodes.start("node0", "node1")
            codes = nodes.wait(_DEADLINE_S)
            said = "\n".join(nodes.log(name)[-3000:] for name in ("node0", "node1"))
        assert codes == [0] * NUM_NODES, f"{row.name} ended with {codes}\n{said}"
        logs = [events(job.events, rank) for rank in range(NUM_RANKS)]
    if row.preset == BASELINE:
        return {"iteration_s": iteration_s_of(logs), "digests": digests_of(logs)}
    check(row, logs, failures)
    return {"profile": read_profile(logs).as_object(), "digests": digests_of(logs)}


def check(row: Row, logs: Sequence[Log], failures: Sequence[tuple[int, int]]) -> None:
    """Check that each failure was answered as the row says, and from where the preset keeps its state.

    Raises:
        AssertionError: if one was not.
    """
    is_repair = row.recovery in ("repair", "local")
    scope = "local" if row.recovery == "local" else "global"
    tier = "peer" if PRESETS[row.preset].replicas else "storage"
    num_recovered = 0
    for rank, log in enumerate(logs):
        name = f"{row.name}, rank {rank}"
        ends = [each["reason"] for each in events_of(log, "end")]
        assert len(ends) == 1, f"{name} has ended with {ends}"
        assert ends[0].startswith("finished"), f"{name} has ended with {ends}"
        recoveries = list(events_of(log, "recovery"))
        assert len(recoveries) == len(failures), f"{name} has recovered {len(recoveries)} times"
        for each, (iteration, _) in zip(recoveries, failures, strict=True):
            assert each["scope"] == scope, f"{name}: a recovery was {each['scope']}"
            target = each["target_iteration"]
            assert 0 < target <= iteration, f"{name}: {target} after a failure in {iteration}"
            num_recovered += tier in each["sources"]
        repaired = [each["broken_iteration"] for each in events_of(log, "repair")]
        claimed = [iteration for iteration, _ in failures] if is_repair else []
        assert repaired == claimed, f"{name}: repairs in {repaired}, not {claimed}"
    assert num_recovered >= len(failures), f"{row.name}: {num_recovered} recoveries from {tier}"
