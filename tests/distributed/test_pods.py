"""Pods of examples/kubernetes on this machine: processes with the variables that Kubernetes would give.

Kubernetes itself is not here: these tests send the signals, and start a pod again, as it would.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, override

import pytest

from moe_ft.events import event_path, read_progress
from tests.harness import digests, events
from tests.kept_job import ROOT
from tests.kept_nodes import KeptNodes
from tests.ports import free_port
from tests.references import Place
from tests.slurm.job import MODEL, NUM_RANKS, SMALLER, reference
from tests.waiting import wait_for

POD = ROOT / "examples" / "kubernetes" / "pod.sh"
NUM_ITERATIONS = 120
STORE = 1000  # number of its pod, which has no ranks
REMOVED = 75  # exit code of a pod whose training has not finished


class Pods(KeptNodes):
    """Pods of one JobSet: two with a rank each, spares, and that of the store."""

    def __init__(self, place: Place, **variables: str) -> None:
        """Start nothing yet; variables are those of pod.sh."""
        super().__init__(place.folder, (), num_nodes=NUM_RANKS, ranks_per_node=1)
        self.run_dir, self.memory_dir = place.folder / "run", place.memory_dir
        self.storage, self.status = self.run_dir / "states", self.run_dir / "status"
        extra = [*SMALLER, "--moe-ft-state-digest", "--moe-ft-persist-interval", "1000"]
        prefix = place.dataset_flags[place.dataset_flags.index("--data-path") + 1]
        self._variables: Mapping[str, str] = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "REPAIR": "auto",
            "NODES": str(NUM_RANKS),
            "STORE": str(STORE),
            "MODEL": MODEL,
            "RUN_NAME": "pods",
            "RUN_DIR": str(self.run_dir),
            "MEMORY_DIR": str(place.memory_dir),
            "DATA_PREFIX": prefix,
            "RENDEZVOUS": f"127.0.0.1:{free_port()}",
            "TRAIN_ITERATIONS": str(NUM_ITERATIONS),
            "EXTRA_FLAGS": " ".join(extra),
            "PYTHONWARNINGS": "ignore",
            **variables,
        }

    @override
    def command(self, number: int) -> tuple[list[str], list[str], dict[str, str]]:
        if number == STORE:
            variables = {**self._variables, "JOB_COMPLETION_INDEX": "0"}
            return ["env", f"NUMBER={STORE}", str(POD)], [], variables
        return [str(POD)], [], {**self._variables, "JOB_COMPLETION_INDEX": str(number)}

    def events(self, event: str, rank: int) -> list[dict[str, Any]]:
        folder = self.run_dir / "events"
        return events(folder, rank, event) if event_path(folder, rank).exists() else []

    def wait_for_iteration(self, iteration: int, start: int = 1) -> None:
        """Wait until rank 0 has trained an iteration in a start, counted from 1."""

        def is_there() -> bool:
            progress = read_progress(self.run_dir / "events", 0)
            has_started = len(self.events("start", 0)) >= start
            return has_started and progress is not None and progress.iteration >= iteration

        wait_for(is_there, f"iteration {iteration}")

    def taken_over(self, rank: int) -> list[dict[str, str]]:
        return [line["taken_over"] for line in self.events("repair", rank)]

    def check_digests(self, place: Place) -> None:
        found = digests(self.run_dir / "events", NUM_RANKS)
        assert found == reference(place.references, place.dataset_flags, NUM_ITERATIONS)


@pytest.mark.rest
def test_spare_takes_over_from_the_first_pod_which_comes_back_and_takes_over_from_one_drained(
    place: Place,
) -> None:
    with Pods(place) as pods:
        pods.start("store", first=STORE)
        pods.start("host0", "host1", "host2")
        pods.wait_for_iteration(4)
        pods.kill("host0")
        wait_for(lambda: pods.taken_over(1), "the repair")
        pods.start("host3")  # the same pod on another node
        wait_for(lambda: "node host3 is a spare" in pods.log("store"), "the pod")
        pods.tell_to_end("host2")
        ends = pods.wait()
    assert ends == {"host1": 0, "host2": REMOVED, "host3": 0, "store": 0}, pods.log("store")[-3000:]
    for rank in range(NUM_RANKS):
        assert pods.taken_over(rank) == [{"host0": "host2"}, {"host2": "host3"}]
    assert len({line["pid"] for line in pods.events("start", 1)}) == 1, "rank 1 keeps its process"
    assert pods.status.read_text().split() == ["0", "host3", "host1"]
    pods.check_digests(place)


@pytest.mark.rest
def test_all_save_when_the_pod_of_the_store_is_told_to_end_and_continue_on_other_hosts(
    place: Place,
) -> None:
    with Pods(place) as pods:
        pods.start("store", first=STORE)
        pods.start("host0", "host1", "host2")
        pods.wait_for_iteration(4)
        pods.tell_to_end("store")
        assert pods.wait() == dict.fromkeys(("host0", "host1", "host2", "store"), REMOVED)
        assert "the node of the job's store is told to end. All ranks are to" in pods.log("store")
    (stored,) = pods.storage.glob("iter_*/manifest.json")
    for path in place.memory_dir.iterdir():
        subprocess.run(["rm", "-r", path], check=True)
    with Pods(place) as pods:
        pods.start("store", first=STORE)
        pods.start("host4", "host5")
        assert set(pods.wait().values()) == {0}, pods.log("store")[-3000:]
    for rank in range(NUM_RANKS):
        (recovery,) = pods.events("recovery", rank)
        assert set(recovery["sources"]) == {"storage"}
        assert f"{recovery['target_iteration']}" == stored.parent.name.removeprefix("iter_").lstrip(
            "0"
        )
    pods.check_digests(place)
