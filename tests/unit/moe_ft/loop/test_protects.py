"""A start says once, on rank 0, what protects its run, from what is so in the job."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import become_member
from moe_ft.config.config import ElasticConfig, MoeFtConfig, StorageConfig
from moe_ft.config.observability import ObservabilityConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.events import EventLog
from moe_ft.loop.listeners import LoopState
from moe_ft.loop.protects import Protects, starter_of
from moe_ft.planning.protection import Launcher, Starter
from moe_ft.topology import RankInfo, Topology
from tests.unit.fault_tolerance.loops import events_in, last_event

CONFIG = MoeFtConfig(
    strategy=StrategyConfig(strategy="dense", interval="5"),
    storage=StorageConfig(persist_dir="/storage", persist_interval=2),
    observability=ObservabilityConfig(event_log="/log"),
)
ASSIGNED = Assignment(rank=0, local_rank=0, world_size=2, node="a", is_watched=True, max_restarts=2)
Saying = Callable[..., list[str]]


@pytest.fixture
def saying(
    tmp_path: Path, loop_args: Namespace, capsys: pytest.CaptureFixture[str]
) -> Iterator[Saying]:
    """Yield what starts a rank of two on nodes of their own, repairs once, and returns what it prints."""
    vars(loop_args).update(exit_signal_handler=False, save=None, save_interval=None)

    def start(
        rank: int = 0,
        assignment: Assignment | None = None,
        warnings: Sequence[str] = (),
        **given: Any,
    ) -> list[str]:
        become_member(None, assignment)
        ranks = [
            RankInfo(
                rank=each, node=f"node{each}", stage=0, pid=1, address=None, region_bytes=1 << 20
            )
            for each in (0, 1)
        ]
        site = SimpleNamespace(config=CONFIG, rank=0, topology=Topology(ranks=tuple(ranks)))
        met = SimpleNamespace(site=site, peers=given.get("peers", [(1,), (0,)]), groups=())
        running = SimpleNamespace(met=met) if given.get("is_on", True) else None
        checkpoints: Any = SimpleNamespace(_running=running)
        log = EventLog(tmp_path, rank)
        log.start()
        loop = LoopState(without_spare="crowd")
        config = given.get("config", CONFIG)
        parts = (config, MegatronLoop(), loop, log, checkpoints, warnings)
        protects = Protects(*parts, on_sigterm=True)
        for _ in range(2):  # a repair comes there again
            protects.after_recovery()
        return capsys.readouterr().err.splitlines()

    yield start
    become_member(None)


def test_rank_0_says_once_what_protects_the_run_and_writes_it_to_the_event_log(
    saying: Saying, tmp_path: Path
) -> None:
    lines = saying(assignment=ASSIGNED, warnings=["on GPUs: so"])
    assert lines[0].endswith("moe_ft: on GPUs: so")
    assert lines[1].endswith(
        "on: --moe-ft-strategy is dense: every 5 iterations a snapshot of the whole state"
    )
    assert len(lines) == 1 + 13
    assert lines[2].split("memory      ")[1].startswith("5.00 MiB reserved on each of 2 nodes")
    (event,) = events_in(EventLog(tmp_path, 0))
    expected = {"event": "protects", "interval": 5, "storage": "/storage", "storage_interval": 10}
    expected |= {"copies": 1, "nodes": 2, "lost_rank": "repair", "lost_node": "repair"}
    assert {name: event[name] for name in expected} == expected


@pytest.mark.parametrize(
    "given",
    [{"rank": 1}, {"assignment": replace(ASSIGNED, died_s=1.0)}, {"is_on": False}],
    ids=["another rank", "a replacement", "--skip-train"],
)
def test_nothing_else_says_it(saying: Saying, given: dict[str, Any]) -> None:
    assert saying(**given) == []


def test_run_without_a_strategy_is_said_to_be_off(saying: Saying) -> None:
    (line,) = saying(config=MoeFtConfig(), is_on=False)
    assert line.endswith("off: --moe-ft-strategy is none: nothing is checkpointed")


def test_missing_copies_are_a_warning(saying: Saying, tmp_path: Path) -> None:
    (warning,) = (line for line in saying(peers=[(), ()]) if "warning" in line.lower())
    assert "copies" in warning and "--moe-ft-replication-factor 0" in warning
    assert last_event(EventLog(tmp_path, 0))["nodes_survived"] == 0


STARTERS: list[tuple[Assignment | None, dict[str, str], bool, Starter]] = [
    (
        replace(ASSIGNED, fewest_nodes=1, store=3),
        {"TORCHELASTIC_MAX_RESTARTS": "9"},  # of the torchrun that has started the agent
        False,
        Starter(
            launcher=Launcher.AGENT,
            max_restarts=2,
            without_spare="crowd",
            is_watched=True,
            shrinks=True,
            store=3,
        ),
    ),
    (
        None,
        {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "1"},
        True,
        Starter(launcher=Launcher.TORCHRUN, max_restarts=2, shrinks=True),
    ),
    (None, {"TORCHELASTIC_RESTART_COUNT": "1"}, False, Starter()),  # a script counts its starts
]


@pytest.mark.parametrize(("assignment", "environment", "elastic", "expected"), STARTERS)
def test_what_has_started_the_ranks_is_known_from_the_assignment_or_the_variables_of_torchrun(
    assignment: Assignment | None, environment: dict[str, str], elastic: bool, expected: Starter
) -> None:
    config = replace(CONFIG, elastic=ElasticConfig(elastic=elastic))
    loop = LoopState(without_spare="crowd" if assignment else "")
    assert starter_of(config, loop, assignment, environment) == expected
