"""The ranks meet: names, places and checks, on the only rank of a job whose model has no parameters."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.links.peers import PeerConnection
from moe_ft.engine.memory.regions import node_directory
from moe_ft.errors import ConfigError
from moe_ft.recovery.meet import Met, meet
from tests.unit.moe_ft.recovery.meetings import FINGERPRINT, config_of, facts_of


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MOE_FT_NODE_ID", "SLURMD_NODENAME"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as opened:
        yield opened


def meet_alone(config: MoeFtConfig, opened: ExitStack) -> Met:
    optimizer: Any = SimpleNamespace(chained_optimizers=[])
    built: Any = ([], optimizer, None)
    return meet(config, facts_of(), built, lambda phase, iteration: None, opened)


def test_rank_learns_its_place(tmp_path: Path, opened: ExitStack) -> None:
    site = meet_alone(config_of(tmp_path), opened).site
    assert (site.job_id, site.node, site.rank) == ("job", "node", 0)
    assert site.node_dir == node_directory(str(tmp_path / "memory"), "job", "node")
    (info,) = site.topology.ranks
    assert (info.node, info.pid) == ("node", os.getpid())


def test_job_and_node_that_no_flag_names_are_those_of_the_environment(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    config = replace(config, memory=replace(config.memory, job_id=None, node_id=None))
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("MOE_FT_NODE_ID", "node7")
    site = meet_alone(config, opened).site
    assert (site.job_id, site.node) == ("123", "node7")


@pytest.mark.parametrize("name", ["a/b", ".."])
def test_node_whose_name_cannot_be_a_directory_is_refused(
    tmp_path: Path, opened: ExitStack, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = config_of(tmp_path)
    config = replace(config, memory=replace(config.memory, node_id=None))
    monkeypatch.setenv("MOE_FT_NODE_ID", name)
    with pytest.raises(ConfigError, match="MOE_FT_NODE_ID"):
        meet_alone(config, opened)


def test_cuts_of_the_state_are_a_setting_that_it_depends_on(
    tmp_path: Path, opened: ExitStack
) -> None:
    fingerprint = meet_alone(config_of(tmp_path), opened).fingerprint
    (added,) = set(fingerprint) - set(FINGERPRINT)
    assert added.startswith("cuts of the state")
    assert {name: fingerprint[name] for name in FINGERPRINT} == FINGERPRINT


def test_every_start_has_names_and_a_secret_of_its_own(tmp_path: Path, opened: ExitStack) -> None:
    first, second = (meet_alone(config_of(tmp_path), opened) for _ in range(2))
    assert first.token != second.token
    assert first.names.name != second.names.name
    assert first.names.lineage.endswith(first.names.name)


def test_server_answers_those_who_know_the_secret_until_the_start_is_closed(
    tmp_path: Path, opened: ExitStack
) -> None:
    met = meet_alone(config_of(tmp_path), opened)
    met.site.node_dir.mkdir(parents=True, mode=0o700)
    (met.site.node_dir / "file").write_bytes(b"content")
    (met.site.node_dir / "file").chmod(0o600)
    address = met.site.topology.ranks[0].address
    assert address is not None
    connection = PeerConnection(address, met.token)
    assert bytes(connection.get("file")) == b"content"
    connection.close()
    opened.close()
    with pytest.raises(OSError):  # noqa: PT011  # refused or reset
        PeerConnection(address, met.token).get("file")


def test_more_replicas_than_other_nodes_are_refused_with_flag_and_remedy(
    tmp_path: Path, opened: ExitStack
) -> None:
    with pytest.raises(ConfigError, match=r"--moe-ft-replication-factor=1: .*start more nodes"):
        meet_alone(config_of(tmp_path, replication_factor="1"), opened)


def test_replicas_are_left_out_on_a_single_node_by_default(
    tmp_path: Path, opened: ExitStack
) -> None:
    assert list(meet_alone(config_of(tmp_path), opened).peers) == [()]
