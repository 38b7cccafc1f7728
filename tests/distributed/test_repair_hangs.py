"""Repair in place of ranks that hang, and of ranks that die while others are being replaced."""

import re
from collections.abc import Sequence

import pytest

from tests.jobs import DENSE, LOCAL, NUM_REPAIRED, PHASES, SPARSE, RepairedJob
from tests.kept_job import ROOT

DEADLINE_S = 300
HEARTBEAT = ("--moe-ft-repair-heartbeat-s", "8")


def hung_ranks(job: RepairedJob) -> list[list[str]]:
    """Return ``[rank]`` those that were killed because they hung, as each rank has noted it."""
    lines = [job.events("repair", rank)[-1] for rank in range(job.num_ranks)]
    assert all(seconds > 8 for line in lines for seconds in line["hung_s"].values())
    return [list(line["hung_s"]) for line in lines]


@pytest.mark.rest
@pytest.mark.parametrize("strategy", [DENSE, SPARSE], ids=lambda strategy: str(strategy[0]))
@pytest.mark.parametrize(("rank", "phase"), zip((0, 1, 2, 3), PHASES, strict=True))
def test_stopped_rank_is_killed_and_replaced(
    repaired: RepairedJob, rank: int, phase: str, strategy: Sequence[str]
) -> None:
    repaired.run(f"stop:{rank}@4:{phase}", strategy=(*strategy, *HEARTBEAT))
    repaired.check([rank], [4], [{3, 4} if strategy is DENSE else {3}])
    assert hung_ranks(repaired) == [[str(rank)]] * 4
    pattern = rf"rank {rank} \(process \d+\) has given no sign of life for \d"
    assert re.search(pattern, (repaired.folder / "log").read_text())


@pytest.mark.rest
def test_rank_that_hangs_in_an_iteration_ends_itself_after_the_limit_and_is_replaced(
    repaired: RepairedJob,
) -> None:
    """Its groups would time out after ten minutes."""
    limit = ("--moe-ft-hang-limit", "20")
    repaired.run("hang:2@4:backward", strategy=(*SPARSE, *limit), deadline_s=DEADLINE_S)
    repaired.check([2], [4], [{3}])
    assert hung_ranks(repaired) == [["2"]] * 4
    hangs = {rank: repaired.events("hang", rank) for rank in range(repaired.num_ranks)}
    assert [rank for rank, lines in hangs.items() if lines] == [2], "the others only wait"
    ((line,),) = filter(None, hangs.values())
    assert (line["iteration"], line["section"], line["phase"]) == (4, "iteration", "backward")
    assert line["limit_s"] == 20
    text = (repaired.folder / "log").read_text()
    assert "rank 2 hangs in iteration 4, phase backward, and ends: in its iteration it has" in text
    assert "in _hang" in text, "the place is shown"


@pytest.mark.rest
def test_rank_that_hangs_in_a_recovery_ends_itself_and_is_replaced_in_the_next_round(
    repaired: RepairedJob,
) -> None:
    patience = ("--distributed-timeout-minutes", "1")
    faults = ("kill:3@4:forward", "hang:1@3:recovery")
    repaired.run(*faults, strategy=DENSE, extra=patience, deadline_s=DEADLINE_S)
    for rank in range(repaired.num_ranks):
        (line,) = repaired.events("repair", rank)
        assert (line["round"], line["dead_ranks"], [*line["hung_s"]]) == (2, [1, 3], ["1"])
    assert repaired.digests() == repaired.reference()


@pytest.mark.rest
@pytest.mark.timeout(900)
def test_timeout_of_the_flag_counts_before_and_after_a_repair(repaired: RepairedJob) -> None:
    """The second hang is that of the replacement, which has set the timeout of its groups alone."""
    repaired.run(
        *("hang:2@4:backward", "hang:2@6:forward"),
        strategy=(*DENSE, *HEARTBEAT),
        extra=("--distributed-timeout-seconds-after-init", "40"),
        deadline_s=DEADLINE_S,
    )
    repaired.check([2, 2], [4, 6], [{3, 4}, {5, 6}])
    assert hung_ranks(repaired) == [["2"]] * 4
    text = (repaired.folder / "log").read_text()
    found = re.findall(r"has left its iteration: a rank has died \(.*[Tt]imed out.* (\d+)ms", text)
    assert found, text[-3000:]
    assert set(found) == {"40000"}, "not the minute of --distributed-timeout-minutes"


# A survivor that dies when it has made some of the backends of round 1.
DIES_IN_SWAP = f"""
import os, runpy, signal, sys
from megatron.fault_tolerance.repair import gloo
from moe_ft.cluster.member import own_member

make, made = gloo.ProcessGroupGloo, []

def die(*arguments):
    made.append(arguments)
    if len(made) == 3 and os.environ["RANK"] == "1" and not own_member().is_replacement:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(*arguments)

for name in ("_Options", "create_device", "create_default_device"):
    setattr(die, name, getattr(make, name))
gloo.ProcessGroupGloo = die
sys.argv[0] = "{ROOT / "pretrain_gpt_moe.py"}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    ("second", "dead", "strategy"),
    [
        ("kill:1@3:recovery", [1, 3], DENSE),
        ("kill:3@3:recovery", [3], SPARSE),
        ("kill:2@4:after-step", [2, 3], SPARSE),
        ("kill:3@4:in-step", [3], DENSE),
        ("stop:0@3:recovery", [0, 3], SPARSE),
        ("swap", [1, 3], DENSE),
        ("kill:1@3:recovery", [1, 3], (*SPARSE, *LOCAL)),
        ("kill:2@4:after-step", [2, 3], (*DENSE, *LOCAL)),
    ],
)
def test_death_during_a_repair_begins_the_next_round(
    repaired: RepairedJob, second: str, dead: list[int], strategy: Sequence[str]
) -> None:
    faults, script = ["kill:3@4:forward", second], ROOT / "pretrain_gpt_moe.py"
    if second == "swap":
        faults, script = faults[:1], repaired.folder / "script.py"
        script.write_text(DIES_IN_SWAP)
    strategy = (*strategy, *HEARTBEAT)
    repaired.run(*faults, strategy=strategy, script=str(script), deadline_s=DEADLINE_S)
    for rank in range(repaired.num_ranks):
        (line,) = repaired.events("repair", rank)
        assert (line["round"], line["dead_ranks"]) == (2, dead)
        pids = {each["pid"] for each in repaired.events("start", rank)}
        assert (len(pids) > 1) == (rank in dead), "survivors keep their processes"
    assert hung_ranks(repaired) == [["0"] if second.startswith("stop") else []] * 4
    assert repaired.logged() == list(range(1, NUM_REPAIRED + 1))
    assert repaired.digests() == repaired.reference()
