"""A script of Megatron-Bridge is run once all is wrapped, and refused if it trains without Bridge."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import megatron.training
import pytest
from megatron.training import training

from megatron.fault_tolerance.bridge import script
from moe_ft.loop.refusing import EXIT_REFUSED

FLAGS = ("--moe-ft-strategy", "dense")


@pytest.fixture
def bridge(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Have Bridge's `pretrain` be a function that a script finds in os; return its calls."""
    calls: list[Any] = []

    def wrap(flags: tuple[str, ...]) -> None:
        monkeypatch.setattr(os, "pretrain", lambda: calls.append(flags), raising=False)

    loaded = SimpleNamespace(wrap=wrap, has_trained=lambda: bool(calls))
    monkeypatch.setitem(sys.modules, script._LAUNCH, loaded)
    for name in ("stdout", "argv", "path"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    monkeypatch.setattr(os, "execve", os.execve)
    monkeypatch.setattr(training, "pretrain", training.pretrain)
    monkeypatch.setattr(megatron.training, "pretrain", megatron.training.pretrain)
    monkeypatch.setenv("LOCAL_RANK", "0")
    return calls


def run(path: Path, code: str, override: str = "train.train_iters=3") -> None:
    path.write_text(code)
    sys.argv = [str(path), override]
    main = sys.modules["__main__"]
    try:
        script.run(str(path), FLAGS)
    finally:
        sys.modules["__main__"] = main


def test_pretrain_of_bridge_is_wrapped_when_the_script_runs(
    bridge: list[Any], tmp_path: Path
) -> None:
    run(
        tmp_path / "x.py",
        "import os, sys; assert sys.argv[1:] == ['train.train_iters=3']; os.pretrain()",
    )
    assert bridge == [FLAGS]


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        (
            "",
            "x.py ended without calling pretrain of megatron.bridge.training.pretrain, so --moe-ft-s",
        ),
        ("import sys; sys.exit()", "x.py ended without calling pretrain of megatron.bridge"),
        (
            "from megatron.training import pretrain; pretrain()",
            "--moe-ft-strategy in front of the script mean a job of Megatron-Bridge, and the script calls",
        ),
    ],
)
def test_script_that_does_not_train_with_bridge_is_refused(
    code: str, problem: str, bridge: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "x.py", code)
    assert end.value.code == EXIT_REFUSED
    assert problem in capsys.readouterr().err


def test_settings_of_moe_ft_among_overrides_are_refused_before_the_script_runs(
    bridge: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(tmp_path / "x.py", "assert False", "+moe_ft.strategy=sparse")
    assert end.value.code == EXIT_REFUSED
    assert "+moe_ft.strategy=sparse would be ignored" in capsys.readouterr().err


def test_forked_rank_runs_a_script_that_executes_itself_again_in_the_same_process(
    bridge: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "own_assignment", object)
    monkeypatch.setenv("MARK", "")
    variables = "{**os.environ, 'MARK': str(os.getpid())}"
    again = f"os.execvpe(sys.executable, [sys.executable, os.path.realpath(sys.argv[0]), 'a=1'], {variables})"
    begin = f"import os, sys\nif not os.environ['MARK']: {again}\n"
    run(tmp_path / "x.py", f"{begin}assert sys.argv[1:] == ['a=1']\nos.pretrain()")
    assert bridge == [FLAGS] and os.environ["MARK"] == str(os.getpid())


def test_script_that_executes_itself_again_is_run_under_moe_ft_again(
    bridge: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *args: calls.append(args))
    again = "os.execvpe(sys.executable, [sys.executable, os.path.realpath(sys.argv[0]), 'a=1'], {'B': '2'})"
    other = "os.execve('/bin/true', ['true', 'x'], {})"
    path = tmp_path / "x.py"
    run(path, f"import os, sys; {again}; {other}; os.pretrain()")
    words = [sys.executable, "-m", "moe_ft", "run", *FLAGS, "--", str(path), "a=1"]
    assert calls == [(sys.executable, words, {"B": "2"}), ("/bin/true", ["true", "x"], {})]
