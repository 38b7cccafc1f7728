"""The process gets what Megatron expects of it."""

import os
from pathlib import Path

import pytest
from megatron.core.datasets import utils as dataset_utils

from megatron.fault_tolerance.launch import environment
from moe_ft.errors import ConfigError

STORE = {"TORCHELASTIC_USE_AGENT_STORE": "True"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_MAX_RESTARTS"),
        "TORCHELASTIC_RESTART_COUNT",
    ):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)


def test_process_that_is_started_alone_is_a_job_of_its_own() -> None:
    environment._complete_variables()
    assert os.environ["LOCAL_RANK"] == "0"
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert int(os.environ["MASTER_PORT"]) > 0


def test_variables_of_a_launcher_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment._complete_variables()
    assert {name: os.environ[name] for name in given} == given
    assert "MASTER_ADDR" not in os.environ


@pytest.mark.parametrize(
    "restarts", [{"TORCHELASTIC_MAX_RESTARTS": "3"}, {"TORCHELASTIC_RESTART_COUNT": "1"}]
)
def test_restarts_in_vain_are_refused_with_what_helps(
    restarts: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**STORE, **restarts}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="--max-restarts=.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        environment.check_restarts()


@pytest.mark.parametrize("given", [STORE, {"TORCHELASTIC_MAX_RESTARTS": "3"}, {}])
def test_job_without_restarts_or_with_a_store_of_its_own_is_accepted(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    environment.check_restarts()


@pytest.mark.parametrize("has_makefile", [False, True])
def test_dataset_helper_is_compiled_only_where_there_is_a_makefile(
    has_makefile: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_makefile:
        (tmp_path / "Makefile").touch()
    compile_helpers = dataset_utils.compile_helpers
    monkeypatch.setattr(dataset_utils, "compile_helpers", compile_helpers)  # put back afterwards
    monkeypatch.setattr(dataset_utils, "__file__", str(tmp_path / "utils.py"))
    environment._use_prebuilt_dataset_helper()
    assert (dataset_utils.compile_helpers is compile_helpers) == has_makefile
