"""Slots of experts in real jobs: what is bitwise as in stock Megatron, and recoveries while tables change."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from moe_ft.commands.command_line import plan_job, read_command
from moe_ft.planning.planned_job import MeasuredTimes
from moe_ft.planning.report import sent_bytes
from tests import slotted
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events
from tests.jobs import LOCAL, CheckpointJob, RepairedJob, refusal
from tests.jobs import SPARSE as WINDOW
from tests.partial_runs import PARTIAL, check_losses, lost_since, recount, versions_left
from tests.recount import Expert
from tests.shares import share_of
from tests.slotted import Trained

NUM_RANKS = 4
SLOTS = "--moe-ft-expert-slots"
NUM_EXPERTS = 8
WHOLE = ("--moe-ft-strategy", "dense")
MOVING = (SLOTS, "3", "--moe-ft-rebalance-interval", "1")
FP16 = {"bf16": False, "fp16": True, "loss_scale_window": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0,
}
SYMI = {"moe_expert_capacity_factor": 1.0, "moe_router_topk": 1, "moe_router_pre_softmax": True}
# (layout of the stock run, slots of a rank, changes to the small model)
CASES: dict[str, tuple[dict[str, int], int, Mapping[str, Any]]] = {
    "ep4, clipped": ({"ep": 4}, 1, {}),
    "virtual stages, fp16 with skipped steps, overlap, full recomputation": (
        {"pp": 2, "ep": 2},
        2,
        FP16
        | OVERLAP
        | {"num_layers_per_virtual_pipeline_stage": 1, "num_layers": 4, "train_iters": 8}
        | {"initial_loss_scale": 2**20, "recompute_granularity": "full"}
        | {"recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "tp2, sequence parallel": ({"tp": 2, "ep": 4, "etp": 1}, 1, {"sequence_parallel": True}),
    "pp2 ep2, fp32": ({"pp": 2, "ep": 2}, 2, {"bf16": False, "num_layers": 4}),
    "allgather, dropout, evaluation, selective recomputation": (
        {"ep": 4},
        1,
        {"moe_token_dispatcher_type": "allgather", "hidden_dropout": 0.1}
        | {"eval_interval": 2, "eval_iters": 1}
        | {"recompute_granularity": "selective", "recompute_modules": "moe"},
    ),
    "shared expert, expert bias, per-token loss, no distributed optimizer": (
        {"ep": 4},
        1,
        {"use_distributed_optimizer": False, "clip_grad": 0.0, "calculate_per_token_loss": True}
        | {"moe_shared_expert_intermediate_size": 64}
        | BIAS,
    ),
    "capacity by position": (
        {"ep": 4},
        2,
        {"num_experts": 8, "moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
    ),
    "three experts a token": (
        {"ep": 4},
        2,
        {"num_experts": 8, "moe_router_topk": 3},
    ),
}


class Runs:
    """Runs of the small model in a folder."""

    def __init__(self, folder: Path, dataset_flags: Sequence[str]) -> None:
        self._folder, self._dataset = folder, dataset_flags

    def train(self, name: str, *flags: str, is_stock: bool = False, **changes: Any) -> Trained:
        model = model_flags(**{"num_layers": 2, "clip_grad": 0.1, **changes})
        words = [*model, *self._dataset, *flags]
        if not is_stock:
            words += event_flags(self.events_of(name))
        return slotted.run(words, NUM_RANKS, self._folder / name, is_stock=is_stock)

    def events_of(self, name: str) -> Path:
        return self._folder / f"{name}_events"

    def tables(self, name: str) -> list[dict[str, Any]]:
        """Return the tables that a run has changed to, each time by layer."""
        return [line["layers"] for line in events(self.events_of(name), 0, "slot_table")]


@pytest.fixture
def runs(tmp_path: Path, dataset_flags: list[str]) -> Runs:
    return Runs(tmp_path, dataset_flags)


@pytest.mark.parametrize("case", share_of(CASES, next(iter(CASES))))
def test_megatrons_table_gives_the_bits_of_stock_megatron(case: str, runs: Runs) -> None:
    layout, slots, changes = CASES[case]
    stock = runs.train("stock", *layout_flags(layout), is_stock=True, **changes)
    own = {name: size for name, size in layout.items() if name != "ep"}
    found = runs.train("slots", *layout_flags(own), SLOTS, str(slots), **changes)
    assert found.differing(stock) == []
    assert {**found.scalars, **stock.scalars} == found.scalars
    scales = {scale for _, scale in stock.scalars["loss-scale"]}
    assert (len(scales) > 1) == ("fp16" in changes), "some steps are skipped and some are not"


def test_moved_experts_change_no_bit_and_bring_no_more_bytes(runs: Runs) -> None:
    model: dict[str, Any] = {"num_experts": NUM_EXPERTS, "train_iters": 6}
    fixed = runs.train("fixed", SLOTS, "2", **model)
    moved = runs.train("moved", SLOTS, "2", "--moe-ft-rebalance-interval", "1", **model)
    assert moved.differing(fixed) == []
    assert moved.scalars == fixed.scalars
    layers = [layer for table in runs.tables("moved") for layer in table.values()]
    assert runs.tables("fixed") == [] and sum(each["moved_replicas"] for each in layers) > 0
    # All but the dispatch of tokens: state of an optimizer would have to be in it.
    assert moved.sent_bytes == fixed.sent_bytes and min(moved.sent_bytes) > 0


def test_replicas_that_follow_the_load_are_repeatable_and_level_the_ranks(runs: Runs) -> None:
    model: dict[str, Any] = {"num_experts": NUM_EXPERTS, "train_iters": 6}
    first, second = (runs.train(name, *MOVING, **model) for name in ("first", "second"))
    assert first.differing(second) == [] and first.scalars == second.scalars
    tables = runs.tables("first")
    assert tables == runs.tables("second") and tables
    for layer in (layer for layers in tables for layer in layers.values()):
        assert sum(layer["tokens_before"]) == sum(layer["tokens_after"])
        assert max(layer["tokens_after"]) < max(layer["tokens_before"])
    command = read_command([*model_flags(num_layers=2, **model), *MOVING, *WHOLE])
    planned, _ = plan_job(command, MeasuredTimes(), world_size=NUM_RANKS, ranks_per_node=NUM_RANKS)
    lines = events(runs.events_of("first"), 0, "slot_table")
    for before, line in pairwise(lines):
        num_iterations = line["iteration"] - before["iteration"]
        assert line["sent_bytes"] == num_iterations * sum(sent_bytes(planned, 2))
    assert len(lines) > 1


@pytest.mark.rest
def test_ranks_need_not_divide_the_experts(runs: Runs) -> None:
    found = runs.train("odd", *MOVING, num_experts=5, train_iters=6)
    (_, first), *_, (_, last) = found.scalars["lm loss"]
    assert last < first


SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2")
EXACT = ("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "8")
ALONE = "window, a stage alone"
TWO_OF_FOUR = ("node0", "node0", "node1", "node1")
# Changes to a job in which a rank is killed in the backward pass of iteration 5.
RECOVERIES: dict[str, dict[str, Any]] = {
    "whole state": {},
    "window": {"flags": SPARSE},
    "window, tp2, storage": {
        "flags": (*SPARSE, "--moe-ft-persist-interval", "1"),
        "faults": ("lose-node:1@7:backward",),
        "storage": True,
        "layout": {"tp": 2, "etp": 1},
        "changes": {"sequence_parallel": True},
    },
    "fp16 with skipped steps": {"changes": FP16 | {"initial_loss_scale": 2**17}},
    "capacity": {"changes": SYMI},
    "every expert in partial snapshots, fp16, expert bias": {
        "flags": EXACT,
        "changes": BIAS | FP16 | {"initial_loss_scale": 2**17},
    },
    "lost node, from peers": {
        "faults": ("lose-node:1@5:backward",),
        "nodes": lambda start: TWO_OF_FOUR,
    },
    "breakpoints of two stages": {"flags": LOCAL, "layout": {"pp": 2}, "has_breakpoints": True},
    ALONE: {
        "flags": (*SPARSE, *LOCAL),
        "layout": {"pp": 2},
        "has_breakpoints": True,
    },
}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("case", share_of(RECOVERIES, "window"))
def test_run_whose_tables_change_is_recovered_bitwise(case: str, job: CheckpointJob) -> None:
    options = dict(RECOVERIES[case])
    layout, changes = options.pop("layout", {}), options.pop("changes", {})
    faults = options.pop("faults", ("kill:1@5:backward",))
    num_stages = layout.get("pp", 1)
    slots = (*MOVING, SLOTS, "5") if num_stages > 1 else MOVING  # enough for all experts
    model = {"num_layers": 2 * num_stages, "train_iters": 8, "num_experts": NUM_EXPERTS, **changes}
    job.set_model(NUM_RANKS, layout, *slots, **model)
    expected = job.reference()
    job.run_with_faults(*faults, **options)
    assert job.digests() == expected
    found = [line for rank in range(NUM_RANKS) for line in job.events("recovery", rank)]
    assert len(found) == NUM_RANKS and len({line["target_iteration"] for line in found}) == 1
    assert all(line["target_iteration"] >= line["restored_iteration"] > 0 for line in found)
    assert {line["scope"] for line in found} == {"local" if case == ALONE else "global"}
    changed = [(line["incarnation"], line["iteration"]) for line in job.events("slot_table")]
    assert {start for start, _ in changed} == {0, 1}, "before the recovery and after it"


LOSSY: dict[str, dict[str, Any]] = {
    "sequential": {},
    "load-aware, lost node": {
        "flags": ("--moe-ft-selection", "load-aware"),
        "faults": ("kill:1@5:backward", "lose-node:2@9:backward"),
        "nodes": lambda start: TWO_OF_FOUR,
    },
}


@pytest.mark.rest
@pytest.mark.parametrize("case", LOSSY)
def test_lossy_recovery_loses_the_tokens_of_the_routing_log(case: str, job: CheckpointJob) -> None:
    options = dict(LOSSY[case])
    faults = options.pop("faults", ("kill:1@5:backward", "kill:2@9:backward"))
    flags = (*PARTIAL, "--moe-ft-k-snapshot", "1", *options.pop("flags", ()))
    model = {"num_layers": 2, "train_iters": 10, "num_experts": NUM_EXPERTS}
    job.set_model(NUM_RANKS, {}, *MOVING, **model)
    job.run_with_faults(*faults, flags=flags, **options)
    assert len(job.recovered()) == 2
    check_losses(
        job.events_dir,
        num_ranks=NUM_RANKS,
        num_experts=NUM_EXPERTS,
        ep_size=1,  # every rank has a part of every expert
        is_load_aware="load-aware" in flags,
    )


# A rank has a quarter of each of 16 experts, of 37 kB, and room for some of them.
SELECTIVE = (
    *("--moe-ft-strategy", "selective", "--moe-ft-router-log", "--moe-ft-interval", "1"),
    *("--moe-ft-local-budget", "500000", "--moe-ft-remote-budget", "400000"),
)


@pytest.mark.rest
def test_selective_recovery_loses_the_tokens_after_the_versions_that_were_left(
    job: CheckpointJob,
) -> None:
    model = {"num_layers": 2, "train_iters": 10, "num_experts": NUM_EXPERTS}
    job.set_model(NUM_RANKS, {}, *MOVING, **model)
    left: dict[Expert, set[int]] = {}

    def between(start: int) -> None:
        if not start:
            left.update(versions_left(job.memory_dir / "test"))

    job.run_with_faults("kill:1@7:backward", flags=SELECTIVE, between=between)
    (recovery,) = job.events("recovery")
    restored, layers = recovery["restored_iteration"], ("layer.0", "layer.1")
    rules = {"num_ranks": NUM_RANKS, "layers": layers, "num_experts": NUM_EXPERTS, "ep_size": 1}
    counted = recount(job, 1, **rules)
    counted.read(0, 0)
    lost = lost_since(counted, left, restored)
    assert len(left) == len(layers) * NUM_EXPERTS
    assert recovery["lost_per_expert"] == lost
    assert recovery["lost_tokens"] == sum(map(sum, lost.values())) > 0
    changed = {line["incarnation"] for line in job.events("slot_table")}
    assert changed == {0, 1}, "before the recovery and after it"


REPAIRS: dict[str, dict[str, Any]] = {
    "window, tp2": {
        "faults": ("kill:0@4:in-step", "stop:3@6:forward"),
        "strategy": (*WINDOW, "--moe-ft-repair-heartbeat-s", "8"),
        "layout": {"tp": 2, "etp": 1},
        "changes": {"sequence_parallel": True},
        "recovered": [{3}, {3, 6}],
    },
    "state after the iteration": {"faults": ("kill:3@4:after-step",), "recovered": [{4}]},
    "two stages": {
        "faults": ("kill:3@4:backward",),
        "layout": {"pp": 2},
        "changes": {"num_layers": 4, **FP16, "initial_loss_scale": 2**17},
        "recovered": [{3, 4}],
    },
}


@pytest.mark.parametrize("case", share_of(REPAIRS, "two stages"))
def test_rank_is_replaced_in_place_while_tables_change(case: str, repaired: RepairedJob) -> None:
    options = dict(REPAIRS[case])
    faults, recovered = options.pop("faults"), options.pop("recovered")
    changes = {"num_layers": 2, "num_experts": NUM_EXPERTS, **options.pop("changes", {})}
    layout = options.pop("layout", {})
    slots = (*MOVING, SLOTS, "5") if layout.get("pp", 1) > 1 else MOVING
    repaired.run(*faults, layout=layout, extra=slots, changes=changes, **options)
    struck = [(int(rank), int(state)) for _, rank, state, _ in map(_parts, faults)]
    repaired.check(*map(list, zip(*struck, strict=True)), recovered)
    assert len(repaired.events("slot_table")) > 2


def _parts(fault: str) -> list[str]:
    """Return kind, rank, iteration and phase of a fault."""
    return re.split("[:@]", fault)


@pytest.mark.rest
def test_state_of_a_run_with_other_slots_is_refused_by_name(job: CheckpointJob) -> None:
    job.set_model(NUM_RANKS, {}, *MOVING, num_layers=2, num_experts=NUM_EXPERTS)
    job.run("--moe-ft-inject-fault", "kill:1@4:backward")
    assert f"{SLOTS}: 3 there, 4 now" in refusal(job.run(SLOTS, "4"))
