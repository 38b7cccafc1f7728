"""Ranks that share the devices of others, whose micro-batches peers run: the same samples and gradients.

In the first tests all ranks live on devices of their own, and some are called guests from an iteration on:
who runs what is the same as after the loss of a node, and nothing else happens.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from megatron.training import training
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

import pretrain_gpt_moe
from megatron.fault_tolerance.degraded import roles
from megatron.fault_tolerance.degraded import sharing as sharing_module
from megatron.fault_tolerance.degraded.sharing import Sharing
from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Layers
from moe_ft.loop.listeners import LoopState
from moe_ft.planning.schedules import Turn, Way
from tests.demo_model import event_flags
from tests.distributed.test_crowding import EVALUATED, SPARSE, CrowdedJob
from tests.distributed.test_crowding import Case as Lost
from tests.harness import DEADLINE_S, events, run_training
from tests.jobs import DENSE, LOCAL, CheckpointJob, Job, RepairedJob
from tests.references import Place
from tests.shares import share_of
from tests.waiting import wait_for

NUM_ITERATIONS, SHARED_AT = 4, 2  # the first iteration in which micro-batches are shared
HOSTS, WAY = "MOE_FT_TEST_HOSTS", "MOE_FT_TEST_WAY"
# Without workers the loop reads a batch when it needs it.
CHANGES: Mapping[str, Any] = {"train_iters": NUM_ITERATIONS, "num_workers": 0}
NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}  # peers draw other numbers
DROPOUT = {"attention_dropout": 0.1}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BIAS = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
# The gradient of an expert is rounded in each turn, whose tokens are others.
FP32 = {"bf16": False}
USUAL: dict[str, tuple[int, dict[str, int], Mapping[str, Any]]] = {
    "pp2 dp2": (4, {"pp": 2}, {}),
    "ep2, overlap": (2, {"ep": 2}, OVERLAP),
    "pp2, fp16, per-token loss, recomputation": (
        2,
        {"pp": 2},
        {"bf16": False, "fp16": True, "initial_loss_scale": 4096, "calculate_per_token_loss": True}
        | {"recompute_granularity": "full", "recompute_method": "uniform"}
        | {"recompute_num_layers": 1, "use_distributed_optimizer": False},
    ),
    "pp4, expert bias, fp32": (
        4,
        {"pp": 4},
        {"bf16": False, "moe_aux_loss_coeff": 0, "moe_router_load_balancing_type": "none"} | BIAS,
    ),
}


@contextmanager
def sharing(before: Callable[[Sharing, int], None]) -> Iterator[None]:
    """Put what shares micro-batches into the loop; call something before each iteration."""

    def step(original: Any, own: Sharing, *args: Any, **kwargs: Any) -> Any:
        before(own, kwargs["iteration"])
        return original(own, *args, **kwargs)

    data_sets, original = DataSets(), Sharing._train_step
    with Patches() as patches, Layers() as layers:
        patches.set(Sharing, "_train_step", lambda *args, **kwargs: step(original, *args, **kwargs))
        data_sets.install(layers)
        Sharing(data_sets, LoopState()).install(layers, patches)
        yield


def run_operations(flags: list[str]) -> None:
    """Train by the executor alone. Runs on every rank."""

    def refuse(**_: Any) -> NoReturn:
        raise AssertionError("Megatron's schedule ran")

    def begin(own: Sharing, _: int) -> None:
        own._is_always = True

    with Patches() as patches, sharing(begin):
        patches.set(training, "get_forward_backward_func", lambda **_: refuse)
        pretrain_gpt_moe.main(flags)


@pytest.mark.parametrize("case", share_of(USUAL, "pp2 dp2"))
def test_operations_in_the_usual_order_train_as_megatron_does_bit_for_bit(
    case: str, place: Place
) -> None:
    num_ranks, layout, changes = USUAL[case]
    job = Job(place)
    job.set_model(num_ranks, layout, **{**CHANGES, **DROPOUT, **changes})
    flags = [*job.base, *event_flags(job.events_dir)]
    run_training(flags, num_ranks, log_dir=job.folder, train=run_operations).check()
    assert job.digests() == job.reference()


def train_counting(flags: list[str]) -> None:
    """Train, and count the products for gradients of weights that have waited. Runs on every rank."""
    counts: list[int] = []

    def run(original: Any, late: LateGradients, turn: Turn) -> None:
        counts.append(len(late._kept.get(turn, ())))
        original(late, turn)

    original = LateGradients.run
    with Patches() as patches:
        patches.set(LateGradients, "run", lambda *args: run(original, *args))
        pretrain_gpt_moe.main(flags)
    path = Path(flags[flags.index("--moe-ft-event-log") + 1]).parent
    (path / f"put_off_{os.environ['RANK']}").write_text(str(sum(counts)))


@pytest.mark.rest
def test_gradients_of_weights_that_wait_change_no_bit(place: Place) -> None:
    job = CheckpointJob(place)
    job.set_model(4, {"pp": 2, "ep": 2}, **{**CHANGES, **DROPOUT})
    flags = [*job.flags(), "--moe-ft-late-gradients", "always"]
    run_training(flags, 4, log_dir=job.folder, train=train_counting).check()
    counts = [int((job.folder / f"put_off_{rank}").read_text()) for rank in range(4)]
    assert all(counts)
    assert job.digests() == job.reference()


@dataclass(frozen=True, kw_only=True)
class Case:
    """Guests of a job.

    Attributes:
        hosts: by guest, the rank whose device it shares.
    """

    layout: Mapping[str, int]
    hosts: Mapping[int, int]
    way: Way
    num_ranks: int = 4
    changes: Mapping[str, Any] = field(default_factory=dict)
    most: float = 1e-7  # of the largest gradient

    @property
    def num_readers(self) -> int:
        """Data-parallel ranks."""
        return self.num_ranks // math.prod(self.layout.get(name, 1) for name in ("tp", "cp", "pp"))

    @property
    def global_batch_size(self) -> int:
        """Samples of an iteration; a micro-batch has two."""
        return 18 if self.num_readers == 3 else 16

    def readers(self) -> Iterator[range]:
        """Yield the ranks that read samples of the first stage, and those of the last one."""
        stages = self.layout.get("pp", 1)
        size = self.num_ranks // stages
        step = self.layout.get("tp", 1) * self.layout.get("cp", 1)
        for stage in {0, stages - 1}:
            yield range(stage * size, (stage + 1) * size, step)

    def samples(self, iteration: int) -> list[int]:
        """Return the samples of an iteration that ranks of a stage read together, as Megatron draws them."""
        found: list[int] = []
        for reader in range(self.num_readers):
            sampler = MegatronPretrainingSampler(
                10**6, iteration * self.global_batch_size, 2, reader, self.num_readers
            )
            drawn = islice(iter(sampler), self.global_batch_size // 2 // self.num_readers)
            found += [index for indices in drawn for index in indices]
        return sorted(found)


CASES = {
    "one of three ranks of a stage": Case(
        layout={"pp": 2}, hosts={4: 0}, way=Way.PEERS, num_ranks=6
    ),
    "guest and host of two stages run fewer": Case(
        layout={"pp": 2}, hosts={3: 0}, way=Way.GUESTS, changes={"calculate_per_token_loss": True}
    ),
    "guest computes its experts": Case(
        layout={"ep": 2, "pp": 2},
        hosts={3: 0},
        way=Way.EXPERTS,
        changes={**BIAS, **FP32},
        most=1e-6,
    ),
    "guest computes its experts, of four ranks": Case(
        layout={"ep": 4}, hosts={3: 0}, way=Way.EXPERTS, changes={**OVERLAP, **FP32}, most=1e-6
    ),
    "other group runs all": Case(
        layout={"ep": 2},
        hosts={3: 0},
        way=Way.PEERS,
        changes={
            "fp16": True,
            "bf16": False,
            "initial_loss_scale": 1024,
            "accumulate_allreduce_grads_in_fp32": True,
        },
    ),
    "tensors": Case(
        layout={"tp": 2, "pp": 2},
        hosts={6: 4, 7: 5},
        way=Way.PEERS,
        num_ranks=8,
        changes={"sequence_parallel": True},
    ),
    "tensors and experts": Case(
        layout={"tp": 2, "ep": 2},
        hosts={2: 0, 3: 1},
        way=Way.EXPERTS,
        changes={"sequence_parallel": True, **FP32},
        most=1e-6,
    ),
    "further tokens": Case(
        layout={"pp": 2}, hosts={3: 0}, way=Way.GUESTS, changes={"mtp_num_layers": 1}
    ),
    "further tokens, guest computes its experts": Case(
        layout={"ep": 4},
        hosts={3: 0},
        way=Way.EXPERTS,
        changes={"mtp_num_layers": 1, **FP32},
        most=1e-6,
    ),
    "contexts": Case(layout={"cp": 2}, hosts={2: 0, 3: 1}, way=Way.PEERS),
    "one rank of a context, per-token loss": Case(
        layout={"cp": 2}, hosts={3: 0}, way=Way.PEERS, changes={"calculate_per_token_loss": True}
    ),
    "contexts and stages": Case(
        layout={"cp": 2, "pp": 2}, hosts={6: 0, 7: 1}, way=Way.GUESTS, num_ranks=8
    ),
    "contexts and experts": Case(
        layout={"cp": 2, "ep": 2}, hosts={0: 2, 1: 3}, way=Way.PEERS, changes=BIAS
    ),
    "no distributed optimizer, tied embeddings": Case(
        layout={"pp": 2},
        hosts={1: 0},
        way=Way.PEERS,
        changes={
            "use_distributed_optimizer": False,
            "untie_embeddings_and_output_weights": False,
            "log_num_zeros_in_grad": True,
            "log_params_norm": True,
        },
    ),
}


def run_shared(flags: list[str]) -> None:
    """Train, and share micro-batches of guests from an iteration on. Runs on every rank."""
    rank, found = int(os.environ["RANK"]), dict[int, list[int]]()
    hosts = {int(guest): host for guest, host in json.loads(os.environ[HOSTS]).items()}
    folder = Path(flags[flags.index("--moe-ft-event-log") + 1])
    state = {"iteration": 0}

    def begin(own: Sharing, iteration: int) -> None:
        state["iteration"] = iteration
        if iteration == SHARED_AT and hosts:
            own._host_rank = hosts.get(rank)
            own.begin()
            assert own._loop.shared == (*sorted(hosts),)

    def step(original: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if kwargs["iteration"] == SHARED_AT:
            save_gradients(args[2], folder / f"gradients_{rank}.npy")
        return result

    def samples(original: Any, *args: Any) -> range:
        drawn: range = original(*args)
        found.setdefault(state["iteration"], []).extend(drawn)
        return drawn

    def plan(original: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs, ways=[Way[os.environ[WAY]]])

    with Patches() as patches, sharing(begin):
        if hosts:
            patches.wrap(sharing_module, "plan_schedule", plan)
        patches.wrap(roles, "samples_of", samples)
        patches.wrap(training, "train_step", step)
        pretrain_gpt_moe.main(flags)
    (folder / f"samples_{rank}.json").write_text(json.dumps(found))


def save_gradients(model: Sequence[Any], path: Path) -> None:
    """Save the gradients that the optimizer of this rank has stepped with."""
    parts = []
    (chunk,) = model
    for each in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
        size, rank = 1, 0
        if chunk.ddp_config.use_distributed_optimizer:
            group = each.intra_distributed_optimizer_instance_group
            size, rank = group.size(), group.rank()
        parts += [bucket.grad_data.chunk(size)[rank] for bucket in each.buckets]
    np.save(path, torch.cat(parts).numpy())


def run_case(case: Case, place: Place, name: str, hosts: Mapping[int, int]) -> tuple[Job, Path]:
    """Run a job; return it, and where it has left what its ranks noted."""
    job = Job(place)
    changes = {**CHANGES, **NO_DROPOUT, "global_batch_size": case.global_batch_size, **case.changes}
    job.set_model(case.num_ranks, case.layout, **changes)
    folder = job.folder / name
    run_training(
        [*job.base, *event_flags(folder)],
        case.num_ranks,
        log_dir=folder,
        train=run_shared,
        env={HOSTS: json.dumps(hosts), WAY: case.way.name},
    ).check()
    return job, folder


@pytest.mark.parametrize("name", share_of(CASES, "guest computes its experts"))
def test_gradients_of_shared_micro_batches_are_those_of_all_ranks_to_a_few_bits(
    name: str, place: Place
) -> None:
    case = CASES[name]
    _, shared = run_case(case, place, "shared", case.hosts)
    _, healthy = run_case(case, place, "healthy", {})
    pairs = [
        [np.load(folder / f"gradients_{rank}.npy") for folder in (shared, healthy)]
        for rank in range(case.num_ranks)
    ]
    largest = max(float(np.abs(gradients).max()) for _, gradients in pairs)
    off = max(float(np.abs(found - gradients).max()) for found, gradients in pairs)
    print(f"SHARED {name}: {off / largest}")
    assert off <= case.most * largest
    for iteration in range(SHARED_AT, NUM_ITERATIONS):
        for ranks in case.readers():
            logs = (json.loads((shared / f"samples_{rank}.json").read_text()) for rank in ranks)
            read = [sample for each in logs for sample in each.get(str(iteration), ())]
            assert sorted(read) == case.samples(iteration), (iteration, ranks)


@pytest.mark.rest
def test_shared_micro_batches_give_the_same_bits_in_each_run(place: Place) -> None:
    case = CASES["guest and host of two stages run fewer"]
    runs = [run_case(case, place, name, case.hosts)[1] for name in ("once", "again")]
    for rank in range(case.num_ranks):
        once, again = (np.load(each / f"gradients_{rank}.npy") for each in runs)
        assert np.array_equal(once, again)
        digests = [events(each, rank, "state_digest")[-1]["sha256"] for each in runs]
        assert digests[0] == digests[1]


# Nodes that are lost


NUM_SHARED = 4  # iterations, at least
SHARE = ("--moe-ft-without-spare", "share")
LOST = {
    "dense, evaluated and saved": Lost(
        {"pp": 2}, (*DENSE, *SHARE), {**EVALUATED, "eval_interval": 6, **NO_DROPOUT}
    ),
    "sparse, experts on one rank, late gradients": Lost(
        {"pp": 2, "ep": 2}, (*SPARSE, *SHARE, "--moe-ft-late-gradients", "shared"), NO_DROPOUT
    ),
    "sparse, boundary logs": Lost({"pp": 2}, (*SPARSE, *LOCAL, *SHARE), NO_DROPOUT),
    "partial": Lost({"ep": 2}, ("partial", "--moe-ft-k-snapshot", "2", *SHARE), NO_DROPOUT),
}


def losses(job: RepairedJob, folder: Path) -> dict[int, float]:
    """Return the losses that the last rank has noted, by iteration."""
    return {
        line["iteration"]: line["loss"] for line in events(folder, job.num_ranks - 1, "iteration")
    }


@pytest.mark.parametrize("name", share_of(LOST, "dense, evaluated and saved"))
def test_micro_batches_of_a_lost_node_are_shared_until_another_node_has_its_ranks(
    repaired: RepairedJob, name: str
) -> None:
    case = LOST[name]._replace(lost=(3,))
    job = CrowdedJob(repaired, case, ("stop:3@4:backward",), 4, train_iters=80)
    with job.nodes as nodes:
        nodes.start(*job.names)
        job.lose(3, rank=3)
        wait_for(lambda: repaired.events("repair", 1), "the repair", DEADLINE_S)
        begun = len(repaired.events("iteration", 1))
        wait_for(
            lambda: len(repaired.events("iteration", 1)) > begun + NUM_SHARED,
            "iterations in which micro-batches are shared",
            DEADLINE_S,
        )
        nodes.start("node4", first=4)
        wait_for(lambda: len(repaired.events("repair", 1)) == 2, "the way back", DEADLINE_S)
        job.names.append("node4")
        codes = nodes.wait()
    assert codes == dict.fromkeys(["node0", "node1", "node2", "node4"], 0), job.log[-6000:]
    repairs = repaired.events("repair", 1)
    assert [each["shared"] for each in repairs] == [[3], []]
    assert "the micro-batches of ranks 3 are shared" in job.log
    for rank in range(3):
        assert len({each["pid"] for each in repaired.events("start", rank)}) == 1
    back = repairs[1]["broken_iteration"] + 1
    shared = range(repairs[0]["broken_iteration"] + 1, back)
    assert len(shared) > NUM_SHARED
    check_losses(repaired, [*range(1, shared.start + NUM_SHARED), *range(back, back + NUM_SHARED)])


def check_losses(job: RepairedJob, iterations: Iterable[int]) -> None:
    """Check that losses are those of a job that loses nothing, but for the order of sums."""
    healthy = job.folder / "healthy"
    flags = [*job.base, *event_flags(healthy)]
    run_training(flags, job.num_ranks, log_dir=healthy).check()
    found, expected = losses(job, job.events_dir), losses(job, healthy)
    assert found.keys() == expected.keys()
    for iteration in iterations:
        assert found[iteration] == pytest.approx(expected[iteration], rel=1e-3), iteration


@pytest.mark.rest
def test_host_that_is_lost_too_leaves_its_guests_and_its_own_ranks_to_others(
    repaired: RepairedJob,
) -> None:
    case = Lost({"pp": 2}, (*DENSE, *SHARE), NO_DROPOUT, lost=(3, 0))
    job = CrowdedJob(repaired, case, ("stop:3@4:backward", "stop:0@8:backward"), 5, train_iters=14)
    with job.nodes as nodes:
        nodes.start(*job.names)
        job.lose(3, rank=3)
        job.lose(0, rank=0)
        codes = nodes.wait()
    assert codes == dict.fromkeys(["node1", "node2", "node4"], 0), job.log[-6000:]
    repairs = repaired.events("repair", 1)
    assert [each["shared"] for each in repairs] == [[3], [0, 3]]
    check_losses(repaired, range(1, 15))
