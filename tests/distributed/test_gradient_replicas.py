"""Replicas that peers make of gradients: bit for bit the owner's state, and sent as state where in doubt."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from tests.jobs import NUM_RANKS, TWO_NODES, CheckpointJob
from tests.partial_runs import PARTIAL
from tests.shares import share_of

FOLLOWED = ("--moe-ft-replicate", "gradients")
# Flags of each job, and how many times smaller its gradients are than its state.
FP32 = {"bf16": False}
FP16 = {"bf16": False, "fp16": True, "initial_loss_scale": 2.0**26, "loss_scale_window": 4}
BF16_REDUCED = {"grad_reduce_in_bf16": True}
PLAIN = {"use_distributed_optimizer": False}
# A rank has a half of every expert, and the second one begins in the middle.
SLOTS = {"moe_ft_expert_slots": 3, "moe_ft_rebalance_interval": 1}
COMMON = {"weight_decay": 0.1, "clip_grad": 0.4, "lr_decay_style": "cosine", "min_lr": 1e-5}
JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "bf16": ({}, 3),
    "bf16, plain": (PLAIN, 3),
    "bf16, reduced in bf16": (BF16_REDUCED, 6),
    "bf16, reduced in bf16, plain": (BF16_REDUCED | PLAIN, 6),
    "fp32": (FP32, 3),
    "fp32, plain": (FP32 | PLAIN, 3),
    "fp16": (FP16, 6),
    "fp16, plain": (FP16 | PLAIN, 6),
    "bf16, slots": (SLOTS, 3),
    "fp16, plain, slots": (FP16 | PLAIN | SLOTS, 6),
}


def set_model(job: CheckpointJob, changes: dict[str, Any], num_iterations: int) -> None:
    small = {"num_layers": 2, "hidden_size": 32, "moe_ffn_hidden_size": 32, "global_batch_size": 4}
    common = {**COMMON, "train_iters": num_iterations, "lr_decay_iters": num_iterations, **small}
    layout = {} if "moe_ft_expert_slots" in changes else {"ep": 2}
    job.set_model(NUM_RANKS, layout, **{**common, **changes})


def regions(memory: Path, pattern: str) -> Iterator[tuple[tuple[int, int], dict[str, bytes]]]:
    """Yield rank and iteration of whole regions, with the bytes of their units."""
    for path in memory.glob(f"*/{pattern}/region_*.json"):
        index = decode(path.read_bytes(), Index, str(path))
        content = path.with_name(index.file).read_bytes()  # without what lies in slots
        units = {
            name: content[unit.offset : unit.offset + unit.num_bytes]
            for name, unit in index.units.items()
            if not unit.file
        }
        yield (index.rank, index.iteration), units


def check_sent(job: CheckpointJob, rank: int) -> list[dict[str, Any]]:
    """Return the replicas of the first start; state was sent where there was no base, and only there."""
    sent = [line for line in job.events("replicate", rank) if not line["incarnation"]]
    skipped = {line["iteration"] for line in job.events("skipped", rank)}
    for line in sent:
        if "the optimizer has not stepped before" in line["fallbacks"].values():
            continue  # its first steps may overflow
        has_base = line["iteration"] > 1 and line["iteration"] - 1 not in skipped
        assert has_base == (line["fallbacks"] == {}), line
    return sent


SHORT = (("bf16, slots", 24), ("fp16, plain, slots", 24))
LENGTHS = [*SHORT, *((name, 250) for name in JOBS)]


@pytest.mark.parametrize("length", share_of(LENGTHS, SHORT[1]), ids=str)
def test_replica_made_of_gradients_is_the_state_of_its_owner_bit_for_bit(
    job: CheckpointJob, length: tuple[str, int]
) -> None:
    name, num_iterations = length
    changes, factor = JOBS[name]
    set_model(job, changes, 2 * num_iterations)
    job.run(*FOLLOWED, "--exit-interval", str(num_iterations), nodes=TWO_NODES).check()
    memory = job.memory_dir / "test"
    own, kept = (dict(regions(memory, each)) for each in ("rank_?????", "*_at_*"))
    assert max(iteration for _, iteration in kept) == num_iterations
    assert len(kept) == 2 * NUM_RANKS
    assert kept == own
    for rank in range(NUM_RANKS):
        sent = check_sent(job, rank)
        by_gradients = [each for each in sent if each["gradient_bytes"]]
        assert len(by_gradients) > num_iterations // 3
        for line in by_gradients:
            assert line["gradient_bytes"] == pytest.approx(sent[0]["bytes"] / factor, rel=0.1)
        has_skipped = any(not each["bytes"] for each in sent)  # a step: then nothing is sent
        assert has_skipped == ("fp16" in name)


# A rank has 150 kB besides 4 experts of 37 kB each.
SELECTIVE = (
    *("--moe-ft-strategy", "selective"),
    *("--moe-ft-local-budget", "265000", "--moe-ft-remote-budget", "140000"),
)
TURNS = {
    "partial": (*PARTIAL, "--moe-ft-k-snapshot", "1"),
    "selective": (*SELECTIVE, "--moe-ft-selective-rule", "paper"),
}


@pytest.mark.rest
@pytest.mark.parametrize("strategy", TURNS)
def test_peers_follow_in_what_every_snapshot_holds_and_get_experts_that_take_turns_as_state(
    job: CheckpointJob, strategy: str
) -> None:
    set_model(job, {}, 20)
    flags = (*TURNS[strategy], "--moe-ft-interval", "1", *FOLLOWED)
    job.run(*flags, "--exit-interval", "10", nodes=TWO_NODES).check()
    memory = job.memory_dir / "test"
    own, kept = (dict(regions(memory, each)) for each in ("rank_?????", "*_at_*"))
    common = own.keys() & kept.keys()
    assert {rank for rank, _ in common} == {0, 1}
    for rank in range(NUM_RANKS):
        sent = [line for line in check_sent(job, rank) if line["gradient_bytes"]]
        assert sent
        assert sum(line["state_bytes"] > 0 for line in sent) >= len(sent) - 1  # experts
    assert [kept[each] for each in sorted(common)] == [own[each] for each in sorted(common)]
    shutil.rmtree(memory / "node1")
    job.resume(*flags, nodes=TWO_NODES)
    assert "peer" in job.events("recovery", 1)[-1]["sources"]


PHASES = ("backward", "before-step", "in-step", "after-step", "snapshot", "replicate")


@pytest.mark.parametrize("phase", share_of(PHASES, "replicate"))
def test_node_that_dies_comes_back_from_its_peers_and_ends_in_the_state_of_an_undisturbed_run(
    job: CheckpointJob, phase: str
) -> None:
    set_model(job, {}, 12)
    expected = job.reference()
    job.run_with_faults(f"lose-node:1@8:{phase}", flags=FOLLOWED, nodes=lambda start: TWO_NODES)
    (found,) = job.recoveries
    assert found is not None
    assert found.tiers[1] == "peer"
    sent = check_sent(job, 1)[-1]
    assert (sent["state_bytes"], sent["gradient_bytes"] > 0) == (0, True)
    for rank in range(NUM_RANKS):
        assert any(line["gradient_bytes"] for line in check_sent(job, rank))
        later = [line for line in job.events("replicate", rank) if line["incarnation"]]
        assert any(line["gradient_bytes"] for line in later)
    assert job.digests() == expected


@pytest.mark.rest
def test_lost_message_costs_a_whole_state_and_then_gradients_follow_again(
    job: CheckpointJob,
) -> None:
    set_model(job, {}, 10)
    job.run(*FOLLOWED, "--moe-ft-inject-fault", "exception:0@5:replicate", nodes=TWO_NODES).check()
    (lost,) = job.events("degraded")
    assert (lost["part"], lost["iteration"]) == ("replicate", 5)
    sent = {line["iteration"]: line for line in job.events("replicate")}
    assert 5 not in sent
    assert sent[6]["fallbacks"] == {"1": "it is not known to have iteration 5"}
    assert sent[6]["state_bytes"] > 0 == sent[6]["gradient_bytes"]
    after = [line for at, line in sent.items() if at > 6 and not line["fallbacks"]]
    assert after
    assert all(line["gradient_bytes"] for line in after)


# By number of nodes, each with a rank: who is accused when a moment changes in the memory of rank 0.
ACCUSED = {2: ([0, 1], False), 4: ([0], True)}


@pytest.mark.rest
@pytest.mark.parametrize("num_nodes", ACCUSED)
def test_bit_that_changes_in_a_moment_is_found_by_peers_in_the_same_iteration(
    job: CheckpointJob, num_nodes: int
) -> None:
    set_model(job, {"global_batch_size": 8}, 8)
    job.num_ranks = num_nodes
    factor = ("--moe-ft-replication-factor", f"{min(2, num_nodes - 1)}")
    nodes = [f"node{number}" for number in range(num_nodes)]
    flip = ("--moe-ft-inject-fault", "flip:0@5:moment")
    job.run(*FOLLOWED, *factor, *flip, nodes=nodes).check()
    found = [line for rank in range(num_nodes) for line in job.events("corruption", rank)]
    accused = [(line["check"], line["iteration"], line["ranks"], line["decided"]) for line in found]
    assert accused == [("replica", 6, *ACCUSED[num_nodes])]
    later = [line for line in job.events("replicate") if line["iteration"] > 6]
    assert later and not any(line["fallbacks"] for line in later)


def slots(memory: Path, pattern: str) -> Iterator[tuple[tuple[int, str, int], bytes]]:
    """Yield rank, unit and iteration of the newest versions in slots, with their bytes."""
    newest: dict[int, tuple[Path, Index]] = {}
    for path in memory.glob(f"*/{pattern}/region_*.json"):
        index = decode(path.read_bytes(), Index, str(path))
        if index.iteration > (newest[index.rank][1].iteration if index.rank in newest else 0):
            newest[index.rank] = path, index
    for rank, (path, index) in newest.items():
        for name, unit in index.units.items():
            if unit.file:
                content = path.with_name(unit.file).read_bytes()
                yield (rank, name, unit.iteration), content[unit.offset :][: unit.num_bytes]


@pytest.mark.parametrize("length", share_of([24, 250], 24))
def test_experts_that_peers_follow_are_those_of_their_owners_bit_for_bit_and_come_back(
    job: CheckpointJob, length: int
) -> None:
    set_model(job, FP16, 2 * length)
    # A gradient has 2 bytes, where state has 12: 62 kB is the least. Of 4 bytes it would be 87 kB.
    flags = (*SELECTIVE[:-1], "80000", "--moe-ft-interval", "1", *FOLLOWED)
    job.run(*flags, "--exit-interval", str(length), nodes=TWO_NODES).check()
    memory = job.memory_dir / "test"
    own, kept = (dict(slots(memory, each)) for each in ("rank_?????", "*_at_*"))
    newest = max(iteration for _, _, iteration in kept)
    at_newest = {each for each in kept if each[2] == newest}
    assert {rank for rank, _, _ in at_newest} == {0, 1}
    assert {each: kept[each] for each in at_newest} == {each: own[each] for each in at_newest}
    for rank in range(NUM_RANKS):
        sent = [line for line in check_sent(job, rank) if line["followed"]]
        assert len(sent) > length // 3
        assert sent[-1]["followed"] == 2  # memory has room for three, of which one takes turns
        assert max(line["bytes"] for line in sent) <= 80_000
    shutil.rmtree(memory / "node1")
    job.resume(*flags, nodes=TWO_NODES)
    recovery = job.events("recovery", 1)[-1]
    assert (recovery["restored_iteration"], recovery["sources"]["peer"] > 0) == (newest, True)
