"""Ends of training: who was first and how, and whether the agent begins again."""

from pathlib import Path

from moe_ft.commands.report_run import read_run
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import events
from tests.kept_job import run_kept
from tests.own_scripts import BASE_FLAGS, SCRIPTS

SCRIPT = str(SCRIPTS / "pretrain_bad_sample.py")


def test_sample_that_cannot_be_read_ends_the_job_after_two_starts_that_name_it(
    tmp_path: Path, memory_dir: Path
) -> None:
    flags = [
        *model_flags(train_iters=6, num_workers=1, eval_iters=0),
        *layout_flags({"ep": 2}),
        *BASE_FLAGS,
    ]
    flags += [*event_flags(tmp_path), "--moe-ft-strategy", "dense"]
    flags += ["--moe-ft-fault-report-grace-s", "1"]
    flags += ["--moe-ft-memory-dir", str(memory_dir), "--bad-sample", "42"]
    words, log = ["moe_ft", "run", SCRIPT, *flags], tmp_path / "log"
    result = run_kept(words, 2, log=log, script="-m", max_restarts=3)
    text = log.read_text()
    assert (result.code, result.num_restarts) == (1, 1), text[-3000:]
    found = "in iteration 2: data: ValueError: sample 42 is damaged"
    assert "another start would end in the same way: rank 1 (node " in text
    assert "heard nothing" not in text, "the others only wait"
    assert text.count("verdict: rank 1 (node ") == 2
    verdicts = [each for rank in range(2) for each in events(tmp_path, rank, "verdict")]
    for each in verdicts:
        assert (each["ranks"], each["kind"], each["iteration"]) == ([1], "data", 2)
        assert found in each["words"]
    assert [each["incarnation"] for each in verdicts] == [0, 1]
    assert found in read_run(tmp_path, all_ranks=False).verdict
