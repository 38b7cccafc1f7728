"""A job of one rank whose ranks have met: all parts are real, except for Megatron's model and optimizer."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch.distributed as dist

from moe_ft.config.config import MemoryConfig, MoeFtConfig, RecoveryConfig, StorageConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.engine.background import PhaseHook
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.job_directory import node_directory, own_directory
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.format.encoding import encode
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.identity import Identity
from moe_ft.format.index import Index
from moe_ft.launches import Launch
from moe_ft.planning.experts import ExpertFacts
from moe_ft.recovery.assembly import measure_sizes
from moe_ft.recovery.facts import JobFacts
from moe_ft.recovery.meet import LiveState, Met, StartNames, join_ranks
from moe_ft.recovery.site import Site
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.parameters import GroupPlace, StatePlaces
from moe_ft.state.record import RecordTaker
from moe_ft.strategies.dense import DenseStrategy
from moe_ft.topology import RankInfo, Topology
from tests.unit.moe_ft.builders import WINDOW_UNITS, fill_window
from tests.unit.moe_ft.recovery.window_copies import make_parameters

FINGERPRINT = {"--hidden-size": 64, "--seed": 1}  # that of `builders.make_identity`
ALONE = GroupPlace(rank=0, size=1)


def config_of(
    folder: Path, recover_from: str = "auto", *, persists: bool = False, **memory: Any
) -> MoeFtConfig:
    """Return flags of a dense job whose memory and storage are below a folder."""
    return MoeFtConfig(
        strategy=StrategyConfig(strategy="dense"),
        memory=MemoryConfig(
            memory_dir=str(folder / "memory"), job_id="job", node_id="node", **memory
        ),
        storage=StorageConfig(persist_dir=str(folder / "storage") if persists else None),
        recovery=RecoveryConfig(recover_from=recover_from),
    )


def facts_of(*, iteration: int = 0, began_with: str = "", launch: Launch | None = None) -> JobFacts:
    """Return facts of a job with a single rank."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return JobFacts(
        launch=launch or Launch(),
        rank=0,
        world_size=1,
        stage=0,
        places=StatePlaces(dp=ALONE, expt_dp=ALONE, tp=ALONE, expt_tp=ALONE),
        groups=SimpleNamespace(dp_cp=world, expt_dp=world, pp=SimpleNamespace(size=lambda: 1)),
        fingerprint=FINGERPRINT,
        replay_settings={},
        experts=ExpertFacts(
            num_experts=0,
            ep_rank=0,
            ep_size=1,
            tokens_per_sample=1,
            planned_samples=1,
            samples_per_iteration=1,
        ),
        iteration=iteration,
        began_with=began_with,
        is_deterministic=True,
        timeout_s=120.0,
    )


@contextmanager
def initialized() -> Iterator[None]:
    """Initialize torch.distributed for a job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def met_alone(
    config: MoeFtConfig,
    facts: JobFacts,
    opened: ExitStack,
    phase_hook: PhaseHook = lambda phase, iteration: None,
) -> Met:
    """Return what `meet` returns on the only rank of a job.

    Args:
        config: flags of the job.
        facts: of the rank.
        opened: closes the server and leaves the groups.
        phase_hook: called while state is put back.
    """
    ranks = join_ranks(facts, opened)
    ranks.stage.start([facts.stage], facts.rank)
    live, strategy = _live_state(facts, phase_hook), DenseStrategy(WINDOW_UNITS)
    node_dir = node_directory(config.memory.memory_dir, "job", "node")
    server = PeerServer(node_dir, "127.0.0.1")
    opened.callback(server.close)
    server.start()
    live.layouts.region_bytes = measure_sizes(strategy, live.layouts).region_bytes
    info = RankInfo(
        rank=0,
        node="node",
        stage=0,
        pid=os.getpid(),
        address=server.address,
        region_bytes=live.layouts.region_bytes,
    )
    return Met(
        config=config,
        facts=facts,
        live=live,
        ranks=ranks,
        strategy=strategy,
        site=Site(
            config=config,
            job_id="job",
            node="node",
            node_dir=node_dir,
            rank=0,
            topology=Topology(ranks=(info,)),
            launch=facts.launch,
        ),
        fingerprint=FINGERPRINT,
        peers=[()],
        server=server,
        token="secret",
        names=StartNames(name="new", lineage="run-new"),
    )


def _live_state(facts: JobFacts, phase_hook: PhaseHook) -> LiveState:
    """Return the parameters of `make_window` and an optimizer that has no state of its own."""
    parameters = make_parameters()
    catalog = UnitCatalog(parameters, leaves_out_frozen=False)
    optimizer: Any = SimpleNamespace(chained_optimizers=[])
    scheduler: Any = SimpleNamespace(num_steps=0, state_dict=lambda: {"num_steps": 0})
    return LiveState(
        model_places=ModelPlaces(),
        built=([], optimizer, scheduler),
        parameters=parameters,
        catalog=catalog,
        layouts=UnitLayouts(catalog, 0),
        records=RecordTaker([], optimizer, scheduler, parameters),
        groups=facts.groups,
        phase_hook=phase_hook,
    )


def leave_window(
    config: MoeFtConfig, *, length: int = 1, identity: Identity | None = None
) -> Index:
    """Leave a window in the rank's memory that ends at iteration 4 plus its length; return its index.

    Its records fit a model without buffers.
    """
    node_dir = node_directory(config.memory.memory_dir, "job", "node")
    node_dir.mkdir(parents=True, mode=0o700, exist_ok=True)
    region, window = fill_window(own_directory(node_dir, 0), length=length, identity=identity)
    records = [
        msgspec.structs.replace(each, buffers={}, optimizers=()) for each in window.index.records
    ]
    index = msgspec.structs.replace(
        window.index, file=region.data_path.name, records=tuple(records)
    )
    region.commit(encode(index), index.iteration)
    region.close()
    return index
