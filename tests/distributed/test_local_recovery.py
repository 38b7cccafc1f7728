"""A stage that has lost its state recovers alone: exact, and the others replay nothing.

When and where ranks die is the subject of the simulation; here are the layouts and models.
"""

from typing import Any

import pytest

from tests.demo_model import DEEPSEEK, RERUNS
from tests.local_recoveries import (
    ALL,
    BIASED,
    DENSE,
    FP16,
    INTERLEAVED,
    PP4,
    TWO_STAGES_PER_NODE,
    Case,
    train_with_lengths,
)
from tests.references import Place
from tests.shares import share_of

OTHERS = ("num_layers", "moe_layer_freq", "mtp_num_layers")
MLA: dict[str, Any] = {name: value for name, value in DEEPSEEK.items() if name not in OTHERS}
EIGHT_LAYERS = {"num_layers": 8}
MIDDLE_AND_LAST: dict[str, Any] = {
    "faults": ("kill:2@5:forward", "kill:3@9:backward"),
    "stages": ((2,), (3,)),
}
ONE: dict[str, Any] = {"faults": ("kill:1@8:backward",), "stages": (ALL,), "recovery": "auto"}

CASES = {
    "sparse": Case(layout={"pp": 2}, faults=("kill:0@5:backward", "kill:1@9:before-step")),
    "interleaved": Case(
        layout={"pp": 2}, faults=("kill:0@5:backward",), stages=((0,),), flags=INTERLEAVED
    ),
    "ep2": Case(),
    "dense": Case(
        faults=("kill:3@6:forward", "kill:0@11:backward"), stages=((1,), (0,)), strategy=DENSE
    ),
    "pp4": Case(
        layout=PP4,
        faults=("kill:1@5:after-step", "kill:2@5:after-step", "kill:0@11:forward"),
        stages=((1, 2), (0,)),
    ),
    "pp4-interleaved": Case(layout=PP4, **MIDDLE_AND_LAST, flags=INTERLEAVED, changes=EIGHT_LAYERS),
    "pp4-warmup-flush": Case(
        layout=PP4,
        **MIDDLE_AND_LAST,
        flags=(*INTERLEAVED, "--overlap-p2p-communication-warmup-flush"),
        changes=EIGHT_LAYERS,
    ),
    "pp4-batched": Case(
        layout=PP4,
        **MIDDLE_AND_LAST,
        flags=(*INTERLEAVED, "--no-overlap-p2p-communication"),
        changes=EIGHT_LAYERS,
    ),
    "cp2": Case(layout={"pp": 2, "cp": 2, "dp": 2}),
    "rerun": Case(flags=RERUNS),
    "lengths": Case(train=train_with_lengths),
    "fp16": Case(**FP16),
    "per-token-loss": Case(flags=("--calculate-per-token-loss",)),
    "expert-bias": Case(flags=BIASED),
    "tp2": Case(layout={"pp": 2, "tp": 2}, flags=("--sequence-parallel",)),
    "dp2": Case(layout={"pp": 2, "dp": 2}),
    "mla": Case(changes=MLA),
    "node-of-two-stages": Case(
        layout=PP4,
        faults=("lose-node:1@5:backward", "kill:2@9:forward"),
        stages=((0, 1), (2,)),
        nodes=TWO_STAGES_PER_NODE,
    ),
    "tied": Case(**ONE, changes={"untie_embeddings_and_output_weights": False}),
    "evaluation": Case(**ONE, changes={"eval_interval": 1, "eval_iters": 1}),
}


@pytest.mark.parametrize("name", share_of(CASES, versions=["ep2"]))
def test_stage_of_a_dead_rank_recovers_alone(place: Place, name: str) -> None:
    case = CASES[name]
    case.run(place)
    case.check_end(place)
