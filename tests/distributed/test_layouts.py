"""Jobs that continue in another layout: a list of pairs of layouts, tiers, and failures around the change."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from moe_ft.convert.source import open_source
from tests.demo_model import DEEPSEEK
from tests.relayouts import ANY, Layout, LayoutJob, check_same, losses_of
from tests.shares import share_of

KILL = 4
TIED = {"untie_embeddings_and_output_weights": False}
HALF = {"bf16": False, "fp16": True, "initial_loss_scale": 65536}
PLAIN = {"use_distributed_optimizer": False}
SEQUENCE = {"sequence_parallel": True}
BIASED = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0,
}
DEEP = {**DEEPSEEK, "num_layers": 4, "moe_layer_freq": "([0]*1+[1]*3)"}
GROUPED = {"group_query_attention": True, "num_query_groups": 2, "add_qkv_bias": True}
NO_MOMENTS = {**HALF, "initial_loss_scale": 2.0**42, "hysteresis": 1}
ODD = {"global_batch_size": 12, "micro_batch_size": 1}

PP2_EP2 = Layout(ranks=4, sizes={"pp": 2, "ep": 2})
EP4 = Layout(ranks=4, sizes={"ep": 4})
EP2 = Layout(ranks=2, sizes={"ep": 2})
TP2 = Layout(ranks=2, sizes={"tp": 2}, changes=SEQUENCE)
TP2_EP2 = Layout(ranks=4, sizes={"tp": 2, "ep": 2, "etp": 1}, changes=SEQUENCE)
PP2 = Layout(ranks=2, sizes={"pp": 2})
VPP2 = Layout(ranks=2, sizes={"pp": 2}, changes={"num_layers_per_virtual_pipeline_stage": 1})
DP3 = Layout(ranks=3)
DP2 = Layout(ranks=2)
DP2_PLAIN = Layout(ranks=2, changes=PLAIN)
EP2_PLAIN = Layout(ranks=2, sizes={"ep": 2}, changes=PLAIN)
PP2_PLAIN = Layout(ranks=2, sizes={"pp": 2}, changes=PLAIN)
BUCKETS = Layout(ranks=2, changes={"overlap_grad_reduce": True, "ddp_bucket_size": 20000})
EP2_OF_4 = Layout(ranks=4, sizes={"ep": 2})

Pair = tuple[Layout, Layout, dict[str, Any]]
PAIRS: dict[str, Pair] = {
    "pp2ep2-ep4": (PP2_EP2, EP4, {}),
    "ep4-pp2ep2-bias": (EP4, PP2_EP2, BIASED),
    "pp2ep2-ep2-fewer-bias": (PP2_EP2, EP2, BIASED),
    "ep4-dp3": (EP4, DP3, ODD),
    "ep2-tp2": (EP2, TP2, {}),
    "tp2-pp2-query-groups": (TP2, PP2, GROUPED),
    "tp2ep2-ep4": (TP2_EP2, EP4, {}),
    "pp2-vpp2-tied": (PP2, VPP2, TIED),
    "dp2-buckets": (DP2, BUCKETS, {}),
    "ep2-plain": (EP2_OF_4, DP2_PLAIN, {}),
    "plain-pp2ep2-fp16": (EP2_PLAIN, PP2_EP2, HALF),
    "plain-ep4-fp32": (PP2_PLAIN, EP4, {"bf16": False}),
    "deepseek-pp2-ep2": (PP2, EP2, DEEP),
    "deepseek-ep2-tp2": (EP2, TP2, DEEP),
    "no-moments": (PP2_EP2, EP2, NO_MOMENTS),
}


def kill(rank: int, iteration: int = KILL, phase: str = "backward") -> tuple[str, str]:
    return "--moe-ft-inject-fault", f"kill:{rank}@{iteration}:{phase}"


@pytest.mark.parametrize("name", share_of(PAIRS, "pp2ep2-ep4"))
def test_a_killed_job_continues_in_another_layout_bit_for_bit(
    tmp_path: Path, memory_dir: Path, name: str
) -> None:
    before, after, common = PAIRS[name]
    job = LayoutJob(tmp_path, memory_dir, **common)
    assert any(job.run(before, *kill(before.ranks - 1)).exit_codes)
    expected = job.left()
    job.run(after, *ANY).check()
    check_same(expected, job.live(after))
    recovery = job.recovery()
    assert recovery["restored_iteration"] in (KILL - 1, KILL)
    assert set(recovery["sources"]) == {"memory"}
    whole, losses = job.undisturbed(before), losses_of(job.start)
    assert losses.keys() == {*range(recovery["restored_iteration"] + 1, 9)}
    assert losses == pytest.approx({each: whole[each] for each in losses}, rel=1e-4)


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


def test_half_of_the_ranks_continue_after_a_node_and_its_memory_are_lost(
    tmp_path: Path, memory_dir: Path
) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    nodes = ("n0", "n0", "n1", "n1")
    job.run(PP2_EP2, "--moe-ft-replication-factor", "1", *kill(3, KILL + 1), nodes=nodes)
    expected = job.left()
    shutil.rmtree(memory_dir / "job" / "n1")
    job.run(EP2, *ANY, nodes=("n0", "n0")).check()
    check_same(expected, job.live(EP2))
    assert [set(job.recovery(rank)["sources"]) for rank in range(2)] == [{"memory"}] * 2


@pytest.mark.rest
def test_ranks_read_from_nodes_that_keep_what_they_need(tmp_path: Path, memory_dir: Path) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    nodes = ("n0", "n0", "n1", "n1")
    job.run(PP2_EP2, "--moe-ft-replication-factor", "0", *kill(3, KILL + 1), nodes=nodes)
    expected = job.left()
    job.run(EP4, *ANY, "--moe-ft-replication-factor", "1", nodes=nodes[::-1]).check()
    check_same(expected, job.live(EP4))
    tiers = set().union(*(job.recovery(rank)["sources"] for rank in range(4)))
    assert tiers == {"memory", "peer"}


@pytest.mark.rest
def test_state_of_another_layout_is_read_from_storage_where_memory_is_gone(
    tmp_path: Path, memory_dir: Path
) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    flags = ("--moe-ft-persist-dir", str(job.storage), "--moe-ft-persist-interval", "2")
    job.run(PP2_EP2, *flags, "--exit-interval", "4").check()
    expected = job.left(job.storage)
    shutil.rmtree(memory_dir, ignore_errors=True)
    job.run(TP2, *ANY, *flags).check()
    check_same(expected, job.live(TP2))
    assert set(job.recovery()["sources"]) == {"storage"}


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


@pytest.mark.rest
def test_a_window_is_run_again_in_another_layout(tmp_path: Path, memory_dir: Path) -> None:
    job = LayoutJob(tmp_path, memory_dir)
    flags = ("--moe-ft-window", "3")
    job.run(PP2_EP2, *flags, *kill(3, 7), strategy="sparse")
    job.run(EP2, *flags, *ANY, strategy="sparse").check()
    recovery = job.recovery()
    assert recovery["target_iteration"] - recovery["restored_iteration"] == 2
    whole, losses = job.undisturbed(PP2_EP2), losses_of(job.start)
    assert losses == pytest.approx({each: whole[each] for each in losses}, rel=1e-4)
