"""A rank of a real job that is slow by itself is named, and not those that wait for it."""

import os
import time
from collections import Counter
from collections.abc import Mapping
from statistics import median

import pytest

import pretrain_gpt_moe
from megatron.fault_tolerance.seams.iteration_seams import IterationSeams
from moe_ft.cli import main
from moe_ft.loop.event_fold import FollowedRun
from moe_ft.loop.metrics import values_of
from tests.jobs import CheckpointJob
from tests.unit.moe_ft.commands.test_report_trace import read_trace

NUM_ITERATIONS, SLOW, SLOW_S = 25, 3, 0.15
SMALL = {"num_layers": 2, "hidden_size": 32, "moe_ffn_hidden_size": 32}


def train_slowly(flags: list[str]) -> None:
    """Train; rank SLOW sleeps in each forward pass. Runs on every rank."""
    begin = IterationSeams.begin_forward

    def begin_forward(seams: IterationSeams) -> None:
        begin(seams)
        if os.environ["RANK"] == f"{SLOW}":
            time.sleep(SLOW_S)

    IterationSeams.begin_forward = begin_forward  # type: ignore[method-assign,assignment]  # this process only
    pretrain_gpt_moe.main(flags)


@pytest.mark.parametrize(
    "layout", [{"pp": 2, "ep": 2}, pytest.param({"ep": 4}, marks=pytest.mark.rest)], ids=str
)
def test_slow_rank_is_named_in_its_stage_and_nobody_in_the_other(
    job: CheckpointJob, layout: Mapping[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    job.train = train_slowly
    num_peers = 4 // layout.get("pp", 1)
    job.set_model(4, layout, train_iters=NUM_ITERATIONS, global_batch_size=2 * num_peers, **SMALL)
    job.run("--moe-ft-strategy", "none").check()
    assert main(["watch", str(job.events_dir), "--once"]) == 0
    watched = capsys.readouterr().out
    assert main(["report", str(job.events_dir)]) == 0
    stage = SLOW // num_peers
    words = f"rank {SLOW} is the slowest of stage {stage}: "
    for text in (watched, capsys.readouterr().out):
        assert text.count("is the slowest of stage") == text.count(words) == 1, text
    path = job.events_dir / "trace.json"
    assert main(["report", str(job.events_dir), "--trace", str(path)]) == 0
    spans = Counter(each["name"] for each in read_trace(path) if each["ph"] == "X")
    assert spans["forward"] == spans["backward"] == spans["step"] == 4 * NUM_ITERATIONS
    run = FollowedRun(job.events_dir, range(4))
    run.read(1 << 24)
    own = {
        (each.rank, label): value or 0.0
        for each in run.ranks
        for name, label, value in values_of(each)
        if name == "own_seconds"
    }
    assert len(own) == 4
    peers = [value for (rank, at), value in own.items() if at == f"{stage}"]
    assert own[SLOW, f"{stage}"] > 1.33 * median(peers), own
    assert own[SLOW, f"{stage}"] > SLOW_S
