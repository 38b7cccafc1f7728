"""Elastic starts: what they refuse, how they change the command line, and who waits."""

import argparse
import os
import shlex
import sys
import threading
import time
from datetime import timedelta

import pytest
from megatron.core import num_microbatches_calculator as calculators
from torch.distributed import TCPStore

from megatron.fault_tolerance.seams import elastic
from megatron.fault_tolerance.seams.settings import config_from_arguments
from moe_ft.errors import ConfigError
from tests.ports import free_port
from tests.unit.fault_tolerance.parsing import parse

FLAG = "--moe-ft-elastic"
ANY = (FLAG, "--moe-ft-layout", "any", "--moe-ft-strategy", "dense")
EXPERTS = "--calculate-per-token-loss --num-experts 4 --expert-model-parallel-size 2"
REFUSED = {
    "--step-batch-size-schedule 0:16": "cannot be used with --step-batch-size-schedule: it depends on",
    "--rampup-batch-size 4 4 4": "cannot be used with --rampup-batch-size",
    "--decrease-batch-size-if-needed": "cannot be used with --decrease-batch-size-if-needed",
    "--dataloader-type cyclic": "needs --dataloader-type single",
    "--use-checkpoint-args": "cannot be used with --use-checkpoint-args: layouts come from",
}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_waiting", None)
    monkeypatch.setattr(sys, "argv", ["script"])
    monkeypatch.setenv("WORLD_SIZE", "8")
    stock = calculators.ConstantNumMicroBatchesCalculator
    monkeypatch.setattr(calculators, "ConstantNumMicroBatchesCalculator", stock)


def given(num_ranks: int, flags: str = "", rank: int = 0) -> argparse.Namespace:
    args = parse(*ANY, *shlex.split(flags))
    args.world_size, args.rank = num_ranks, rank
    return args


@pytest.mark.parametrize("flags", REFUSED)
def test_what_depends_on_the_number_of_ranks_is_refused_by_name(flags: str) -> None:
    with pytest.raises(ConfigError, match=FLAG) as refusal:
        elastic.fit(given(8, flags))
    assert REFUSED[flags] in str(refusal.value)


def test_launcher_that_keeps_its_store_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ConfigError, match=f"{FLAG} needs a launcher .* --nnodes MIN:MAX"):
        elastic.fit(given(8))


def test_fault_may_name_a_rank_that_another_start_has() -> None:
    fault = ("--moe-ft-inject-fault", "kill:7@1", "--moe-ft-event-log", "DIR")
    config_from_arguments(parse(*ANY, *fault)).validate(3)
    with pytest.raises(ConfigError, match="rank 7 must be less than the world size 3"):
        config_from_arguments(parse(*fault)).validate(3)


def test_ranks_that_fit_are_a_world_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--expert-model-parallel-size 4 --eval-iters 1 --calculate-per-token-loss"
    assert elastic.fit(given(3, flags))
    assert os.environ["WORLD_SIZE"] == "2" and elastic.waiting_ranks() == (2,)
    assert sys.argv[1:] == ["--expert-model-parallel-size", "2"]
    said = capsys.readouterr().err
    assert "too few ranks for --expert-model-parallel-size 4: experts are on 2 ranks each" in said
    assert "2 of 3 ranks train, and ranks 2 to 2 wait: more do not make whole models" in said
    assert not elastic.fit(given(3, flags)), "a script may parse again"
    elastic.check_fitted(True)


def test_batch_that_ranks_cannot_share_is_uneven_where_its_mean_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stock = calculators.ConstantNumMicroBatchesCalculator
    assert elastic.fit(given(3, "--calculate-per-token-loss --eval-iters 2"))
    assert os.environ["WORLD_SIZE"] == "3"
    assert sys.argv[1:] == ["--eval-global-batch-size", "12"]
    uneven = calculators.ConstantNumMicroBatchesCalculator(16, 2, 3, False, 0)
    assert uneven is not stock and (uneven.get(), uneven.current_running_global_batch_size) == (
        3,
        16,
    )
    assert "evaluations read 12 samples an iteration instead of 16" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("", "without --calculate-per-token-loss"),
        (
            "--calculate-per-token-loss --pipeline-model-parallel-size 2",
            "with --pipeline-model-parallel-size 2",
        ),
        (
            f"{EXPERTS} --moe-token-dispatcher-type allgather",
            "with --moe-token-dispatcher-type allgather",
        ),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", "with --moe-token-dispatcher-type flex"),
        (
            "--calculate-per-token-loss --num-experts 4 --moe-ft-expert-slots 2 "
            "--moe-token-dispatcher-type allgather",
            "with --moe-token-dispatcher-type allgather",
        ),
        (
            f"{EXPERTS} --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity",
            "with --moe-pad-expert-input-to-capacity",
        ),
    ],
)
def test_batch_that_must_be_shared_equally_leaves_ranks_over(
    flags: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    together = 2 if "parallel-size 2" in flags else 1
    assert elastic.fit(given(3 * together, flags))
    assert len(elastic.waiting_ranks()) == together
    said = capsys.readouterr().err
    assert f"wait: more whole models cannot share 16 samples equally ({why})" in said


def test_experts_of_an_all_to_all_let_ranks_have_uneven_shares() -> None:
    assert elastic.fit(given(6, f"{EXPERTS} --moe-token-dispatcher-type alltoall"))
    assert elastic.waiting_ranks() == ()


def test_ranks_that_cannot_share_the_batch_are_said_to_be_no_more_too_few(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--expert-model-parallel-size 4 --micro-batch-size 2 --global-batch-size 6"
    assert elastic.fit(given(4, flags))
    assert elastic.waiting_ranks() == (3,)
    said = capsys.readouterr().err
    cause = "cannot share 6 samples equally (without --calculate-per-token-loss)"
    assert f"ranks of --expert-model-parallel-size 4 {cause}: experts are on 1 ranks each" in said
    assert f"ranks 3 to 3 wait: more whole models {cause}" in said


@pytest.mark.parametrize(
    ("flags", "rule"),
    {
        "--tensor-model-parallel-size 2 --global-batch-size 10 --micro-batch-size 4": "a whole model needs "
        "equal shares of whole micro-batches for its 1 data-parallel ranks without "
        "--calculate-per-token-loss. Give a multiple of 4, or change what needs equal shares.",
        "--expert-tensor-parallel-size 4 --global-batch-size 3 --calculate-per-token-loss "
        "--moe-token-dispatcher-type alltoall": "a whole model needs a sample for each of its 4 "
        "data-parallel ranks. Give a multiple of 4.",
    }.items(),
)
@pytest.mark.parametrize("num_ranks", [1, 64])
def test_batch_that_no_number_of_ranks_can_share_is_refused(
    flags: str, rule: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_wait_for_nodes", pytest.fail)
    with pytest.raises(ConfigError) as refusal:
        elastic.fit(given(num_ranks, flags))
    size = "10" if "10" in flags else "3"
    expected = f"--global-batch-size={size} with {FLAG} fits no number of ranks: {rule}"
    assert str(refusal.value) == expected


class _WaitsError(Exception):
    """Raised where all ranks would wait."""


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ("", ""),
        ("--moe-ft-layout same", "changes nothing without --moe-ft-layout any"),
        ("--moe-ft-strategy none", "changes nothing without --moe-ft-strategy"),
    ],
)
def test_all_ranks_wait_for_nodes_only_if_more_would_train(
    flags: str, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(args: argparse.Namespace, why: str) -> None:
        raise _WaitsError(why)

    monkeypatch.setattr(elastic, "_wait_for_nodes", wait)
    sizes = "--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --moe-ft-job-id job"
    few = given(1, f"{sizes} {flags}")
    with pytest.raises(
        ConfigError if refused else _WaitsError, match=refused or "1 ranks are too few"
    ):
        elastic.fit(few)


def test_ranks_that_wait_for_nodes_in_vain_fail_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    sizes = "--tensor-model-parallel-size 2 --moe-ft-job-id job"
    with pytest.raises(SystemExit) as end:
        elastic.fit(given(1, f"{sizes} --distributed-timeout-minutes 7"))
    assert (end.value.code, waited) == (1, [420.0])
    said = capsys.readouterr().err
    assert "training waits for nodes, at most 420 s: 1 ranks are too few" in said
    assert "rank 0 fails: no node has come within 420 s (--distributed-timeout-minutes)" in said


def test_arguments_that_no_parser_of_megatron_has_read_are_refused() -> None:
    elastic.check_fitted(False)
    with pytest.raises(ConfigError, match=f"{FLAG} is read too late"):
        elastic.check_fitted(True)


def test_rank_that_waits_ends_with_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(elastic, "_POLL_S", 0.01)
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    monkeypatch.setattr(elastic, "_waiting", (2,))
    ends: list[int | str | None] = []

    def wait() -> None:
        with pytest.raises(SystemExit) as end:
            elastic._wait_for_end(given(3, rank=2))
        ends.append(end.value.code)

    waiting = threading.Thread(target=wait)
    waiting.start()
    elastic.release(1)
    assert not store.check(["moe_ft/elastic/over"])
    elastic.release(0)
    waiting.join(60)
    assert ends == [0]


def test_rank_that_waits_for_ranks_that_have_gone_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(elastic, "_LEFT_ALONE_S", 0.01)
    args = given(3, rank=2)
    args.distributed_timeout_minutes = 0.001
    with pytest.raises(SystemExit) as end:
        elastic._wait_for_end(args)
    assert end.value.code == 1
