"""First phase of a start: the ranks meet. They join groups, read their live state, and learn who is where."""

import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

import torch.distributed as dist
from msgspec.msgpack import Decoder

from moe_ft.addresses import own_address
from moe_ft.config.config import MoeFtConfig
from moe_ft.engine import exchange
from moe_ft.engine.agreement import Agreement, StageSum
from moe_ft.engine.background import PhaseHook
from moe_ft.engine.descriptors import allow_descriptors
from moe_ft.engine.links.server import PeerServer
from moe_ft.engine.memory.job_directory import node_directory
from moe_ft.engine.memory.layout import FileLayout
from moe_ft.engine.snapshots.windows import UnitLayouts
from moe_ft.errors import BusyError, ConfigError
from moe_ft.failure_domains import find_domains
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import ModelPlaces
from moe_ft.format.identity import CUTS
from moe_ft.planning.parity import ParityGroup
from moe_ft.planning.remains import PipelineLayout
from moe_ft.recovery.assembly import (
    build_strategy,
    ep_ranks_by_dp,
    lay_out_breakpoint,
    measure_sizes,
    slice_assignment,
)
from moe_ft.recovery.attempts import RankError, attempt
from moe_ft.recovery.facts import JobFacts
from moe_ft.recovery.peers import place_peers
from moe_ft.recovery.site import Site
from moe_ft.saying import say, warn
from moe_ft.state.catalog import UnitCatalog
from moe_ft.state.global_places import find_places, model_places, with_places
from moe_ft.state.gradients import check_repeatable, is_lossy
from moe_ft.state.parameters import LocalParameter, local_parameters
from moe_ft.state.record import RecordTaker
from moe_ft.state.tensors import inner_optimizers
from moe_ft.strategies.interface import Strategy
from moe_ft.strategies.registry import chosen
from moe_ft.topology import RankInfo, Topology

# Model chunks, Megatron's outermost optimizer and its scheduler.
Built = tuple[Any, Any, Any]

_PROBLEM = Decoder(RankError | None)
_OUTCOME = Decoder(RankError | bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The groups of this rank. All methods are called by all ranks of the group."""

    everyone: Agreement
    stage: StageSum
    rank: int = 0

    def check_together[Answer](self, check: Callable[[], Answer]) -> Answer:
        """Run a check on all ranks; if it fails on one, raise its ConfigError or BusyError on all."""
        return self.find_together(lambda: (check(), None), _PROBLEM)[0]

    def find_together[Own, Told](
        self, find: Callable[[], tuple[Own, Told]], decoder: Decoder[Told | RankError]
    ) -> tuple[Own, list[Told]]:
        """Return what this rank finds, and what all tell the others of it; raises as `check_together`."""
        told: Told | RankError
        try:
            own, told = find()
        except (ConfigError, BusyError) as error:
            told = RankError(kind=type(error).__name__, text=str(error))
        everyone: list[Told] = []
        for each in self.everyone.gather(told, decoder):
            if isinstance(each, RankError):
                raise each.error
            everyone.append(each)
        return own, everyone

    def on_first[Answer](
        self, find: Callable[[], Answer | RankError], decoder: Decoder[Answer]
    ) -> Answer:
        """Return on all ranks what rank 0 finds; if that fails, raise its error on all."""

        def content() -> bytes | RankError:
            answer = find()
            return answer if isinstance(answer, RankError) else exchange.encode(answer)

        found = self.everyone.broadcast(attempt(content) if self.rank == 0 else b"", _OUTCOME)
        if isinstance(found, RankError):
            raise found.error
        return exchange.decode(found, decoder)


def join_ranks(facts: JobFacts, opened: ExitStack) -> Ranks:
    """Create the group of all ranks; those of the stages wait for `stage.start`. Called by all ranks."""
    ranks = Ranks(
        everyone=Agreement(facts.timeout_s), stage=StageSum(facts.timeout_s), rank=facts.rank
    )
    opened.callback(ranks.everyone.close)
    ranks.everyone.start()
    opened.callback(ranks.stage.close)
    return ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """The live objects of a rank that snapshots are taken of and that a recovery writes to.

    Attributes:
        model_places: what Megatron's checkpoints hold besides parameters.
        phase_hook: called in the middle of background work and of putting back state.
    """

    built: Built
    parameters: Sequence[LocalParameter]
    model_places: ModelPlaces
    catalog: UnitCatalog
    layouts: UnitLayouts
    records: RecordTaker
    groups: Any
    phase_hook: PhaseHook


@dataclass(frozen=True, kw_only=True, slots=True)
class StartNames:
    """Random names of a start, the same on all ranks.

    Attributes:
        lineage: of the run, if this start begins one.
    """

    name: str
    lineage: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Met:
    """Knowledge of a rank after the ranks have met.

    Attributes:
        fingerprint: settings that the state depends on, the cuts of the state included.
        peers: ``[rank]`` the ranks that keep its replicas, or parity of its state.
        groups: ``[rank]`` its group, where peers keep parity; empty where they keep replicas.
        token: secret that the ranks of this start share.
        breakpoint: layout of this rank's breakpoint; None without --moe-ft-breakpoints.
        pipelines: of a job whose stages can recover alone; None for any other.
    """

    config: MoeFtConfig
    facts: JobFacts
    live: LiveState
    ranks: Ranks
    strategy: Strategy
    site: Site
    fingerprint: dict[str, Any]
    peers: Sequence[tuple[int, ...]]
    server: PeerServer
    token: str
    names: StartNames
    groups: Sequence[ParityGroup] = ()
    breakpoint: FileLayout | None = None
    pipelines: PipelineLayout | None = None


# Of a rank: its stage; the first rank of its data-parallel group, and its numbers in that and in its
# expert-parallel one; a token and names; and of rank 0 the settings of the files that the job reads.
_Hello = tuple[int, tuple[int, int, int], str, StartNames, bytes | RankError | None]
_HELLO = Decoder(_Hello | RankError)
_INFO = Decoder(tuple[RankInfo, str] | RankError)
_DOMAINS = Decoder(dict[str, str])
_PIPELINE = Decoder(tuple[tuple[int, ...], tuple[bool, ...]])


def meet(
    config: MoeFtConfig,
    facts: JobFacts,
    built: Built,
    phase_hook: PhaseHook,
    opened: ExitStack,
) -> Met:
    """Meet the other ranks. Called by all ranks.

    Args:
        opened: closes the groups and the server.

    Raises:
        ConfigError: if a name, the model, a strategy, an address or the number of replicas does not fit.
    """
    # Each rank alone, since already the groups need the descriptors.
    allow_descriptors(facts.world_size, facts.world_size // facts.groups.pp.size())
    ranks = join_ranks(facts, opened)
    (job_id, node, host, live), everyone = ranks.find_together(
        lambda: _introduce(config, facts, built, phase_hook), _HELLO
    )
    _, _, token, names, settings = everyone[0]
    facts = replace(facts, **_decode(settings))
    ranks.stage.start([stage for stage, *_ in everyone], facts.rank)
    node_dir = node_directory(config.memory.memory_dir, job_id, node)
    server = PeerServer(node_dir, host)
    opened.callback(server.close)
    places = [place for _, place, *_ in everyone]
    (strategy, breakpoint_), found = ranks.find_together(
        lambda: _build(config, facts, live, ranks, places, node, server), _INFO
    )
    infos = [info for info, _ in found]
    domains = _find_domains(config, facts, [each.node for each in infos], ranks)
    topology = Topology(ranks=tuple(replace(each, domain=domains[each.node]) for each in infos))
    cuts = checksum("".join(cuts for _, cuts in found).encode())
    server.admit(token)
    site = Site(
        config=config,
        job_id=job_id,
        node=node,
        node_dir=node_dir,
        rank=facts.rank,
        topology=topology,
        launch=facts.launch,
    )
    return Met(
        config=config,
        facts=facts,
        live=live,
        ranks=ranks,
        strategy=strategy,
        site=site,
        fingerprint={**facts.fingerprint, CUTS: cuts},
        breakpoint=breakpoint_,
        **place_peers(config, facts, topology),
        server=server,
        token=token,
        names=names,
        pipelines=meet_pipelines(site, facts, built[1], live.parameters, ranks),
    )


def _introduce(
    config: MoeFtConfig, facts: JobFacts, built: Built, phase_hook: PhaseHook
) -> tuple[tuple[str, str, str, LiveState], _Hello]:
    """Return what a rank knows by itself: names of the job, node and host, its state; and what it tells."""
    job_id = config.memory.resolve_job_id(os.environ)
    node = config.memory.resolve_node_id(os.environ, socket.gethostname())
    host = own_address(config.memory.network_interface, os.environ)
    live = _read_live_state(config, facts, built, phase_hook)
    group = facts.groups.dp_cp
    leader = dist.get_process_group_ranks(group)[0] if dist.is_initialized() else 0
    place = leader, facts.places.dp.rank, facts.experts.ep_rank
    settings = None
    if facts.rank == 0:
        settings = attempt(lambda: exchange.encode(facts.read_files()))
    return (job_id, node, host, live), (facts.stage, place, *_draw_names(), settings)


def _decode(settings: bytes | RankError | None) -> dict[str, Any]:
    """Return the settings of files that rank 0 has found; raise its error if it could not read them."""
    if isinstance(settings, RankError):
        raise settings.error
    assert settings is not None, "rank 0 reads the files"
    return exchange.decode(settings, exchange.SETTINGS)


def _read_live_state(
    config: MoeFtConfig, facts: JobFacts, built: Built, phase_hook: PhaseHook
) -> LiveState:
    model, optimizer, scheduler = built
    parameters = local_parameters(
        model, optimizer, facts.places, slice_assignment(config.strategy.sharding)
    )
    places = find_places(model, facts.groups.dp_cp)
    parameters = with_places(parameters, places)
    if config.memory.sends_gradients:
        check_repeatable(parameters, facts.places, allows_lossy=config.precision.allow_lossy)
        if facts.rank == 0 and any(map(is_lossy, parameters)):
            warn("peers round optimizer steps otherwise: a recovery from them is not exact")
    catalog = UnitCatalog(
        parameters,
        leaves_out_frozen=chosen(config).leaves_out_frozen,
        packings=config.precision.packings,
    )
    return LiveState(
        built=built,
        parameters=parameters,
        model_places=model_places(model, places),
        catalog=catalog,
        layouts=UnitLayouts(catalog, facts.places.dp.rank),
        records=RecordTaker(model, optimizer, scheduler, parameters),
        groups=facts.groups,
        phase_hook=phase_hook,
    )


def _lay_out_breakpoint(
    config: MoeFtConfig, live: LiveState, strategy: Strategy, dp_rank: int
) -> FileLayout | None:
    """Return the layout of a rank's breakpoint, which keeps the state as it is, in whatever format."""
    if not config.memory.breakpoints:
        return None
    leaves_out = chosen(config).leaves_out_frozen
    catalog = UnitCatalog(live.parameters, leaves_out_frozen=leaves_out)
    return lay_out_breakpoint(strategy, UnitLayouts(catalog, dp_rank))


def _build(
    config: MoeFtConfig,
    facts: JobFacts,
    live: LiveState,
    ranks: Ranks,
    places: Sequence[tuple[int, int, int]],
    node: str,
    server: PeerServer,
) -> tuple[tuple[Strategy, FileLayout | None], tuple[RankInfo, str]]:
    """Return the strategy and the layout of the breakpoint; and this rank as others know it, and its cuts.

    The sizes of its memory are fixed then, and its server listens. Called by all ranks.
    """
    strategy = build_strategy(
        config,
        live.catalog,
        facts.experts,
        ep_ranks_by_dp(places, places[facts.rank][0]),
        ranks.stage.gather,
        facts.rank,
    )
    layout = _lay_out_breakpoint(config, live, strategy, facts.places.dp.rank)
    interval = config.strategy.interval_iterations or 1  # a boundary log is refused with auto
    parts = (layout, facts.traffic, facts.stage, interval, facts.experts.num_experts)
    sizes = measure_sizes(strategy, live.layouts, *parts)
    live.layouts.region_bytes = sizes.region_bytes
    server.start()
    info = RankInfo(
        rank=facts.rank,
        node=node,
        stage=facts.stage,
        pid=os.getpid(),
        agent=facts.launch.agent,
        address=server.address,
        **asdict(sizes),
    )
    return (strategy, layout), (info, _checksum_of_cuts(live))


def _find_domains(
    config: MoeFtConfig, facts: JobFacts, nodes: Sequence[str], ranks: Ranks
) -> Mapping[str, str]:
    """Return the failure domain of each node, as rank 0 knows it. Called by all ranks."""
    given = config.memory.failure_domain
    if given is None:
        return dict.fromkeys(nodes, "")
    return ranks.on_first(lambda: find_domains(given, dict.fromkeys(nodes)), _DOMAINS)


def _draw_names() -> tuple[str, StartNames]:
    """Draw a token and names; those of rank 0 are used."""
    name = secrets.token_hex(4)
    # The time is for people: nothing is decided by it.
    names = StartNames(name=name, lineage=f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{name}")
    return secrets.token_hex(16), names


def _checksum_of_cuts(live: LiveState) -> str:
    """Return a checksum over the slices that the optimizers of this rank own.

    Other parameters are left out: several ranks hold them, and may divide them differently in each start.
    """
    sharded = (each for each in live.parameters if each.is_sharded)
    return checksum(repr([(each.name, each.start, each.end) for each in sharded]).encode())


def meet_pipelines(
    site: Site, facts: JobFacts, optimizer: Any, parameters: Sequence[LocalParameter], ranks: Ranks
) -> PipelineLayout | None:
    """Return the pipelines of a job whose stages can recover alone; None for any other. Called by all ranks.

    Says once if recoveries will be global although what the pipeline sends is logged.

    Raises:
        ConfigError: if --moe-ft-recovery=local can never be followed.
    """
    report, config = facts.couplings, site.config
    mode = config.recovery.recovery
    if report is None or facts.traffic is None:
        return None
    blocked_by = why_never_alone(facts, config)
    if blocked_by and mode == "local":
        raise ConfigError(
            f"--moe-ft-recovery=local cannot be followed: {blocked_by}. Change the model's flags, or give "
            "--moe-ft-recovery auto."
        )
    if (line := blocked_by or report.line) and mode != "global" and site.rank == 0:
        say(line)
    everyone = ranks.everyone.gather(
        (
            tuple(dist.get_process_group_ranks(facts.groups.pp)),
            _parts_with_scale(optimizer, parameters),
        ),
        _PIPELINE,
    )
    if blocked_by or mode == "global":
        return None
    pipelines = sorted({pipeline for pipeline, _ in everyone})
    return PipelineLayout(
        stages=tuple(zip(*pipelines, strict=True)),
        node_of=tuple(info.node for info in site.topology.ranks),
        is_ring=facts.traffic.num_chunks > 1,
        couplings=report.couplings,
        has_common_records=len({parts for _, parts in everyone}) == 1,
    )


def why_never_alone(facts: JobFacts, config: MoeFtConfig) -> str:
    """Return why no stage of a job that logs what its pipeline sends can recover alone; empty if one can."""
    report = facts.couplings
    if report is None or facts.traffic is None:
        return ""
    if not config.memory.breakpoints:
        return "recoveries are global: without --moe-ft-breakpoints healthy stages lose their state"
    return report.line if report.is_global else ""


def _parts_with_scale(optimizer: Any, parameters: Sequence[LocalParameter]) -> tuple[bool, ...]:
    """Return for each part of the optimizer that checks its gradients whether it is of experts."""
    return tuple(
        any(each.is_expert for each in parameters if each.optimizer is inner)
        for inner in inner_optimizers(optimizer)
        if getattr(inner, "grad_scaler", None)
    )
