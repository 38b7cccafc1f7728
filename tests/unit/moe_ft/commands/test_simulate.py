"""`simulate` reads a file, simulates what `plan` would compare, and refuses what cannot be."""

import json
import os
import re
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe_ft.cli import main
from moe_ft.commands.simulate import (
    SimulatedStrategy,
    Simulation,
    ranked,
    simulate_file,
    word,
)
from moe_ft.planning.costs import RecoveryKind
from moe_ft.planning.time_shares import TimeShares
from moe_ft.simulate.course import MachinePool
from moe_ft.simulate.failures import Failures
from moe_ft.simulate.repetitions import Setting, simulate
from tests.unit.moe_ft.planning.described import SMALL, planned_job
from tests.unit.moe_ft.simulate.costs import costs

JOB_OF_TWO = planned_job(*SMALL, world_size=4, ranks_per_node=2)
JOB = f"""
[job]
flags = "{" ".join(SMALL)} --moe-ft-persist-dir /x"
world_size = 4
ranks_per_node = 2
iteration_s = 1
bandwidth = "5MB"
network_bandwidth = "20MB"
storage_bandwidth = "1MB"
restart_s = 60
repair_s = 5
mtbf_s = 600
save_minutes = 5
"""


def written(folder: Path, text: str, job: str = JOB) -> Path:
    path = folder / "run.toml"
    path.write_text(job + text)
    return path


def test_result_is_the_same_as_text_json_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, config = tmp_path / "x.html", written(tmp_path, "[failures]\nweibull_shape = 0.8\n")
    assert main(["simulate", f"{config}", "--html", f"{page}"]) == 0
    text = capsys.readouterr().out
    assert main(["simulate", f"{config}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = result["alternatives"]
    assert len(found) == 9 and not any(each["problem"] for each in found)
    for each in found:
        assert re.search(rf"^{each['name']}  .*{each['ettr']:.2%}", text, re.MULTILINE)
        assert each["half_width"] <= 0.01 * each["ettr"]
        assert each["calculated"]["productive"] == pytest.approx(each["ettr"], abs=0.05)
        assert sum(each["time"].values()) == pytest.approx(1)
        assert sum(each["badput"].values()) == pytest.approx(1 - each["ettr"])
    root = ElementTree.fromstring(page.read_text().replace("<!DOCTYPE html>", ""))
    drawings = [each for each in root.iter() if each.tag == "svg"]
    assert len(drawings) == 1 + len(found)
    assert len(drawings[0].findall("rect")) > 5 * len(found)
    assert all(each.find("polyline") is not None for each in drawings[1:])
    assert not re.search(r"<script|https?:|src=|@import|url\(", page.read_text())


def test_alternative_that_loses_tokens_comes_first_only_if_more_than_noise_is_won() -> None:
    def outcome(name: str, ettr: float, half_width: float) -> SimulatedStrategy:
        result = replace(simulated, shares=TimeShares(productive=ettr), half_width=half_width)
        return SimulatedStrategy(name=name, flags=(), is_exact=name != "lossy", result=result)

    pool = MachinePool(num_nodes=2, num_spares=0)
    setting = Setting(failures=Failures(mtbf_s=600), pool=pool, horizon_s=600.0, tolerance=0.5)
    simulated = simulate(costs(), RecoveryKind.RESTART, setting)
    for won, best in ((0.004, "exact"), (0.05, "lossy")):
        found = ranked(
            [
                outcome("lossy", 0.9 + won, 0.009),
                outcome("other", 0.8, 0),
                outcome("exact", 0.9, 0.009),
            ]
        )
        assert found[0].name == best
        assert found[-1].name == "other"
        told = Simulation(job=JOB_OF_TWO, setting=setting, outcomes=found, assumptions=[])
        even = ["lossy"] if best == "exact" else []
        answer = word(told)
        assert answer.values["even"] == even
        line = f"no difference beyond noise from exact: {', '.join(even)}"
        assert (line in answer.as_text().splitlines()) == bool(even)


def test_strategy_and_recovery_may_be_chosen(tmp_path: Path) -> None:
    job = JOB.replace("--bf16", "--bf16 --moe-ft-strategy sparse")
    (chosen,) = simulate_file(written(tmp_path, '[run]\nrecovery = "restart"', job)).done
    assert chosen[0] == "sparse" and chosen[1].kind == "restart"
    (unknown,) = simulate_file(written(tmp_path, '[run]\nrecovery = "keep"', job)).outcomes
    assert unknown.problem == "recovery=keep cannot be: its costs are known for restart"


def test_job_that_fits_no_host_is_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = JOB.replace("--bf16", "--bf16 --moe-ft-host-memory-limit 1KB")
    assert main(["simulate", f"{written(tmp_path, '', job)}"]) == 0
    text = capsys.readouterr().out
    assert "sparse at peers: does not fit: needs 0 GiB of host memory per node" in text


def test_shrinking_is_named_as_an_assumption_and_shortens_the_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spares = "[run]\ntolerance = 0.05\n[machines]\nspares = 0\nreturn_h = 0.5\n"
    assert main(["simulate", f"{written(tmp_path, spares)}", "--json"]) == 0
    waits = json.loads(capsys.readouterr().out)
    assert main(["simulate", f"{written(tmp_path, spares + 'least_nodes = 1')}", "--json"]) == 0
    shrinks = json.loads(capsys.readouterr().out)
    assert waits["assumptions"] == shrinks["assumptions"][:-2]
    assert shrinks["assumptions"][-2]["from"] == "assumption: training does not shrink yet"
    both = (sorted(each["alternatives"], key=itemgetter("name")) for each in (waits, shrinks))
    for before, after in zip(*both, strict=True):
        assert after["time"]["waiting"] < before["time"]["waiting"]
        assert after["ettr"] > before["ettr"]


def test_trace_says_who_is_there_and_how_often_machines_fail(tmp_path: Path) -> None:
    (tmp_path / "spot.csv").write_text(
        "0,add,a\n0,add,b\n0,add,c\n900000,remove,a\n1800000,remove,b\n"
    )
    job = JOB.replace("mtbf_s = 600\n", "")
    # Without its hours the run is as long as the trace, at whose end nobody comes.
    short = simulate_file(written(tmp_path, '[failures]\ntrace = "spot.csv"', job))
    assert short.setting.horizon_s == 1800
    assert all(found.shares.waiting == 0 for _, found in short.done)
    result = simulate_file(
        written(tmp_path, '[failures]\ntrace = "spot.csv"\n[run]\nhours = 1', job)
    )
    assert result.job.measured.mtbf_s == 1800
    for _, found in result.done:
        assert found.num_failures == 2
        assert found.shares.waiting == pytest.approx(0.5)  # one machine is left after half an hour


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[failure]\n", "failure is no table of a simulation, .* Did you mean failures"),
        ("[failures]\nshape = 1\n", r"failures.shape is no key .* Did you mean .*weibull_shape"),
        ("[failures]\nweibull_shape = 0\n", "failures.weibull_shape=0 must be from 0.2 to 10"),
        ("[failures]\ncrash_share = 2\n", "failures.crash_share=2 must be from 0 to 1"),
        ("[failures]\nrack_share = 0.1\n", "failures.rack_share=0.1 needs failures.rack_nodes"),
        (
            "[machines]\nspares = -1\n",
            "machines.spares=-1 must be a whole number, 0 to 10\\^6",
        ),
        ("[machines]\nspares = 1000000000000\n", "machines.spares=1000000000000 must be a whole"),
        ("x = " + "[" * 9000, "cannot be read: .* Give a TOML file as docs/simulate.md has it"),
        ("JOB -persist-dir /x|-persist-dir '/x", "job.flags=.*No closing quotation"),
        ("JOB mtbf_s = 600|mtbf_s = 600\ncluster = 'LIKE.toml'", "like=.* must be one of"),
        ('[failures]\ntrace = "pipe"\n', "failures.trace=pipe cannot be read: .* a named pipe"),
        ('[failures]\ntrace = "many.csv"\n', "many.csv, line 1: .* at most 10\\^6 machines"),
        ("JOB --num-layers 4|--num-layers 99999999999", "--num-layers=99999999999 must be at most"),
        (
            "[machines]\nleast_nodes = 9\n",
            "machines.least_nodes=9 must be at most the 2 nodes of the job",
        ),
        ("[run]\nhours = 0\n", "run.hours=0 must be a number above 0"),
        ("[run]\nhours = true\n", "run.hours=True must be a number above 0"),
        ('[run]\nrecovery = "pray"\n', "run.recovery='pray' must be fastest or restart or keep"),
        ("[run\n", "cannot be read: .* Give a TOML file as docs/simulate.md has it"),
        ('[failures]\ntrace = "no.csv"\n', "failures.trace=no.csv cannot be read: .*No such file"),
        (
            '[failures]\ntrace = "bad.csv"\n',
            "bad.csv, line 2: 'x,add,b' must be MILLISECONDS,add",
        ),
        (
            '[failures]\ntrace = "bad.csv"\n[machines]\nspares = 2\n',
            "failures.trace=bad.csv does not go with spares: the trace says",
        ),
        (
            "JOB mtbf_s = 600|mtbf_s = 0.1",
            "run.hours=12 with a failure every 0.1 s makes 432,000 failures, which must be at most",
        ),
        ("JOB mtbf_s = 600|mtbf_s = 0\n", "--mtbf-s=0.0 must be more than 0 seconds"),
        ("JOB mtbf_s = 600|mtbf = 600", "job.mtbf is no key of .* Did you mean job.mtbf_s"),
        ("JOB mtbf_s = 600|mtbf_s = 'often'", "argument --mtbf-s: invalid float value: 'often'"),
        (
            "JOB mtbf_s = 600|cluster = 'h100'",
            "--cluster=h100 must be one of .* Did you mean dgx-h100",
        ),
        (
            "JOB mtbf_s = 600|model = 'mixtral'",
            "--model=mixtral must be one of .* Did you mean mixtral-8x",
        ),
        ("JOB mtbf_s = 600|", "--mtbf-s must be known"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.csv").write_text("0,add,a\nx,add,b\n")
    (tmp_path / "many.csv").write_text("2026-01-01, 00:00:00, 1000000000\n")
    (tmp_path / "LIKE.toml").write_text('like = ["a"]\n')
    text = text.replace("'LIKE", f"'{tmp_path}/LIKE")
    os.mkfifo(tmp_path / "pipe")
    job = JOB
    if text.startswith("JOB "):
        old, new = text[4:].split("|")
        job, text = JOB.replace(old, new), ""
    assert main(["simulate", f"{written(tmp_path, text, job)}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)
