"""Jobs that continue in another layout: the runs of tests/layout_array.py, and failures around the change."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_ft.convert.source import open_source
from tests.layout_array import LAYOUTS, PRECISIONS, LayoutCase, cases, chosen
from tests.relayouts import ANY, Layout, LayoutJob, check_same, losses_of
from tests.shares import share_of

KILL = 4
PP2_EP2, EP4, EP2 = (LAYOUTS[name] for name in ("pp2-ep2", "ep4", "ep2"))
TP2 = Layout(ranks=2, sizes={"tp": 2}, changes={"sequence_parallel": True})
DP2 = Layout(ranks=2)
BUCKETS = Layout(ranks=2, changes={"overlap_grad_reduce": True, "ddp_bucket_size": 20000})
OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "use_precision_aware_optimizer": True,
}
# Circumstances that the array lacks.
OTHERS: dict[str, tuple[Layout, Layout, dict[str, Any]]] = {
    "buckets": (DP2, BUCKETS, {}),
    "offloaded": (PP2_EP2, EP2, OFFLOADED),
    "muon": (PP2_EP2, EP2, {"optimizer": "muon"}),
    "no-moments": (
        PP2_EP2,
        EP2,
        {**PRECISIONS["fp16"], "initial_loss_scale": 2.0**42, "hysteresis": 1},
    ),
}


def kill(rank: int, iteration: int = KILL, phase: str = "backward") -> tuple[str, str]:
    return "--moe-ft-inject-fault", f"kill:{rank}@{iteration}:{phase}"


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("case", share_of(cases(), *chosen()), ids=str)
def test_a_job_that_changes_its_layout_and_is_killed_right_after_continues_bit_for_bit(
    tmp_path: Path, memory_dir: Path, case: LayoutCase
) -> None:
    job = LayoutJob(tmp_path, memory_dir, **case.common)
    flags, strategy = [*case.flags], case.strategy
    if case.tier == "storage":
        flags += ["--moe-ft-persist-dir", str(job.storage), "--moe-ft-persist-interval", "1"]
    if case.tier == "peer":
        flags += ["--moe-ft-replication-factor", "0"]
    # Storage then has a whole state. In memory each expert has been saved once, and windows are complete.
    end = ("--exit-interval", "6") if case.tier == "storage" else kill(case.before.ranks - 1, 6)
    nodes = case.nodes(case.before)
    job.run(case.before, *flags, *end, strategy=strategy, nodes=nodes)
    place = None
    if case.tier == "storage":
        place = job.storage
        shutil.rmtree(memory_dir, ignore_errors=True)
    # A window is no state of one iteration: it ends at the iteration of the kill, and runs again.
    expected, newest = ({}, 6) if case.has_window else (job.left(place), job.newest(place))
    nodes = case.nodes(case.after, is_turned=True)
    for fault in (kill(case.after.ranks - 1, newest, "forward"), ()):
        result = job.run(case.after, *flags, *ANY, *fault, strategy=strategy, nodes=nodes)
        assert any(result.exit_codes) == bool(fault), result.output(0)
        recoveries = [job.recovery(rank) for rank in range(case.after.ranks)]
        assert {each["target_iteration"] for each in recoveries} == {newest}
        assert case.tier in set().union(*(each["sources"] for each in recoveries))
        num_replays = 2 if case.has_window else 0
        assert recoveries[0]["restored_iteration"] == newest - num_replays
        if not case.has_window:
            check_same(expected, job.live(case.after))
    losses = losses_of(job.start)
    assert losses.keys() == {*range(newest + 1, 9)}
    if recoveries[0]["lost_tokens"] == 0:
        whole = job.undisturbed(case.before)
        assert losses == pytest.approx({each: whole[each] for each in losses}, rel=1e-4)


@pytest.mark.rest
@pytest.mark.parametrize("name", OTHERS)
def test_a_killed_job_continues_in_another_layout_bit_for_bit(
    tmp_path: Path, memory_dir: Path, name: str
) -> None:
    before, after, common = OTHERS[name]
    job = LayoutJob(tmp_path, memory_dir, **common)
    assert any(job.run(before, *kill(before.ranks - 1)).exit_codes)
    expected = job.left()
    job.run(after, *ANY).check()
    check_same(expected, job.live(after))
    recovery = job.recovery()
    assert recovery["restored_iteration"] in (KILL - 1, KILL)
    whole, losses = job.undisturbed(before), losses_of(job.start)
    assert losses == pytest.approx({each: whole[each] for each in losses}, rel=1e-4)


@pytest.mark.rest
def test_a_job_killed_right_after_a_change_of_layout_recovers_the_old_state_again_and_grows_back(
    tmp_path: Path, memory_dir: Path
) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    job.run(EP4, *kill(1))
    expected, newest = job.left(), job.newest()
    refused = job.run(EP2)
    assert all(refused.exit_codes)
    assert "--expert-model-parallel-size: 4 there, 2 now" in refused.output(0)
    assert "add --moe-ft-layout any" in refused.output(0)
    assert any(job.run(EP2, *ANY, *kill(1, newest, "forward")).exit_codes)
    assert job.recovery()["restored_iteration"] == newest
    check_same(expected, job.live(EP2))
    assert any(job.run(EP2, *ANY, "--moe-ft-interval", "50", *kill(0, newest + 3)).exit_codes)
    assert job.recovery()["restored_iteration"] == newest
    check_same(expected, job.live(EP2))
    # The first window of the new layout is taken at once, whatever the interval.
    expected = job.left()
    job.run(EP4, *ANY).check()
    assert job.recovery()["restored_iteration"] == newest + 1
    check_same(expected, job.live(EP4))


@pytest.mark.rest
def test_half_of_the_ranks_continue_after_a_node_and_its_memory_are_lost(
    tmp_path: Path, memory_dir: Path
) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    nodes = ("n0", "n0", "n1", "n1")
    job.run(PP2_EP2, "--moe-ft-replication-factor", "1", *kill(3, KILL + 1), nodes=nodes)
    shutil.rmtree(memory_dir / "job" / "n1")
    expected = job.left()
    job.run(EP2, *ANY, nodes=("n0", "n0")).check()
    check_same(expected, job.live(EP2))
    assert [set(job.recovery(rank)["sources"]) for rank in range(2)] == [{"memory"}] * 2


@pytest.mark.rest
def test_breakpoints_of_another_layout_are_used_and_stay_until_there_is_a_snapshot(
    tmp_path: Path, memory_dir: Path
) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    flags = ("--moe-ft-breakpoints", "--moe-ft-interval", "3")
    fault = ("--moe-ft-inject-fault", "terminate:0@5:backward")
    job.run(PP2_EP2, *flags, *fault)
    expected, newest = job.left(), job.newest()
    assert newest % 3, "no snapshot is of this iteration"
    for starts_again in (True, False):
        again = kill(1, newest, "forward") if starts_again else ()
        result = job.run(EP2, *flags, *ANY, *again)
        assert any(result.exit_codes) == starts_again
        assert job.recovery()["restored_iteration"] == newest
        check_same(expected, job.live(EP2))


@pytest.mark.rest
@pytest.mark.parametrize("after", [EP4, EP2], ids=str)
def test_experts_of_several_ages_keep_their_ages_in_another_layout(
    tmp_path: Path, memory_dir: Path, after: Layout
) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    flags = ("--moe-ft-k-snapshot", "1")
    job.run(PP2_EP2, *flags, *kill(3, 7), strategy="partial")
    expected = job.left()
    saved = tmp_path / "saved"
    shutil.copytree(memory_dir, saved)
    job.run(PP2_EP2, *flags, strategy="partial").check()
    same = job.recovery()
    shutil.rmtree(memory_dir)
    shutil.copytree(saved, memory_dir)
    for again in (kill(1, same["restored_iteration"], "forward"), ()):
        job.run(after, *flags, *ANY, *again, strategy="partial")
        check_same(expected, job.live(after))
        found = job.recovery()
        assert [found[key] for key in ("restored_iteration", "lost_tokens", "plt")] == [
            same[key] for key in ("restored_iteration", "lost_tokens", "plt")
        ]
    assert max(losses_of(job.start)) == 8


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_the_first_checkpoint_after_a_change_holds_every_expert(
    tmp_path: Path, memory_dir: Path
) -> None:
    job = LayoutJob(tmp_path, memory_dir, train_iters=12)
    storage = ("--moe-ft-persist-dir", str(job.storage), "--moe-ft-persist-interval", "2")
    flags = ("--moe-ft-k-snapshot", "1", *storage)
    job.run(PP2_EP2, *flags, *kill(1, 6), strategy="partial")
    job.run(EP2, *flags, *ANY, *kill(1, 10), strategy="partial")
    shutil.rmtree(memory_dir, ignore_errors=True)
    job.run(EP2, *flags, *ANY, strategy="partial").check()
    recovery = job.recovery()
    experts = 4 * 4 // 2  # of each rank
    others = len(open_source(str(job.storage)).ranks[0].index.units) - experts
    assert recovery["sources"] == {"storage": experts + others}
