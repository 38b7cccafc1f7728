"""The process gets what Megatron expects of it; torchrun finds a whole report of an exception, or none."""

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core.datasets import utils as dataset_utils
from torch.distributed.elastic.multiprocessing import errors

from megatron.fault_tolerance.launch import environment
from megatron.fault_tolerance.launch.environment import WholeErrorFile
from megatron.fault_tolerance.launch.pretraining import run
from moe_ft.errors import ConfigError
from moe_ft.processes import start_ticks

STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS"),
        *("TORCHELASTIC_RESTART_COUNT", "GROUP_WORLD_SIZE"),
    ):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)


@pytest.mark.parametrize("port", [None, "29511"])
def test_process_that_is_started_alone_is_a_job_of_its_own(
    port: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if port is None:
        monkeypatch.setenv("MASTER_ADDR", "left.by.another.job")
    else:
        monkeypatch.setenv("MASTER_PORT", port)
    environment._complete_variables()
    assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert int(os.environ["MASTER_PORT"]) > 0
    assert port in (None, os.environ["MASTER_PORT"])


def test_variables_of_a_launcher_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment._complete_variables()
    assert {name: os.environ[name] for name in given} == given
    assert "MASTER_ADDR" not in os.environ


def test_tasks_of_a_slurm_step_get_the_variables_that_torchrun_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_step = {"SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NODEID": "1"}
    for name, value in {**of_step, "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")  # a shell in an allocation
    environment.take_slurms_variables()
    assert "RANK" not in os.environ
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    environment.take_slurms_variables()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [os.environ[name] for name in names] == ["11", "16", "3", "8"]


@pytest.mark.parametrize(
    ("given", "is_refused"),
    [
        ({**STORE, "TORCHELASTIC_MAX_RESTARTS": "3"}, True),
        ({**STORE, "TORCHELASTIC_RESTART_COUNT": "1"}, True),
        (STORE, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, False),
        ({**STORE, "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "2"}, True),
        ({**STORE, "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1"}, False),
    ],
)
def test_restarts_in_vain_are_refused_with_what_helps(
    given: dict[str, str], is_refused: bool
) -> None:
    message = "--max-restarts=.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    with pytest.raises(ConfigError, match=message) if is_refused else nullcontext():
        environment.check_restarts(given)


def test_ranks_of_one_node_meet_at_a_port_of_their_own_rank_0_and_not_of_one_that_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 looks first, and finds what the rank 0 of the start before has left."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents.set(environment._MEETING, f"1 {os.getpid()} {start_ticks(os.getpid()) - 1}")
    given = {**STORE, "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(agents.port)}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    has_looked = threading.Event()
    monkeypatch.setattr("time.sleep", lambda _: has_looked.set())
    monkeypatch.setenv("RANK", "1")
    with ThreadPoolExecutor() as threads:
        of_rank_1 = threads.submit(environment._own_port)
        assert has_looked.wait(60.0)
        monkeypatch.setenv("RANK", "0")
        environment.prepare_restarts()
        assert of_rank_1.result() == int(os.environ["MASTER_PORT"]) != agents.port
    monkeypatch.setenv("MASTER_PORT", "1")
    environment.prepare_restarts()
    assert os.environ["MASTER_PORT"] == "1", "a second call does nothing"


def test_ranks_that_have_met_already_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**STORE, "TORCHELASTIC_MAX_RESTARTS": "3", "GROUP_WORLD_SIZE": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="--max-restarts=3 needs .*TORCH_DISABLE"):
        environment.prepare_restarts()


@pytest.mark.parametrize(
    ("age_s", "is_used"),
    [(None, True), (0, True), (9, True), (-9, False)],
    ids=["wheel", "same", "newer", "older"],
)
def test_compiled_dataset_helper_of_a_checkout_is_used_if_it_is_not_older_than_its_source(
    age_s: int | None, is_used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    assert helper is not None and helper.origin is not None
    if age_s is not None:
        (tmp_path / "Makefile").touch()
        (tmp_path / "helpers.cpp").touch()
        of_source = Path(helper.origin).stat().st_mtime_ns - age_s * 10**9
        os.utime(tmp_path / "helpers.cpp", ns=(of_source, of_source))
    compile_helpers = dataset_utils.compile_helpers
    monkeypatch.setattr(dataset_utils, "compile_helpers", compile_helpers)  # put back afterwards
    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "utils.py"))
    environment._use_prebuilt_dataset_helper()
    assert (dataset_utils.compile_helpers is not compile_helpers) == is_used


SCRIPT = """
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    raise ValueError("of training")

main()
"""


def _end_half_way(data: Any, file: Any) -> None:
    file.write(json.dumps(data)[:20])
    file.flush()
    os.kill(os.getpid(), signal.SIGTERM)


def report_of(main: Callable[[], None], handler: errors.ErrorHandler | None, path: Path) -> Any:
    """Return what torchrun's agent makes of a process that SIGTERM ends while it writes its report."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(path)
        errors.error_handler.json.dump = _end_half_way  # type: ignore[attr-defined]
        (main if handler is None else errors.record(main, handler))()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return errors.ProcessFailure(local_rank=0, pid=pid, exitcode=code, error_file=str(path))


def fail() -> None:
    """Raise."""
    raise ValueError("of training")


def test_process_that_is_ended_while_it_writes_the_report_leaves_none(tmp_path: Path) -> None:
    failure = report_of(fail, WholeErrorFile(), tmp_path / "error.json")
    assert failure.exitcode == -signal.SIGTERM
    assert "Signal 15 (SIGTERM)" in failure.message
    with pytest.raises(json.JSONDecodeError):  # as torch itself does
        report_of(fail, errors.ErrorHandler(), tmp_path / "error.json")


def test_script_of_run_with_a_record_of_its_own_leaves_none_either(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    program = partial(run, str(tmp_path / "script.py"))
    failure = report_of(program, None, tmp_path / "error.json")
    assert failure.exitcode == -signal.SIGTERM
    assert "Signal 15 (SIGTERM)" in failure.message


def test_report_is_the_one_that_torch_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with pytest.raises(ValueError, match="of training"):
        errors.record(fail, WholeErrorFile())()
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: of training"
    assert "in fail" in message["extraInfo"]["py_callstack"]
    assert list(tmp_path.iterdir()) == [path]


def test_report_that_cannot_be_written_does_not_hide_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "absent" / "error.json"))
    with pytest.raises(ValueError, match="of training"):
        partial(errors.record, error_handler=WholeErrorFile())(fail)()
    assert "torchrun's error file is not written" in capsys.readouterr().err
