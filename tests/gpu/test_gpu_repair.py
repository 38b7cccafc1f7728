"""Repair in place on GPUs. Nothing here has run yet: docs/gpu_day.md says how to try it.

NCCL before 2.30 refuses two ranks on one GPU. With one GPU, backends are tried in one rank, and a repair over
gloo. With GPU_DAY_SHARED=1, and an NCCL and variables that allow it, ranks of repairs share the GPU.
"""

import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.repair.gloo import Gloo
from megatron.fault_tolerance.repair.links import Links
from megatron.fault_tolerance.repair.nccl import Nccl, set_variables
from megatron.fault_tolerance.repair.swap import Groups, Recipes
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import Member
from moe_ft.errors import LinksEndedError
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.gpu.determinism import deterministic_environment
from tests.harness import digests, events, run_ranks, run_training, run_with_restarts
from tests.jobs import (
    DENSE,
    LEAVING,
    LOCAL,
    NUM_REPAIRED,
    PHASES,
    SPARSE,
    CheckpointJob,
    RepairedJob,
    fault_flags,
)
from tests.kept_job import run_kept
from tests.references import Place, References

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
_HAS_TWO, _SHARES = torch.cuda.device_count() >= 2, os.environ.get("GPU_DAY_SHARED") == "1"
needs_two = pytest.mark.skipif(not _HAS_TWO, reason="needs two GPUs")
needs_two_ranks = pytest.mark.skipif(not _HAS_TWO and not _SHARES, reason="needs two GPUs")

NUM_ROUNDS = 20
TIMEOUT = timedelta(seconds=60)
MOST_GROWTH = 64 << 20
DEADLINE_S = 600.0
ON_ONE_GPU = "tools/gpu_day/one_gpu.py"


def renew_one_rank(folder: str) -> None:
    """Abort groups of NCCL of one rank, and put new backends under them, many times."""
    set_variables(os.environ)
    torch.cuda.set_device(0)
    recipes, member = Recipes(), Member(Assignment(rank=0, local_rank=0, world_size=1, node=""))
    links = Links(member, (Gloo(), Nccl()))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    with links.recording():
        store = dist.FileStore(f"{folder}/first", 1)
        recipes.make(dist.init_process_group, "nccl", store=store, rank=0, world_size=1)
        fast = recipes.make(dist.new_group, [0], pg_options=options)
        on_cpu = recipes.make(dist.new_group, [0], backend="gloo")
    groups = Groups(links.transports, recipes)
    groups.note()
    store, free, threads = dist.FileStore(f"{folder}/second", 1), [], []
    for number in range(1, NUM_ROUNDS + 1):
        value = torch.ones(1 << 20, device="cuda")
        for group in (None, fast):
            dist.all_reduce(value, group=group)
        dist.barrier(on_cpu)
        links.check()
        assert links.failure() == ""
        assert links.end(number - 1) >= 2
        with pytest.raises(LinksEndedError):
            links.check()
        with pytest.raises(RuntimeError, match="abort"):
            dist.all_reduce(value, group=fast)
        links.leave()
        groups.drop_later()
        member.round = number
        links.begin()
        with links.recording():
            groups.renew(store, number, TIMEOUT)
        backend = fast._get_backend(torch.device("cuda"))
        assert backend.options.is_high_priority_stream and backend.options.config.max_ctas == 8
        del backend
        free.append(torch.cuda.mem_get_info()[0])
        threads.append(len(os.listdir("/proc/self/task")))
    assert threads[-1] <= threads[1], threads
    assert free[1] - free[-1] < MOST_GROWTH, free
    sys.stdout.flush()
    os._exit(0)


def test_groups_of_nccl_are_aborted_and_renewed_and_hold_no_more_each_time(tmp_path: Path) -> None:
    env = deterministic_environment()
    run_ranks(renew_one_rank, 1, str(tmp_path), log_dir=tmp_path, env=env).check()


def use_fake_world() -> None:
    """Use the groups of a replacement before it meets the others."""
    torch.cuda.set_device(0)
    recipes = Recipes()
    world = {"store": FakeStore(), "rank": 1, "world_size": 2}
    recipes.make_fake(dist.init_process_group, default="nccl", backend="fake", **world)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group = recipes.make_fake(dist.new_group, [0, 1], pg_options=options)
    value = torch.tensor([3.0], device="cuda")
    dist.all_reduce(value, group=group)
    assert value.item() == 3.0
    found: list[object] = [None, None]
    dist.all_gather_object(found, "rank 1", group=group)
    assert found == ["rank 1"] * 2
    dist.barrier()
    dist.barrier(group, device_ids=[0])
    sys.stdout.flush()
    os._exit(0)


def test_fake_groups_of_nccl_exchange_nothing_on_a_gpu(tmp_path: Path) -> None:
    run_ranks(use_fake_world, 1, log_dir=tmp_path, env=deterministic_environment()).check()


class GpuJob:
    """Job of two ranks that is repaired, and the same job without a failure."""

    def __init__(self, place: Place) -> None:
        self._place, self._folder = place, place.folder

    def check(
        self,
        fault: str,
        recovered: set[int],
        *,
        strategy: Sequence[str] = DENSE,
        layout: dict[str, int],
        backend: str = "nccl",
        **changes: Any,
    ) -> None:
        """Run both, and compare. Over gloo, and where `_SHARES`, both ranks are on the first GPU."""
        is_shared = backend == "gloo" or _SHARES
        devices = "0" if is_shared else "0,1"
        script = ON_ONE_GPU if is_shared else "pretrain_gpt_moe.py"
        first = ["pretrain_gpt_moe.py"] if is_shared else []
        changes |= {"distributed_backend": backend}
        env = {**deterministic_environment(), "CUDA_VISIBLE_DEVICES": devices}
        common = {"train_iters": NUM_REPAIRED, "hidden_dropout": 0.1, "deterministic_mode": True}
        model = model_flags(**{**common, "attention_backend": "unfused", **changes})
        base = [*model, *layout_flags(layout), *self._place.dataset_flags]
        alone = self._folder / "alone"
        if not is_shared:
            run_training([*base, *event_flags(alone)], 2, log_dir=alone, env=env).check()
        else:
            words = [*first, *base, *event_flags(alone)]
            log = self._folder / "alone.log"
            run_kept(words, 2, log=log, script=script, env=env, deadline_s=DEADLINE_S).check()
        job = RepairedJob(self._place)
        job.num_ranks = 2
        changes = {**changes, "deterministic_mode": True, "attention_backend": "unfused"}
        strategy = (*strategy, "--moe-ft-allow-untested", "repair")
        words = [*first, *job.flags([fault], strategy, layout, changes=changes)]
        log = self._folder / "log"
        run_kept(words, 2, log=log, script=script, env=env, deadline_s=DEADLINE_S).check()
        rank = int(fault.split(":")[1].partition("@")[0])
        job.check([rank], [4], [recovered], is_exact=False)
        assert job.digests() == digests(alone, 2)


@pytest.fixture
def job(dataset_flags: list[str], tmp_path: Path, memory_dir: Path) -> GpuJob:
    return GpuJob(Place(dataset_flags, tmp_path, memory_dir, References(tmp_path)))


def test_killed_rank_on_a_gpu_is_replaced_over_gloo(job: GpuJob) -> None:
    job.check("kill:1@4:backward", {3, 4}, layout={"ep": 2}, backend="gloo")


@needs_two_ranks
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"pp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("strategy", [DENSE, SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("phase", PHASES)
def test_killed_rank_of_nccl_is_replaced_and_the_result_has_the_same_bits(
    job: GpuJob, phase: str, strategy: Sequence[str], layout: dict[str, int]
) -> None:
    recovered = {3, 4} if strategy is DENSE else {3}
    job.check(f"kill:1@4:{phase}", recovered, strategy=strategy, layout=layout)


@needs_two_ranks
@pytest.mark.parametrize(("phase", "scope"), [("backward", "local"), ("in-step", "global")])
def test_survivors_of_nccl_keep_their_state_unless_the_broken_iteration_has_made_it(
    job: GpuJob, tmp_path: Path, phase: str, scope: str
) -> None:
    strategy = (*SPARSE, *LOCAL)
    job.check(f"kill:1@4:{phase}", {3, 4}, strategy=strategy, layout={"pp": 2})
    repairs = [events(tmp_path / "events", rank, "repair")[0] for rank in range(2)]
    assert [each["scope"] for each in repairs] == [scope] * 2


@needs_two
@pytest.mark.parametrize("fault", LEAVING)
def test_ranks_that_leave_abort_nccl_and_leave_a_breakpoint(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, fault: str
) -> None:
    job = CheckpointJob(Place(dataset_flags, tmp_path, memory_dir, References(tmp_path)))
    job.set_model(2, {"ep": 2}, deterministic_mode=True, attention_backend="unfused")
    env = {**deterministic_environment(), "CUDA_VISIBLE_DEVICES": "0,1"}
    alone = tmp_path / "alone"
    run_training([*job.base, *event_flags(alone)], 2, log_dir=alone, env=env).check()
    flags = job.flags("--moe-ft-breakpoints", *fault_flags([fault]))
    run_with_restarts(flags, 2, log_dir=tmp_path / "logs", max_restarts=1, env=env)[-1].check()
    assert job.recovered()
    assert job.digests() == digests(alone, 2)
    survivors = {0, 1} - ({int(fault[5])} if fault.startswith("kill") else set())
    for rank in survivors:
        assert [each["problem"] for each in job.events("breakpoint", rank)] == [""]


@needs_two_ranks
def test_stopped_rank_of_nccl_is_killed_and_replaced(job: GpuJob) -> None:
    strategy = (*DENSE, "--moe-ft-repair-heartbeat-s", "20")
    job.check("stop:1@4:forward", {3, 4}, strategy=strategy, layout={"ep": 2})


@needs_two_ranks
def test_rank_that_others_time_out_waiting_for_in_nccl_ends_itself(job: GpuJob) -> None:
    job.check("hang:1@4:forward", {3, 4}, layout={"ep": 2})
