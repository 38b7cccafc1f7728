"""Rules on --moe-ft-* values, and on the directories that flags name."""

import re
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe_ft.config.config import (
    MemoryConfig,
    MoeFtConfig,
    RecoveryConfig,
)
from moe_ft.config.fields import flag_of
from moe_ft.config.flags import config_from
from moe_ft.config.rules import check_directories
from moe_ft.errors import ConfigError
from moe_ft.strategies.registry import option_types


def test_defaults_are_valid() -> None:
    MoeFtConfig().validate(world_size=1)


def settings(**values: Any) -> MoeFtConfig:
    """Return what flags with these values give."""
    given = Namespace(**{f"moe_ft_{name}": value for name, value in values.items()})
    return config_from(given, option_types())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            settings(state_digest_interval=-1),
            "--moe-ft-state-digest-interval=-1 must be at least 0",
        ),
        (
            settings(
                strategy="dense", without_spare="share", repair="auto", layout="any", elastic=True
            ),
            "--moe-ft-without-spare=share cannot be used with --moe-ft-elastic: peers share",
        ),
        (
            settings(strategy="dense", without_spare="shrink", repair="auto"),
            "--moe-ft-without-spare=shrink needs --moe-ft-elastic: .* give --moe-ft-without-spare crowd",
        ),
        (
            settings(
                strategy="dense", late_gradients="always", repair="auto", layout="any", elastic=True
            ),
            "--moe-ft-late-gradients=always cannot be used with --moe-ft-elastic: its schedule",
        ),
        (
            settings(strategy="dense", late_gradients="shared"),
            "--moe-ft-late-gradients=shared changes nothing without --moe-ft-without-spare share",
        ),
        (settings(on_error="ignore"), "--moe-ft-on-error=ignore must be one of degrade, raise"),
        (
            settings(persist_dense_interval=-1),
            "--moe-ft-persist-dense-interval=-1 must be at least 0",
        ),
        (settings(sharding="some"), "--moe-ft-sharding=some must be one of none, equal, adaptive"),
        (
            settings(event_log="e", metrics_port=80),
            "--moe-ft-metrics-port=80 must be at least 1024: lower ports are for services",
        ),
        (
            settings(event_log="e", metrics_port=65536),
            "--moe-ft-metrics-port=65536 must be between 0 and 65535",
        ),
        (settings(recover_from="120"), "--moe-ft-recover-from=120 must be auto, load or iter_N"),
        (
            settings(upstream_log=True, strategy="dense", interval="auto"),
            "--moe-ft-upstream-log needs a fixed interval: with --moe-ft-interval=auto .* "
            "Give --moe-ft-interval a number of iterations",
        ),
        *(
            (
                settings(replicate="gradients", strategy="dense", interval=interval),
                "--moe-ft-replicate=gradients needs --moe-ft-interval 1: .*Give --moe-ft-interval 1, or",
            )
            for interval in ("2", "auto")
        ),
        (
            settings(replicate="gradients", strategy="dense", state_dtype="master=split"),
            "--moe-ft-replicate=gradients cannot be used with --moe-ft-state-dtype: .*Leave --moe-ft-s",
        ),
        (
            settings(replicate="updates"),
            "--moe-ft-replicate=updates must be one of state, gradients",
        ),
        (
            settings(repair_heartbeat_s=0.5),
            "--moe-ft-repair-heartbeat-s=0.5 must be between 1 and 86400: a healthy rank on a busy",
        ),
    ],
)
def test_wrong_value_is_named_with_its_rule(config: MoeFtConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        config.validate(world_size=4)


@pytest.mark.parametrize(
    ("config", "environment", "job_id"),
    [
        (MemoryConfig(job_id="mine"), {"SLURM_JOB_ID": "7"}, "mine"),
        (MemoryConfig(), {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "run"}, "7"),
        (MemoryConfig(), {"TORCHELASTIC_RUN_ID": "run"}, "run"),
    ],
)
def test_job_is_named_by_the_flag_then_slurm_then_torchrun(
    config: MemoryConfig, environment: dict[str, str], job_id: str
) -> None:
    assert config.resolve_job_id(environment) == job_id


@pytest.mark.parametrize("run_id", [None, "", "none", "295d955d-8051-483d-af14-a9d9b77e0ed7"])
def test_job_that_nothing_names_is_refused_with_the_flag(run_id: str | None) -> None:
    environment = {} if run_id is None else {"TORCHELASTIC_RUN_ID": run_id}
    with pytest.raises(ConfigError, match="--moe-ft-job-id is missing.*Add --moe-ft-job-id NAME"):
        MemoryConfig().resolve_job_id(environment)


@pytest.mark.parametrize("name", ["../x", "/x", ".hidden", "-x", "a b", "a/b", "x" * 102, "a\n"])
def test_name_that_cannot_be_a_directory_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"={name!r} becomes a directory's name")):
        MemoryConfig(job_id=name).resolve_job_id({})
    with pytest.raises(ConfigError, match="becomes a directory's name"):
        MemoryConfig(node_id=name).resolve_node_id({}, "host")


@pytest.mark.parametrize(
    ("config", "environment", "node"),
    [
        (MemoryConfig(node_id="n1"), {"MOE_FT_NODE_ID": "n2"}, "n1"),
        (MemoryConfig(), {"MOE_FT_NODE_ID": "n2", "SLURMD_NODENAME": "n3"}, "n2"),
        (MemoryConfig(), {"SLURMD_NODENAME": "n3"}, "n3"),
        (MemoryConfig(), {}, "host"),
    ],
)
def test_node_is_named_by_the_flag_then_the_environment_then_the_host(
    config: MemoryConfig, environment: dict[str, str], node: str
) -> None:
    assert config.resolve_node_id(environment, "host") == node


@pytest.mark.parametrize(
    ("recover_from", "iteration"),
    [("auto", None), ("load", None), ("iter_0", 0), ("iter_120", 120)],
)
def test_iteration_to_recover_from_is_read(recover_from: str, iteration: int | None) -> None:
    assert RecoveryConfig(recover_from=recover_from).only_iteration == iteration


@pytest.mark.parametrize("value", ["", " "])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("memory", "memory_dir"),
        ("memory", "job_id"),
        ("memory", "node_id"),
        ("memory", "host_memory_limit"),
        ("storage", "persist_dir"),
        ("observability", "event_log"),
        ("precision", "state_dtype"),
    ],
)
def test_flag_without_a_value_is_refused(part: str, name: str, value: str) -> None:
    default = getattr(MoeFtConfig(), part)
    config = replace(MoeFtConfig(), **{part: replace(default, **{name: value})})
    message = rf"{flag_of(name)}={value} is empty: an unset variable\? Give a value, or leave"
    with pytest.raises(ConfigError, match=message):
        config.validate(world_size=1)


def test_directories_are_checked_with_the_other_settings() -> None:
    config = settings(memory_dir="/x", persist_dir="/x/y")
    with pytest.raises(ConfigError, match="must not be the same directory or one in the other"):
        config.validate(world_size=1)


def test_defaults_warn_of_nothing() -> None:
    assert MoeFtConfig().warnings(None) == []


@pytest.mark.parametrize(
    ("config", "warning"),
    [
        (
            settings(event_log="e", inject_fault=("kill:0@10",)),
            "--moe-ft-inject-fault kill:0@10:forward never happens: training ends at iteration 10",
        ),
        (
            settings(event_log="e", inject_fault=("kill:0@11:persist",)),
            "--moe-ft-inject-fault kill:0@11:persist never happens: training ends at iteration 10",
        ),
    ],
)
def test_setting_that_changes_nothing_is_warned_about(config: MoeFtConfig, warning: str) -> None:
    assert config.warnings(train_iterations=10) == [warning]


@pytest.mark.parametrize(
    "config",
    [
        settings(strategy="sparse", window="3"),
        settings(strategy="partial", k_snapshot="2"),
        settings(strategy="dense", persist_dir="/x"),
        settings(event_log="e", inject_fault=("kill:0@9", "kill:0@10:persist")),
    ],
)
def test_setting_that_is_used_is_not_warned_about(config: MoeFtConfig) -> None:
    assert config.warnings(train_iterations=10) == []


def test_fault_of_a_run_of_unknown_length_is_not_warned_about() -> None:
    config = settings(event_log="e", inject_fault=("kill:0@1000",))
    assert config.warnings(None) == []


@pytest.mark.parametrize(
    ("memory_dir", "persist_dir"),
    [
        ("/dev/shm/x", None),
        ("/dev/shm/x", "/scratch/x"),
        ("/dev/shm/x", "/dev/shm/xy"),
        ("/dev/shm/x", "/dev/shm/y"),
        ("/dev/shm/x", "checkpoints"),
        ("/dev/shm/x", "s3://dev/shm/x"),
        ("/dev/shm/x", "file:///scratch/memory/x"),
    ],
)
def test_directories_that_are_apart_are_accepted(memory_dir: str, persist_dir: str | None) -> None:
    check_directories(memory_dir, persist_dir)


@pytest.mark.parametrize("memory_dir", ["memory", ".", "../x", "~/x"])
def test_memory_directory_that_depends_on_the_current_one_is_refused(memory_dir: str) -> None:
    message = (
        f"--moe-ft-memory-dir={memory_dir} must be an absolute path.*Write it like /dev/shm/NAME"
    )
    with pytest.raises(ConfigError, match=message):
        check_directories(memory_dir, None)


@pytest.mark.parametrize("url", ["memory://x", "simplecache::memory://x", "memory::x"])
def test_storage_in_the_memory_of_a_process_is_refused(url: str) -> None:
    message = f"--moe-ft-persist-dir={url} must be storage that outlives.*Name a directory"
    with pytest.raises(ConfigError, match=message):
        check_directories("/dev/shm/x", url)


@pytest.mark.parametrize("prefix", ["", "file://", "local://", "file:"])
@pytest.mark.parametrize(
    ("memory", "persist"),
    [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a", "c/../a/"), ("a", "link/b")],
)
def test_directories_that_are_one_or_one_in_the_other_are_refused(
    tmp_path: Path, memory: str, persist: str, prefix: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    url = f"{prefix}{tmp_path}/{persist}"
    message = (
        f"--moe-ft-persist-dir={url} must not be the same directory or one in the other.*apart"
    )
    with pytest.raises(ConfigError, match=message):
        check_directories(str(tmp_path / memory), url)


def test_storage_that_is_relative_is_compared_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="must not be the same directory"):
        check_directories(str(tmp_path), "checkpoints")
