"""Builds the engine of one rank: the only place that makes its parts.

A test or a simulation passes its own clock, workers and replicator; training takes the defaults.
"""

from collections.abc import Callable

from moe_ft.config.config import MoeFtConfig
from moe_ft.engine.agreement import Agreement
from moe_ft.engine.background import EventQueue, Messages, ThreadWorker
from moe_ft.engine.boundary.log import BoundaryLog
from moe_ft.engine.breakpoints import Breakpoints
from moe_ft.engine.clock import Clock
from moe_ft.engine.decisions import Decisions
from moe_ft.engine.engine import CheckpointEngine, EngineContext
from moe_ft.engine.links.peers import PeerReplicator
from moe_ft.engine.links.sender import ReplicaSender
from moe_ft.engine.persist.client import PersistClient, WriterSupervisor, writer_command
from moe_ft.engine.persist.schedule import StorageSchedule
from moe_ft.engine.snapshots.copying import StateCopier
from moe_ft.engine.snapshots.index import RecordLog, SnapshotIndexer
from moe_ft.engine.snapshots.profile import FixedInterval, IntervalTuner
from moe_ft.engine.snapshots.windows import UnitLayouts, Windows
from moe_ft.engine.snapshots.writer import SnapshotWriter
from moe_ft.engine.updates.capture import GradientCapture
from moe_ft.planning.boundary_log import header_bytes
from moe_ft.state.record import CapturedRecord
from moe_ft.strategies.interface import Strategy

MakeWorker = Callable[[str], ThreadWorker]


def build_engine(
    config: MoeFtConfig,
    context: EngineContext,
    strategy: Strategy,
    agreement: Agreement,
    layouts: UnitLayouts,
    complete_record: Callable[[CapturedRecord], None],
    *,
    clock: Clock | None = None,
    make_worker: MakeWorker = ThreadWorker,
    replicator: PeerReplicator | None = None,
) -> CheckpointEngine:
    """Return an engine that has not started: no thread runs and no file is open.

    Args:
        complete_record: adds to a captured record what moves together with the weights.
        replicator: sends snapshots to the peers of the context, by default over TCP.
    """
    clock = clock or Clock()
    ranks = context.topology.ranks
    first = next(each for each in ranks if each.stage == ranks[context.rank].stage)
    is_first = first.rank == context.rank
    messages = Messages(
        context.rank, clock, is_first_of_stage=is_first, raises=config.strategy.on_error == "raise"
    )
    reports = messages.reports
    if replicator is None and context.peers:
        ours = (context.token, reports, context.phase_hook, clock, config.memory.streams)
        replicator = PeerReplicator(context.peers, *ours, context.memory.stripes)
    records = RecordLog(complete_record)
    parts = (records, replicator, strategy, reports, clock, make_worker)
    writer = _build_writer(config, context, *parts)
    windows = Windows(context.memory, strategy, layouts, writer, records, reports)
    directory = context.persist_dir
    client = PersistClient(directory, context.rank, reports, context.phase_hook, clock, len(ranks))
    schedule = (windows.store, strategy, context.identity, context.rank)
    stored, interval = config.storage, config.strategy.interval_iterations
    storage = StorageSchedule(
        stored.persist_interval if stored.persists else 0,
        client,
        *schedule,
        dense_interval=stored.persist_dense_interval if stored.persists else 0,
    )
    return CheckpointEngine(
        config,
        context,
        strategy,
        clock=clock,
        messages=messages,
        decisions=Decisions(agreement, context.stage_load, reports, clock),
        interval=IntervalTuner(config.strategy.overhead_limit)
        if interval is None
        else FixedInterval(interval),
        writer=writer,
        windows=windows,
        storage=storage,
        boundary=_build_boundary_log(context, reports, make_worker),
        supervisor=None
        if context.writer is None
        else WriterSupervisor(directory, writer_command(directory), reports, clock, context.writer),
        breakpoints=_build_breakpoints(context, complete_record, windows),
    )


def _build_breakpoints(
    context: EngineContext, complete_record: Callable[[CapturedRecord], None], windows: Windows
) -> Breakpoints | None:
    """Give breakpoints parts of their own: nothing is packed."""
    region, layout = context.memory.breakpoint, context.breakpoint
    if region is None or layout is None:
        return None
    records = RecordLog(complete_record)
    return Breakpoints(
        region,
        layout,
        StateCopier(context.parameters, None, 0),
        _indexer(context, records),
        records,
        lambda: windows.complete_iteration,
    )


def _indexer(context: EngineContext, records: RecordLog) -> SnapshotIndexer:
    return SnapshotIndexer(
        context.identity,
        context.rank,
        context.topology.ranks[context.rank].node,
        context.parameters,
        records,
        context.memory.pool,
        context.origins,
        context.model_places,
    )


def _build_boundary_log(
    context: EngineContext, reports: EventQueue, make_worker: MakeWorker
) -> BoundaryLog | None:
    if context.traffic is None or not context.memory.boundary:
        return None
    info = context.topology.ranks[context.rank]
    return BoundaryLog(
        context.memory.boundary,
        header_bytes(context.traffic.num_sends(info.stage)),
        context.identity,
        info.rank,
        info.node,
        make_worker("boundary-log"),
        reports,
        context.record_settings,
    )


def _build_writer(
    config: MoeFtConfig,
    context: EngineContext,
    records: RecordLog,
    replicator: PeerReplicator | None,
    strategy: Strategy,
    reports: EventQueue,
    clock: Clock,
    make_worker: MakeWorker,
) -> SnapshotWriter:
    pool = context.memory.pool
    sender = gradients = None
    if replicator is not None and config.memory.sends_gradients:
        units = {*strategy.always, *strategy.followable}
        parameters = [each for each in context.parameters if each.unit in units]
        gradients = GradientCapture(parameters, strategy.followable)
    if replicator is not None:
        halved = [each.rank for each in context.peers] if context.halves_peers else []
        sender = ReplicaSender(replicator, reports, make_worker("replicate"), clock, halved)
    return SnapshotWriter(
        StateCopier(context.parameters, pool, config.precision.staging),
        _indexer(context, records),
        records,
        pool,
        sender,
        reports,
        context.phase_hook,
        make_worker("snapshot"),
        clock,
        gradients,
    )
