"""Calls of `pretrain` are checked, and pass to Megatron's own with nothing around it where moe_ft is off.

A script runs as Python runs it, and --moe-ft-* flags that it never used are refused.
"""

import argparse
import inspect
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron.training import arguments, ft_integration, global_vars, training
from megatron.training import pretrain as stock_pretrain

from megatron import fault_tolerance
from megatron.fault_tolerance.launch import pretraining
from megatron.fault_tolerance.seams.settings import checked_config
from moe_ft.loop.refusing import EXIT_REFUSED
from tests.unit.fault_tolerance.parsing import parse

CONTAINER = object()
CALL = (CONTAINER, "datasets", "type", "forward step")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the calls of Megatron's own function, which does nothing."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stock(
        cfg_container: Any, datasets: Any, model_type: Any, forward: Any, model_provider: Any = None
    ) -> str:
        found.append(((cfg_container, datasets, model_type, forward), {"provider": model_provider}))
        return "result"

    monkeypatch.setattr(pretraining, "stock_pretrain", stock)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("LOCAL_RANK", "0")
    return found


@pytest.fixture
def older_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return the calls of an older Megatron's function, before which no arguments are parsed."""
    found: list[tuple[Any, ...]] = []

    def stock(datasets: Any, provider: Any, model_type: Any, forward_step_func: Any) -> str:
        found.append((datasets, provider, model_type, forward_step_func))
        return "result"

    monkeypatch.setattr(pretraining, "stock_pretrain", stock)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return found


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a flag on the command line."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--moe-ft-strategy", "dense"])


@pytest.fixture
def loop_args(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    args = parse("--mock-data")
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    return args


def test_library_function_has_the_name_and_signature_of_megatrons() -> None:
    assert fault_tolerance.pretrain is pretraining.pretrain
    assert inspect.signature(pretraining.pretrain) == inspect.signature(stock_pretrain)
    assert pretraining.pretrain.__name__ == "pretrain"


def test_call_without_flags_passes_and_says_that_moe_ft_is_off(
    calls: list[Any], loop_args: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretraining.pretrain(*CALL, model_provider="model") == "result"
    assert calls == [(CALL, {"provider": "model"})]
    assert "moe_ft: off" in capsys.readouterr().err


def test_call_without_flags_of_a_megatron_that_parses_inside_pretrain_passes(
    older_calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert pretraining.pretrain(print, print, "type", forward_step_func=print) == "result"
    assert older_calls == [(print, print, "type", print)]
    assert "moe_ft: off" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((print, print, "type", print), {}, "is called with a provider first"),
        ((print, print, "type", print), {"extra_args_provider": print}, "does not take"),
        ((), {"train_valid_test_dataset_provider": print}, "does not take"),
    ],
)
def test_older_call_is_refused_with_the_lines_to_change(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    words: str,
    calls: list[Any],
    asks: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        pretraining.pretrain(*args, **kwargs)
    assert end.value.code == EXIT_REFUSED
    assert not calls
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert "pretrain(pretrain_cfg_container_from_args(args, model_config), dataset_provider" in line


def test_call_before_flags_are_parsed_is_refused(
    calls: list[Any],
    asks: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", None)
    with pytest.raises(SystemExit):
        pretraining.pretrain(*CALL)
    assert "before Megatron's arguments are set. Add args = parse_and" in capsys.readouterr().err


def test_flags_that_the_arguments_of_the_script_lack_are_refused(
    calls: list[Any],
    loop_args: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--moe-ft-strategy", "dense"])
    with pytest.raises(SystemExit):
        pretraining.pretrain(*CALL)
    assert not calls
    assert "train.py: error: --moe-ft-strategy would be ignored" in capsys.readouterr().err


def test_settings_that_the_script_changed_after_parsing_are_checked_again(
    calls: list[Any], loop_args: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    loop_args.moe_ft_strategy, loop_args.moe_ft_job_id = "partial", "job"
    loop_args.moe_ft_k_snapshot, loop_args.num_experts = "4", 2
    with pytest.raises(SystemExit):
        pretraining.pretrain(*CALL)
    assert "--moe-ft-k-snapshot=4 must be at most --num-experts=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "is_reported"),
    [
        ((), True),
        (("--exit-signal-handler",), False),
        (("--exit-signal-handler", "--exit-signal", "SIGUSR1"), True),
    ],
)
def test_sigterm_is_reported_as_a_failure_unless_it_means_a_planned_end(
    flags: tuple[str, ...], is_reported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse("--mock-data", *flags, "--moe-ft-event-log", str(tmp_path))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    before = signal.getsignal(signal.SIGTERM)
    during = []
    pretraining.train(
        checked_config(args), args, lambda: during.append(signal.getsignal(signal.SIGTERM))
    )
    assert (during != [before]) == is_reported


def test_megatron_does_not_parse_again_in_pretrain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = parse("--mock-data", "--moe-ft-event-log", str(tmp_path))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    stock, found = arguments.parse_args, list[argparse.Namespace]()

    def pretrain() -> None:
        ft_integration.setup()
        found.append(arguments.parse_args(ignore_unknown_args=True))

    monkeypatch.setattr(sys, "argv", ["train.py", "--num-layers", "none"])  # would be refused
    pretraining.train(checked_config(args), args, pretrain)
    assert found == [args]
    assert arguments.parse_args is stock


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_signal_of_a_planned_end_does_not_end_a_rank_that_exits(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    try:
        for is_handled in (False, True):
            signal.signal(number, signal.SIG_DFL)
            args = argparse.Namespace(exit_signal_handler=is_handled, exit_signal=number)
            pretraining.ignore_exit_signal(args)
            is_ignored = signal.getsignal(number) is signal.SIG_IGN
            assert is_ignored == (is_handled and number != signal.SIGTERM)
    finally:
        signal.signal(number, before)


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
    code = CODE.format("megatron.fault_tolerance.launch.pretraining")
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


def test_flags_of_a_script_that_never_trained_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setitem(training._STARTUP_TIMESTAMPS, "pretrain_entry", None)
    pretraining.check_has_trained(["train.py", "--lr", "1"])
    assert "train.py ended without calling" in capsys.readouterr().err
    with pytest.raises(SystemExit) as end:
        pretraining.check_has_trained(["train.py", "--moe-ft-strategy=dense", "--moe-ft-keep", "3"])
    assert end.value.code == EXIT_REFUSED
    assert "so --moe-ft-strategy, --moe-ft-keep had no effect" in capsys.readouterr().err
    monkeypatch.setitem(training._STARTUP_TIMESTAMPS, "pretrain_entry", 1.0)
    pretraining.check_has_trained(["train.py", "--moe-ft-strategy=dense"])
    assert capsys.readouterr().err == ""
