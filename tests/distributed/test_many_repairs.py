"""Many repairs in one process: a survivor holds no more after the last one than after the first.

The dead ranks are single ones, or those of nodes that are lost and come back as spares.
"""

from pathlib import Path

import pytest

from tests.demo_model import NO_EXPERTS, event_flags, model_flags
from tests.distributed.scripts.pretrain_counted import COUNTS, GATE, held_by
from tests.harness import DEADLINE_S, digests, events
from tests.jobs import DENSE, RepairedJob
from tests.kept_job import ROOT, logged_in, run_kept
from tests.kept_nodes import KeptNodes
from tests.references import References
from tests.waiting import wait_for

NUM_REPAIRS = 50
# No death is near the iterations after which the survivor is counted: its connections would be fewer.
FIRST, COUNTED = 2, 4
BROKEN = (FIRST, *range(FIRST + 3, FIRST + 2 + NUM_REPAIRS))
NUM_ITERATIONS = BROKEN[-1] + 3
_MOST = 1.1
SCRIPT = str(ROOT / "tests" / "distributed" / "scripts" / "pretrain_counted.py")

NUM_LOSSES = 50  # of nodes
SETTLED = 5  # losses after which processes are counted first


def counts(path: Path) -> dict[int, tuple[int, int, int]]:
    """Return descriptors, threads and KiB of a process by iteration."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {int(it): (int(fds), int(threads), int(kib)) for it, fds, threads, kib in lines}


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_survivor_of_many_repairs_holds_no_more_than_after_the_first(
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    references: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(COUNTS, str(tmp_path / "counts"))
    (tmp_path / "counts").mkdir()
    faults = [f"kill:1@{iteration}:backward" for iteration in BROKEN]
    # Experts would have matrices of new sizes in each iteration, and oneDNN keeps a kernel for each.
    model = model_flags(train_iters=NUM_ITERATIONS, num_layers=1, **NO_EXPERTS)
    base = [*model, *dataset_flags]
    flags = [
        *(*base, *event_flags(tmp_path / "events"), "--moe-ft-memory-dir", str(memory_dir)),
        *("--moe-ft-repair", "auto", "--moe-ft-strategy", "dense"),
        *(word for fault in faults for word in ("--moe-ft-inject-fault", fault)),
    ]
    log = tmp_path / "log"
    result = run_kept(flags, 2, log=log, script=SCRIPT, deadline_s=800).check()
    assert result.num_restarts == 0
    repairs = events(tmp_path / "events", 0, "repair")
    assert [each["dead_ranks"] for each in repairs] == [[1]] * NUM_REPAIRS
    assert [each["broken_iteration"] for each in repairs] == list(BROKEN)
    pids = {each["pid"] for each in events(tmp_path / "events", 0, "start")}
    assert len(pids) == 1, "the survivor keeps its process"
    found = counts(tmp_path / "counts" / str(pids.pop()))
    first, last = found[COUNTED], found[NUM_ITERATIONS]
    assert all(new <= _MOST * old for old, new in zip(first, last, strict=True)), found
    assert logged_in(log.read_text()) == list(range(1, NUM_ITERATIONS + 1))
    assert digests(tmp_path / "events", 2) == references.digests(base, 2)


@pytest.mark.rest
@pytest.mark.timeout(1800)
def test_node_that_keeps_the_store_holds_no_more_after_many_losses_of_other_nodes(
    repaired: RepairedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, counted = repaired.folder / "gate", repaired.folder / "counts"
    counted.mkdir()
    monkeypatch.setenv(COUNTS, str(counted))
    monkeypatch.setenv(GATE, str(gate))

    def open_gate(last: int) -> None:
        new = gate.with_suffix(".new")
        new.write_text(str(last))
        new.rename(gate)

    repaired.num_ranks, last = 2, 2 * NUM_LOSSES + 4
    changes = {"train_iters": last, "num_layers": 1, **NO_EXPERTS}
    flags = repaired.flags((), DENSE, {}, changes=changes)
    held: list[dict[str, tuple[int, int, int]]] = []
    open_gate(2)
    with KeptNodes(
        repaired.folder, [SCRIPT, *flags], num_nodes=2, ranks_per_node=1, lost_after_s=5
    ) as nodes:
        nodes.start("node0", "node1", "node2")
        active, spare = "node1", "node2"
        for number in range(NUM_LOSSES):
            wait_for_counted(counted, 2 * number + 2)
            wait_for_spares(nodes, number + 1)
            nodes.kill(active)
            open_gate(2 * number + 4)
            wait_for_counted(counted, 2 * number + 4)
            held.append(held_on(nodes))
            if number < NUM_LOSSES - 1:
                nodes.start(active, first=1)
            active, spare = spare, active
        open_gate(last + 1)
        assert nodes.wait()["node0"] == 0, nodes.log("node0")[-3000:]
    taken = [{"node1": "node2"}, {"node2": "node1"}]
    repairs = repaired.events("repair")
    assert [each["taken_over"] for each in repairs] == (taken * NUM_LOSSES)[:NUM_LOSSES]
    first, *_, final = held[SETTLED - 1 :]
    assert first.keys() == final.keys() and len(first) >= 4
    for name, counts_of_process in final.items():
        assert all(
            new <= _MOST * old for old, new in zip(first[name], counts_of_process, strict=True)
        ), (name, held)
    assert repaired.digests() == repaired.reference()


def wait_for_counted(folder: Path, iteration: int) -> None:
    """Wait until some process has logged an iteration."""

    def is_there() -> bool:
        return any(iteration in counts(path) for path in folder.iterdir())

    wait_for(is_there, f"iteration {iteration}", DEADLINE_S, poll_s=0.1)


def wait_for_spares(nodes: KeptNodes, number: int) -> None:
    """Wait until so many nodes have come as spares."""
    wait_for(lambda: nodes.log("node0").count("is a spare") == number, f"spare {number}")


def held_on(nodes: KeptNodes) -> dict[str, tuple[int, int, int]]:
    """Return what each process of node 0 holds, as `held_by`, by its name and number."""
    found = {f"{each.name()} {each.pid}": held_by(each.pid) for each in nodes.processes("node0")}
    print(found, flush=True)
    return found
