"""Jobs that lose and get ranks: same samples, same bits, who waits, and where the state comes from."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.datasets.gpt_dataset import MockGPTDataset
from megatron.training import get_args

from megatron.fault_tolerance.program import forward_step
from moe_ft.events import event_path
from tests.demo_model import event_flags, model_flags
from tests.harness import JobResult, digests, events
from tests.kept_nodes import KeptNodes
from tests.nodes import Nodes
from tests.relayouts import ANY, Layout, LayoutJob, check_same, losses_of, train_and_dump
from tests.shares import share_of
from tests.waiting import wait_for

ELASTIC = ("--moe-ft-elastic", *ANY)
BATCH = 16
_SAMPLE = "number_of_sample"
NODES = ("n0", "n1", "n2", "n3")
Samples = dict[int, list[int]]  # by iteration, in the order of micro-batches and ranks


def train_and_note(flags: list[str], folder: str) -> None:
    """Train on this rank, and note the samples that it reads in every iteration."""
    original, read = MockGPTDataset.__getitem__, forward_step._read_batch
    noted: list[tuple[int, list[int]]] = []

    def numbered(self: Any, index: int) -> Any:
        return {**original(self, index), _SAMPLE: torch.tensor(index)}

    def noting(data: Iterator[Any]) -> Iterator[Any]:
        each = next(data)
        noted.append((get_args().curr_iteration, each[_SAMPLE].tolist()))
        torch.save(noted, Path(folder) / f"samples_{get_args().rank}.pt")
        yield each

    def read_batch(data: Iterator[Any], *others: Any) -> Any:
        return read(noting(data), *others)

    with (
        patch.object(MockGPTDataset, "__getitem__", numbered),
        patch.object(forward_step, "_read_batch", read_batch),
    ):
        train_and_dump(flags, folder)


class ElasticJob(LayoutJob):
    """Job of data-parallel ranks, each on a node of its own, whose starts have any number of ranks."""

    def __init__(self, folder: Path, memory_dir: Path, **common: Any) -> None:
        model = {"calculate_per_token_loss": True, "num_layers": 2, "global_batch_size": BATCH}
        super().__init__(folder, memory_dir, **{**model, **common})
        self.train = train_and_note

    def start_with(self, num_ranks: int, *flags: str) -> JobResult:
        """Start the job on the first nodes."""
        layout = Layout(ranks=num_ranks)
        return self.run(layout, *ELASTIC, *flags, nodes=NODES[:num_ranks])

    def lose(self, node: str) -> None:
        """Remove the memory of a node."""
        shutil.rmtree(self.memory / "job" / node)

    def samples(self, num_ranks: int) -> Samples:
        """Return the samples of all iterations of the last start."""
        found: dict[int, list[list[list[int]]]] = {}
        for rank in range(num_ranks):
            rows: dict[int, list[list[int]]] = {}
            for iteration, cell in torch.load(self.start / f"samples_{rank}.pt"):
                rows.setdefault(iteration, []).append(cell)
            for iteration, cells in rows.items():
                found.setdefault(iteration, []).append(cells)
        return {
            iteration: [
                sample for row in zip(*ranks, strict=True) for cell in row for sample in cell
            ]
            for iteration, ranks in found.items()
        }


EXACT = {
    # A loss that a micro-batch decides by itself, such as the balancing loss, depends on the cells.
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "bf16": False,
}
# Ranks of each start, which ends after two more iterations; the last one trains to the end.
STARTS = (4, 3, 2, 4)


def run_all(job: ElasticJob) -> list[Any]:
    """Run the starts, each with the node lost that was there last; return losses and tensors of each."""
    found: list[Any] = []
    before = 0
    for number, num_ranks in enumerate(STARTS):
        reached = 2 * number
        expected = job.left() if reached else {}
        for node in NODES[num_ranks:before]:
            job.lose(node)
        flags = ("--exit-interval", str(reached + 2), "--moe-ft-replication-factor", "3")
        result = job.start_with(num_ranks, *flags).check()
        lowered = f"--moe-ft-replication-factor=3: {num_ranks - 1} as long as there are no more"
        assert (lowered in result.output(0)) == (num_ranks < 4)
        live = job.live(Layout(ranks=num_ranks)) if reached else {}
        if reached:
            check_same(expected, live)
            for rank in range(num_ranks):
                assert job.recovery(rank)["restored_iteration"] == reached
                (event,) = events(job.start, rank, "elastic")
                expected_fields = {
                    "from": before,
                    "to": num_ranks,
                    "waiting": [],
                    "iteration": reached,
                    "evaluation_samples": BATCH - BATCH % (2 * num_ranks),
                }
                assert event.items() >= expected_fields.items()
        batches = {
            iteration: list(range(iteration * BATCH, (iteration + 1) * BATCH))
            for iteration in (reached, reached + 1)
        }
        assert job.samples(num_ranks) == batches
        found.append((losses_of(job.start), live, digests(job.start, num_ranks)))
        before = num_ranks
    return found


SLOTS = {"num_experts": 4, "moe_ft_expert_slots": 3, "moe_ft_rebalance_interval": 1}


@pytest.mark.parametrize("experts", share_of(({}, SLOTS), {}), ids=("stock", "slots"))
def test_a_job_of_four_three_two_and_four_ranks_reads_every_sample_once_and_learns_the_same(
    tmp_path: Path, memory_dir: Path, experts: dict[str, Any]
) -> None:
    job = ElasticJob(tmp_path, memory_dir, **EXACT, **experts)
    losses = {each: loss for found, *_ in run_all(job) for each, loss in found.items()}
    assert losses == pytest.approx(job.undisturbed(Layout(ranks=4)), rel=2e-6)


@pytest.mark.rest
def test_ranks_that_share_experts_learn_the_same_from_uneven_cells(
    tmp_path: Path, memory_dir: Path
) -> None:
    model = {**EXACT, "train_iters": 4, "global_batch_size": 12, "num_experts": 4}
    job = ElasticJob(tmp_path, memory_dir, **model)
    pairs = Layout(ranks=4, sizes={"ep": 2})
    result = job.run(pairs, *ELASTIC, nodes=NODES).check()
    assert "12 samples are 2 micro-batches of 4 ranks, 1 to 2 samples each" in result.output(0)
    assert job.samples(4) == {each: list(range(each * 12, each * 12 + 12)) for each in range(4)}
    even = Layout(ranks=2, sizes={"ep": 2})
    assert losses_of(job.start) == pytest.approx(job.undisturbed(even), rel=2e-6)


@pytest.mark.rest
def test_the_same_losses_of_nodes_twice_give_the_same_bits(
    tmp_path: Path, memory_dir: Path
) -> None:
    found = []
    for name in ("first", "second"):
        found.append(run_all(ElasticJob(tmp_path / name, memory_dir)))
        shutil.rmtree(memory_dir)
    for (losses, live, digest), (losses_again, live_again, digest_again) in zip(
        *found, strict=True
    ):
        assert losses == losses_again and digest == digest_again
        if live:
            check_same(live, live_again)


STRATEGIES = {
    "sparse": ("--moe-ft-strategy", "sparse", "--moe-ft-window", "3"),
    "partial": ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "2"),
    "gradients": ("--moe-ft-replicate", "gradients"),
    "breakpoints": ("--moe-ft-breakpoints",),
}


@pytest.mark.rest
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_that_die_and_come_back_learn_the_same_with_other_strategies(
    tmp_path: Path, memory_dir: Path, name: str
) -> None:
    model = {**EXACT, "train_iters": 12, "num_experts": 4}
    job = ElasticJob(tmp_path, memory_dir, **model)
    losses: dict[int, float] = {}
    # Three ranks have cells of several sizes.
    for num_ranks, end in ((4, 5), (3, 9), (4, 12)):
        dies = ("--moe-ft-inject-fault", f"kill:{num_ranks - 1}@{end}:forward") * (end < 12)
        flags = ("--moe-ft-replication-factor", "3", *STRATEGIES[name], *dies)
        result = job.start_with(num_ranks, *flags)
        assert all(result.exit_codes) == bool(dies), result.output(0)
        for recovery in (job.recovery(rank) for rank in range(num_ranks) if losses):
            # The newest window of `sparse` has three snapshots, and may not be complete.
            assert max(losses) - 4 <= recovery["target_iteration"] <= max(losses)
            assert bool(recovery["lost_tokens"]) == (name == "partial")
            assert recovery["sources"].keys() <= {"memory", "peer"}
        losses |= losses_of(job.start)
        if num_ranks == 4 and dies:
            job.lose("n3")
    wanted = job.undisturbed(Layout(ranks=4))
    assert losses == pytest.approx(wanted, rel=1e-2 if name == "partial" else 2e-6)


@pytest.mark.rest
def test_ranks_that_do_not_make_a_whole_model_wait_and_end_with_the_others(
    tmp_path: Path, memory_dir: Path
) -> None:
    job = ElasticJob(tmp_path, memory_dir, num_layers=2, train_iters=4)
    ep4 = Layout(ranks=4, sizes={"ep": 4})
    job.run(ep4, *ELASTIC, "--exit-interval", "2", nodes=NODES).check()
    expected = job.left()
    job.lose("n3")
    three = Layout(ranks=3, sizes={"ep": 4})
    result = job.run(three, *ELASTIC, nodes=NODES[:3]).check()
    assert "experts are on 2 ranks each" in result.output(0)
    assert "2 of 3 ranks train, and ranks 2 to 2 wait" in result.output(0)
    assert "rank 2 waits" in result.output(2) and not event_path(job.start, 2).exists()
    (event,) = events(job.start, 1, "elastic")
    assert (event["from"], event["to"], event["waiting"]) == (4, 2, [2])
    check_same(expected, job.live(Layout(ranks=2)))
    assert max(losses_of(job.start)) == 4


def _changes(folder: Path, rank: int = 0) -> list[tuple[int, int, list[int]]]:
    found = events(folder, rank, "elastic")
    return [(line["from"], line["to"], line["waiting"]) for line in found]


def _has_trained(folder: Path, world_size: int) -> bool:
    """Return whether an iteration is complete of a start with so many ranks, the last one."""
    if not event_path(folder, 0).exists():
        return False
    lines = [line for line in events(folder, 0) if line["event"] in ("start", "iteration")]
    starts = [line for line in lines if line["event"] == "start"]
    return bool(
        starts and starts[-1]["world_size"] == world_size and lines[-1]["event"] == "iteration"
    )


@pytest.mark.rest
def test_nodes_of_torchrun_are_lost_and_join_while_the_others_train(
    tmp_path: Path, memory_dir: Path
) -> None:
    model = {"num_layers": 2, "train_iters": 300, "calculate_per_token_loss": True}
    words = [
        *("pretrain_gpt_moe.py", *model_flags(**model), *ELASTIC),
        *("--mock-data", "--moe-ft-strategy", "dense", "--moe-ft-interval", "1"),
        *("--moe-ft-memory-dir", str(memory_dir), *event_flags(tmp_path / "events")),
    ]
    log = tmp_path / "events"
    with Nodes(
        tmp_path, words, num_nodes=3, num_ranks=3, max_restarts=3, fewest=1, keeps=True
    ) as nodes:
        nodes.start("node0", "node1", "node2")
        wait_for(lambda: _has_trained(log, 3), "training on three nodes", 200)
        wait_for(lambda: _has_peers_of(log, 1), "replicas", 200)
        nodes.kill("node2")
        shutil.rmtree(memory_dir / "nodes" / "node2")
        wait_for(lambda: _has_trained(log, 2), "training on two nodes", 200)
        nodes.start("node3")
        wait_for(lambda: _has_trained(log, 3), "training on three nodes again", 200)
        assert nodes.wait()[:2] == [0, 0], nodes.log("node0")[-3000:]
    # On a busy machine the first start may have gone without the last agents.
    assert _changes(log)[-2:] == [(3, 2, []), (2, 3, [])]
    shrunk, grown = events(log, 0, "recovery")[-2:]
    assert shrunk["sources"].keys() <= {"memory", "peer"} >= grown["sources"].keys()
    assert "16 samples are 3 micro-batches of 3 ranks, 1 to 2 samples each" in "".join(
        nodes.log(node) for node in ("node0", "node1", "node3")
    )


def train_impatiently(flags: list[str], folder: str) -> None:
    """Train on this rank, and wait for nodes no longer than a moment."""
    with patch("moe_ft.recovery.start._WAIT_S", 0.1):
        train_and_dump(flags, folder)


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
@pytest.mark.parametrize("has_storage", [True, False])
def test_state_that_no_node_has_is_taken_from_storage_or_waited_for(
    tmp_path: Path, memory_dir: Path, has_storage: bool
) -> None:
    job = ElasticJob(tmp_path, memory_dir)
    job.train = train_impatiently
    storage = ("--moe-ft-persist-dir", str(job.storage)) if has_storage else ()
    flags = ("--moe-ft-replication-factor", "1", *storage)
    often = ("--moe-ft-persist-interval", "2") if has_storage else ()
    killed = job.start_with(4, *flags, *often, "--moe-ft-inject-fault", "kill:3@7:forward")
    assert any(killed.exit_codes)
    for node in ("n1", "n2"):  # of which the second one keeps the replicas of the first one
        job.lose(node)
    two = Layout(ranks=2)
    result = job.run(two, *ELASTIC, *flags, nodes=("n0", "n3"))
    newer = re.search(r"iteration [67]: .*rank 1", result.output(0))
    assert newer, result.output(0)
    assert any(result.exit_codes) != has_storage
    if has_storage:
        recovery = job.recovery()
        assert "storage" in recovery["sources"] and recovery["restored_iteration"] in (4, 6)
        assert "what may be newer is not used" in result.output(0)
    else:
        assert "waiting for nodes, at most 0 s: there is state of this job" in result.output(0)


def _has_peers_of(log: Path, iteration: int) -> bool:
    """Return whether all three ranks have sent a state of this iteration or a later one."""
    sent = [[each["iteration"] for each in events(log, rank, "replicate")] for rank in range(3)]
    return all(max(each, default=0) >= iteration for each in sent)


def test_nodes_of_keep_are_lost_and_come_back_while_the_others_train(
    tmp_path: Path, memory_dir: Path
) -> None:
    model = {"num_layers": 2, "train_iters": 150, "calculate_per_token_loss": True}
    log = tmp_path / "events"
    words = [
        *("pretrain_gpt_moe.py", *model_flags(**model), *ELASTIC, "--mock-data"),
        *("--moe-ft-strategy", "dense", "--moe-ft-interval", "1", "--moe-ft-repair", "auto"),
        *("--moe-ft-memory-dir", str(memory_dir), *event_flags(log)),
        *("--moe-ft-inject-fault", "kill:1@3:backward"),
    ]
    with KeptNodes(tmp_path, words, num_nodes=3, ranks_per_node=1, fewest=2) as nodes:
        nodes.start("node0", "node1", "node2")
        wait_for(lambda: _has_trained(log, 3), "training on three nodes", 200)
        # Its cells are not the size of the others'.
        wait_for(lambda: events(log, 0, "repair"), "the repair of rank 1", 200)
        wait_for(lambda: _has_peers_of(log, 4), "replicas of what came after it", 200)
        nodes.kill("node2")
        shutil.rmtree(memory_dir / "nodes" / "node2")
        wait_for(lambda: _has_trained(log, 2), "training on two nodes", 200)
        nodes.start("node2", first=2)
        wait_for(lambda: _has_trained(log, 3), "training on three nodes again", 200)
        codes = nodes.wait()
        assert codes == {"node0": 0, "node1": 0, "node2": 0}, nodes.log("node0")[-3000:]
    assert _changes(log) == [(3, 2, []), (2, 3, [])]
    (repair,) = events(log, 0, "repair")
    assert repair["dead_ranks"] == [1]
    repaired, shrunk, grown = events(log, 0, "recovery")
    assert repaired["restored_iteration"] < shrunk["restored_iteration"]
    assert shrunk["sources"].keys() <= {"memory", "peer"} >= grown["sources"].keys()


@pytest.mark.rest
def test_spares_begin_again_from_storage_when_all_nodes_that_train_are_lost(
    tmp_path: Path, memory_dir: Path
) -> None:
    model = {"num_layers": 2, "train_iters": 60, "calculate_per_token_loss": True}
    log = tmp_path / "events"
    words = [
        *("pretrain_gpt_moe.py", *model_flags(**model), *ELASTIC, "--mock-data"),
        *("--moe-ft-strategy", "dense", "--moe-ft-interval", "1", "--moe-ft-repair", "auto"),
        *("--moe-ft-persist-dir", str(tmp_path / "storage"), "--moe-ft-persist-interval", "2"),
        *("--moe-ft-memory-dir", str(memory_dir), *event_flags(log)),
    ]
    with KeptNodes(tmp_path, words, num_nodes=2, ranks_per_node=1, fewest=1, store=4) as nodes:
        nodes.start("node0", "node1", "node2", "node3", "node4")
        wait_for(lambda: event_path(log, 0).exists() and events(log, 0, "persist"), "storage", 200)
        for name in ("node0", "node1"):
            nodes.kill(name)
            shutil.rmtree(memory_dir / "nodes" / name)
        codes = nodes.wait()
        assert codes == dict.fromkeys(("node2", "node3", "node4"), 0), nodes.log("node4")[-3000:]
    why = "no rank is left that knows where training is"
    assert re.search(rf"begin again on nodes node[23], node[23]: {why}", nodes.log("node4"))
    for rank in (0, 1):
        (recovery,) = events(log, rank, "recovery")
        assert set(recovery["sources"]) == {"storage"} and recovery["restored_iteration"] >= 2
