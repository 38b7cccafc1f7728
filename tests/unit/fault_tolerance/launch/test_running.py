"""A script runs as Python runs it, and --moe-ft-* flags that it never used are refused."""

import subprocess
import sys
from pathlib import Path

import pytest
from megatron.training import training

from megatron.fault_tolerance.launch.running import check_has_trained
from moe_ft.keeper.forked_rank import run_script
from moe_ft.loop import refusing

SEEN = """
import atexit, pickle, sys

class Mine: pass

atexit.register(lambda: print(pickle.loads(pickle.dumps(Mine())).__class__))
print(__name__, __file__, __spec__, __package__, __doc__, sys.argv, sys.modules["__main__"].Mine)
"""
CODE = "import sys; sys.argv = sys.argv[1:]; import {0}; {0}.run_script(sys.argv[0])"


@pytest.mark.rest
def test_script_sees_the_same_as_with_python_and_stays_the_main_module_to_the_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(SEEN)
    words = ["script.py", "--lr", "1"]
    code = CODE.format("megatron.fault_tolerance.launch.running")
    outputs = [
        subprocess.run(
            [sys.executable, *start, *words],
            cwd=tmp_path,
            env={"PYTHONPATH": str(Path(__file__).parents[4])},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for start in ([], ["-c", code])
    ]
    assert outputs[0] == outputs[1]
    assert "<class '__main__.Mine'>" in outputs[0]


def test_exception_of_a_script_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # put back afterwards
    (tmp_path / "script.py").write_text("raise RuntimeError('of the script')")
    with pytest.raises(RuntimeError, match="of the script"):
        run_script(str(tmp_path / "script.py"))


def test_flags_of_a_script_that_never_trained_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setitem(training._STARTUP_TIMESTAMPS, "pretrain_entry", None)
    check_has_trained(["train.py", "--lr", "1"])
    assert "train.py has ended without a call" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        check_has_trained(["train.py", "--moe-ft-strategy=dense", "--moe-ft-keep", "3"])
    assert end.value.code == refusing.EXIT_REFUSED
    assert "so --moe-ft-strategy, --moe-ft-keep had no effect" in capsys.readouterr().err
    monkeypatch.setitem(training._STARTUP_TIMESTAMPS, "pretrain_entry", 1.0)
    check_has_trained(["train.py", "--moe-ft-strategy=dense"])
    assert capsys.readouterr().err == ""
