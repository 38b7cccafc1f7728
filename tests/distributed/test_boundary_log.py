"""Boundary logs in the training loop: they change nothing, and one stage replays from them bit for bit."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.demo_model import RERUNS, event_flags, layout_flags, model_flags, world_size_of
from tests.harness import digests, run_training
from tests.local_replays import (
    GOES_BACK_TO,
    Scopes,
    replays_of,
    train_and_replay,
    train_with_lengths,
)
from tests.references import References

NUM_ITERATIONS = 6
INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")

SPARSE = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2")
DENSE = ("--moe-ft-strategy", "dense", "--moe-ft-interval", "3")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, and the stages that replay together, one group after the other."""

    layout: Mapping[str, int]
    scopes: Scopes
    flags: tuple[str, ...] = ()
    own: tuple[str, ...] = DENSE
    num_layers: int = 4
    varies: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return world_size_of(self.layout)


PP2, PP4 = {"pp": 2, "ep": 2}, {"pp": 4, "ep": 2}
CASES = {"pp2-interleaved": Case(layout=PP2, scopes=[[0], [1]], flags=INTERLEAVED)}
REST = {
    "pp2": Case(layout=PP2, scopes=[[1], [0]]),
    "pp4": Case(layout=PP4, scopes=[[0], [1], [3], [1, 2], [0, 2]]),
    "pp4-interleaved": Case(
        layout=PP4, scopes=[[0], [2], [3], [0, 3], [1, 2]], flags=INTERLEAVED, num_layers=8
    ),
    "pp4-warmup-flush": Case(
        layout=PP4,
        scopes=[[0], [1], [3]],
        flags=(*INTERLEAVED, "--overlap-p2p-communication-warmup-flush"),
        num_layers=8,
    ),
    "pp4-batched": Case(
        layout=PP4,
        scopes=[[0], [1], [3], [2, 3]],
        flags=(*INTERLEAVED, "--no-overlap-p2p-communication"),
        num_layers=8,
    ),
    "tp2": Case(layout={"pp": 2, "tp": 2}, scopes=[[0], [1]], flags=("--sequence-parallel",)),
    "cp2": Case(layout={"pp": 2, "cp": 2, "dp": 2}, scopes=[[0], [1]], own=SPARSE),
    "rerun": Case(layout=PP2, scopes=[[0], [1]], flags=RERUNS, own=SPARSE),
    "evaluation": Case(
        layout=PP2, scopes=[[0], [1]], flags=("--eval-interval", "1", "--eval-iters", "1")
    ),
    "lengths": Case(layout=PP2, scopes=[[0], [1]], varies=True),
}


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(pytest.param(case, id=name, marks=pytest.mark.rest) for name, case in REST.items()),
    ],
)
def test_stage_that_replays_alone_from_logs_of_its_neighbours_has_the_state_of_the_run(
    dataset_flags: list[str],
    tmp_path: Path,
    memory_dir: Path,
    references: References,
    case: Case,
) -> None:
    layout = {name: size for name, size in case.layout.items() if name != "dp"}
    changes = {"train_iters": NUM_ITERATIONS, "hidden_dropout": 0.1, "num_layers": case.num_layers}
    base = [
        *model_flags(**changes),
        *(*layout_flags(layout), *case.flags, *dataset_flags),
    ]
    flags = [
        *(*base, *event_flags(tmp_path / "events"), *case.own, "--moe-ft-job-id", "test"),
        *("--moe-ft-memory-dir", str(memory_dir), "--moe-ft-upstream-log"),
    ]
    world_size, scopes = case.world_size, case.scopes
    train = partial(train_and_replay, str(tmp_path), scopes, case.varies)
    run_training(flags, world_size, log_dir=tmp_path / "logs", train=train).check()
    plain = train_with_lengths if case.varies else None
    expected = references.digests(base, world_size, plain)
    assert digests(tmp_path / "events", world_size) == expected
    assert not list(memory_dir.glob("test/*/rank_*")), "memory is left after a clean end"
    replayed = []
    for rank in range(world_size):
        for each in replays_of(tmp_path, rank):
            assert each["replayed"] == NUM_ITERATIONS - GOES_BACK_TO
            assert each["moved"] > 0
            assert not each["different"]
            assert set(range(GOES_BACK_TO, NUM_ITERATIONS)) <= set(each["iterations"])
            assert all(sent[0] == each["computed"][0] for sent in each["sent"])
            if not case.varies:
                assert all(sent == each["computed"] for sent in each["sent"])
            replayed.append(tuple(each["scope"]))
    ranks_per_stage = world_size // layout["pp"]
    asked = [tuple(scope) for scope in scopes for _ in scope for _ in range(ranks_per_stage)]
    assert sorted(replayed) == sorted(asked)
