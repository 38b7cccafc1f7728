"""A stage that has lost its state recovers alone: exact, and the others replay nothing."""

from pathlib import Path

import pytest

from tests.demo_model import DEEPSEEK
from tests.harness import digests
from tests.local_recoveries import ALL, DENSE, NOBODY, PP2, PP3, PP4, Case
from tests.references import References

INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")
OTHERS = ("num_layers", "moe_layer_freq", "mtp_num_layers")
MLA = {name: value for name, value in DEEPSEEK.items() if name not in OTHERS}

CASES = {
    "sparse": Case(
        layout={"pp": 2}, faults=("kill:0@5:backward", "kill:1@9:before-step"), stages=[[0], [1]]
    ),
}
REST = {
    "ep2": Case(
        layout=PP2, faults=("kill:1@5:backward", "kill:2@9:before-step"), stages=[[0], [1]]
    ),
    "dense": Case(
        layout=PP2,
        faults=("kill:3@6:forward", "kill:0@11:backward"),
        stages=[[1], [0]],
        strategy=DENSE,
    ),
    "pp3": Case(
        layout=PP3,
        faults=("kill:1@5:backward", "kill:0@9:forward"),
        stages=[[1], [0]],
        changes={"num_layers": 3},
    ),
    "pp4": Case(layout=PP4, faults=("kill:2@5:forward", "kill:3@9:backward"), stages=[[2], [3]]),
    "pp4-interleaved": Case(
        layout=PP4,
        faults=("kill:2@5:forward", "kill:3@9:backward"),
        stages=[[2], [3]],
        flags=INTERLEAVED,
        changes={"num_layers": 8},
    ),
    "fp16": Case(
        layout=PP2,
        faults=("kill:1@5:backward", "kill:2@9:forward"),
        stages=[[0], [1]],
        # The scale grows until gradients overflow, again and again: some steps of the tails are skipped.
        flags=("--fp16", "--initial-loss-scale", "1048576", "--loss-scale-window", "2"),
        changes={"bf16": False, "hysteresis": 1},
    ),
    "per-token-loss": Case(
        layout=PP2,
        faults=("kill:1@5:backward", "kill:2@9:forward"),
        stages=[[0], [1]],
        flags=("--calculate-per-token-loss",),
    ),
    "expert-bias": Case(
        layout=PP2,
        faults=("kill:1@5:backward", "kill:2@9:forward"),
        stages=[[0], [1]],
        flags=("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
    ),
    "tp2": Case(
        layout={"pp": 2, "tp": 2},
        faults=("kill:1@5:backward", "kill:2@9:forward"),
        stages=[[0], [1]],
        flags=("--sequence-parallel",),
    ),
    "dp2": Case(
        layout={"pp": 2, "dp": 2},
        faults=("kill:1@5:backward", "kill:2@9:forward"),
        stages=[[0], [1]],
    ),
    "mla": Case(
        layout=PP2,
        faults=("kill:1@5:backward", "kill:2@9:forward"),
        stages=[[0], [1]],
        changes=MLA,
    ),
    "same-stage": Case(
        layout=PP2,
        faults=("kill:0@5:after-step", "kill:1@5:after-step", "kill:2@11:forward"),
        stages=[[0], [1]],
    ),
    "adjacent-stages": Case(
        layout=PP4,
        faults=("kill:1@5:after-step", "kill:2@5:after-step", "kill:0@11:forward"),
        stages=[[1, 2], [0]],
    ),
    "stages-apart": Case(
        layout=PP4,
        faults=("kill:0@5:after-step", "kill:3@5:after-step", "kill:1@11:forward"),
        stages=[[0, 3], [1]],
    ),
    "node-of-one-stage": Case(
        layout=PP2,
        faults=("lose-node:1@5:backward", "kill:2@9:forward"),
        stages=[[0], [1]],
        nodes=[("node0", "node0", "node1", "node1"), ("node2", "node2", "node1", "node1")],
    ),
    "node-of-two-stages": Case(
        layout=PP4,
        faults=("lose-node:1@5:backward", "kill:2@9:forward"),
        stages=[[0, 1], [2]],
        nodes=[("node0", "node0", "node1", "node1"), ("node2", "node2", "node1", "node1")],
    ),
    "node-and-then-its-neighbour": Case(
        layout={"pp": 2},
        faults=("lose-node:1@5:forward", "lose-node:0@6:forward"),
        stages=[[1], ALL],
        nodes=[("node0", "node1"), ("node0", "node2"), ("node3", "node2")],
    ),
    "in-step": Case(
        layout=PP4, faults=("kill:1@5:in-step", "kill:2@11:after-step"), stages=[[1], [2]]
    ),
    "in-last-iteration": Case(
        layout=PP4, faults=("kill:1@11:after-step",), stages=[[1]], strategy=DENSE
    ),
    "in-recovery": Case(
        layout=PP4,
        faults=("kill:1@5:backward", "kill:1@3:recovery", "kill:1@3:replay"),
        stages=[[1]],
    ),
    "neighbour-in-recovery": Case(
        layout=PP4, faults=("kill:1@5:backward", "kill:2@3:recovery"), stages=[[1]]
    ),
    "all-are-ended": Case(
        layout=PP4,
        faults=("terminate:0@5:backward", "terminate:2@9:before-step"),
        stages=[NOBODY, NOBODY],
    ),
    "global": Case(layout=PP2, faults=("kill:1@5:backward",), stages=[ALL], recovery="global"),
    "tied": Case(
        layout=PP2,
        faults=("kill:1@5:backward",),
        stages=[ALL],
        recovery="auto",
        changes={"untie_embeddings_and_output_weights": False},
    ),
    "evaluation": Case(
        layout=PP2,
        faults=("kill:1@8:backward",),
        stages=[ALL],
        recovery="auto",
        changes={"eval_interval": 1, "eval_iters": 1},
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.rest) for name, case in REST.items()),
    ],
)
def test_stage_of_a_dead_rank_recovers_alone(
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    references: References,
    case: Case,
) -> None:
    base = case.base(dataset_flags)
    case.run(base, tmp_path, memory_dir)[-1].check()
    case.check(tmp_path)
    assert digests(tmp_path / "events", case.world_size) == references.digests(
        base, case.world_size
    )
