"""Borders of a local recovery: logs of neighbours here and on other nodes, and numbers of the job."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ft.engine.links import peers
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.links.transport import Connection
from moe_ft.engine.memory.job_directory import own_directory
from moe_ft.format.boundary import Direction
from moe_ft.planning.recovery import Plan, Source, StagePlan, Version
from moe_ft.planning.remains import PipelineLayout
from moe_ft.planning.scope import KeptRecord, Place, Scope, SentLog
from moe_ft.planning.tiers import MEMORY
from moe_ft.recovery.borders import Borders, read_borders
from moe_ft.recovery.meet import Met
from moe_ft.recovery.readers import MemoryReader, Readers
from moe_ft.topology import Topology
from tests.unit.moe_ft.builders import make_history
from tests.unit.moe_ft.engine.boundary.logs import small_log
from tests.unit.moe_ft.recovery.meetings import config_of, facts_of, leave_window, met_alone

NEIGHBOUR = 1  # sends gradients to rank 0, which replays iterations 5 and 6
TARGET = 7
HISTORY = make_history([(0, 0)])


class Job:
    """A rank that replays, with its neighbour's log on its own node or another one."""

    def __init__(self, folder: Path, opened: ExitStack, *, is_elsewhere: bool) -> None:
        config = config_of(folder)
        met = met_alone(config, facts_of(), opened)
        self.node = "other" if is_elsewhere else "node"
        self.folder = folder / "other" if is_elsewhere else met.site.node_dir
        directory = own_directory(self.folder, NEIGHBOUR)
        directory.mkdir(parents=True, mode=0o700)
        with small_log(directory) as log:
            for iteration in (5, 6):
                log.take(iteration)
        server = PeerServer(self.folder, "127.0.0.1")
        opened.callback(server.close)
        server.start()
        server.admit(met.token)
        own = met.site.topology.ranks[0]
        other = replace(own, rank=NEIGHBOUR, node=self.node, stage=1, address=server.address)
        topology = Topology(ranks=(own, other))
        pipelines = PipelineLayout(stages=((0,), (1,)), node_of=("node", self.node))
        self.met: Met = replace(met, pipelines=pipelines, site=replace(met.site, topology=topology))
        self.index = leave_window(config)
        path = f"{own_directory(met.site.node_dir, 0).name}/region_0.json"
        self.version = Version(
            rank=0,
            iteration=5,
            lineage="run-a",
            history=self.index.identity.history,
            node="node",
            path=path,
        )
        node_dir = met.site.node_dir
        self.readers = Readers(lambda source: MemoryReader(node_dir / source.version.path))

    def read(
        self, records: Sequence[KeptRecord] = (), *, stage: int = 0
    ) -> tuple[Borders | None, dict[Place, str]]:
        """Read the borders of a replay of one stage."""
        directory = own_directory(self.folder, NEIGHBOUR).name
        logs = [
            SentLog(
                sender=NEIGHBOUR,
                receiver=0,
                direction=Direction.BACKWARD,
                iteration=iteration,
                node=self.node,
                path=f"{directory}/boundary_{iteration - 5}.json",
            )
            for iteration in (5, 6)
        ]
        scope = Scope(stages=(stage,), logs=tuple(logs), records={stage: tuple(records)})
        source = Source(tier=MEMORY, version=self.version)
        stages = {
            each: StagePlan(target=TARGET, replay_from=5, sources={each: (source,)})
            for each in (0, 1)
        }
        plan = Plan(
            iteration=TARGET,
            lineage="run-a",
            history=HISTORY,
            start=HISTORY[-1],
            stages=stages,
            elsewhere={0: (source,)},
            scopes=(scope,),
        )
        return read_borders(plan, self.met, self.readers)


@pytest.fixture(params=[False, True], ids=["same node", "other node"])
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    with ExitStack() as opened:
        yield Job(tmp_path, opened, is_elsewhere=request.param)


def test_stage_that_runs_nothing_again_has_no_borders(job: Job) -> None:
    assert job.read(stage=1) == (None, {})


def test_record_that_cannot_be_found_is_missing(job: Job) -> None:
    record = KeptRecord(rank=0, iteration=6, node="node", path=job.version.path)
    _, missing = job.read([record])
    assert missing == {record.place: "record of iteration 6"}


def test_log_that_is_damaged_or_gone_is_missing_before_anything_is_overwritten(job: Job) -> None:
    directory = own_directory(job.folder, NEIGHBOUR)
    path = directory / "boundary_1.json"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    _, missing = job.read()
    ((place, text),) = missing.items()
    assert place == (job.node, "rank_00001/boundary_1.json", 6, 0)
    assert text.startswith("boundary log of rank 1, iteration 6 (")


def test_damaged_tensor_on_the_same_node_is_found_at_once(tmp_path: Path) -> None:
    with ExitStack() as opened:
        job = Job(tmp_path, opened, is_elsewhere=False)
        data = own_directory(job.folder, NEIGHBOUR) / "boundary_0.safetensors"
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
        _, missing = job.read()
        (text,) = missing.values()
        assert "does not match its checksum" in text


def test_node_that_cannot_be_reached_is_tried_once_and_all_of_its_logs_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []

    def refuse(address: object, *_: object) -> Connection:
        tried.append(address)
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(peers, "open_connection", refuse)
    with ExitStack() as opened:
        job = Job(tmp_path, opened, is_elsewhere=True)
        borders, missing = job.read()
    assert borders is not None and not borders.fetched
    assert [iteration for _, _, iteration, _ in missing] == [5, 6]
    assert len(tried) == 1
