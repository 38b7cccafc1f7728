"""A job of simulated ranks: its nodes, its launcher, and its starts until training has ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moe_ft.config.config import MemoryConfig, MoeFtConfig, RecoveryConfig, StorageConfig
from moe_ft.config.strategy import PrecisionConfig, StrategyConfig
from moe_ft.planning.levels import FAN_OUT
from moe_ft.strategies import registry
from tests.simulation.active import World
from tests.simulation.collectives import Collectives
from tests.simulation.files import Files
from tests.simulation.kernel import Kernel, Process
from tests.simulation.leaving import terminate
from tests.simulation.network import Network
from tests.simulation.processes import PARENT
from tests.simulation.rank import Life, Rank
from tests.simulation.shape import Shape
from tests.simulation.training import Training

START_DEADLINE_S = 1800.0
NOTICE_S = 1.0
GRACE_S = 30.0  # between SIGTERM and SIGKILL


class Setup(Shape, frozen=True, kw_only=True):
    """Flags and sizes of a job, and those of its model.

    Attributes:
        nodes: that its ranks are divided over.
        options: of the strategy, by field.
        state_dtype: as --moe-ft-state-dtype takes it; empty for none.
        dense_interval: as --moe-ft-persist-dense-interval takes it.
        stop_interval: iterations after which a start ends by itself, as with --exit-interval; 0 for never.
        on_error: as --moe-ft-on-error takes it.
        breakpoints, upstream_log: whether ranks keep them.
        recovery: as --moe-ft-recovery takes it.
        later: layouts of the starts after the first; those after these have the last one.
        parity: most nodes of a group that keeps parity; 0 for replicas.
        fan_out: ranks of a group of the agreement.
        replica_regions: as --moe-ft-replica-regions takes it.
        streams: as --moe-ft-streams takes it.
        pin: as --moe-ft-pin takes it.
        boost: as --moe-ft-capacity-boost takes it.
    """

    nodes: int = 2
    iterations: int = 8
    strategy: str = "dense"
    options: dict[str, Any] = {}
    interval: str = "1"
    sharding: str = "equal"
    replication: str = "auto"
    replica_regions: str = "1"
    parity: int = 0
    persist_interval: int = 0
    dense_interval: int = 0
    keep: int = 2
    state_dtype: str = ""
    stop_interval: int = 0
    on_error: str = "degrade"
    breakpoints: bool = False
    upstream_log: bool = False
    recovery: str = "auto"
    later: tuple[Shape, ...] = ()
    fan_out: int = FAN_OUT
    streams: int = 1
    pin: str = "require"
    boost: float = 0.0

    def shape_of(self, start: int) -> Shape:
        """Return the layout of a start."""
        shapes = (self.shape, *self.later)
        return shapes[min(start, len(self.later))]

    @property
    def shape(self) -> Shape:
        return Shape(**{name: getattr(self, name) for name in Shape.__struct_fields__})

    @property
    def recovers_locally(self) -> bool:
        has_all = self.stages > 1 and self.breakpoints and self.upstream_log
        return has_all and self.recovery != "global"

    @property
    def persists(self) -> bool:
        return self.persist_interval + self.dense_interval > 0

    def config(self, root: Path) -> MoeFtConfig:
        """Return the flags of the job, whose directories are below a root."""
        options = {}
        if (kind := registry.option_types().get(self.strategy)) is not None:
            options[self.strategy] = kind(**self.options)
        storage = str(root / "storage") if self.persists else None
        return MoeFtConfig(
            strategy=StrategyConfig(
                strategy=self.strategy,
                interval=self.interval,
                sharding=self.sharding,
                on_error=self.on_error,
            ),
            options=options,
            precision=PrecisionConfig(
                state_dtype=self.state_dtype or None,
                staging_bytes="1MiB" if self.state_dtype else None,
            ),
            memory=MemoryConfig(
                memory_dir=str(root / "memory"),
                job_id="job",
                replication_factor=self.replication,
                replica_regions=self.replica_regions,
                replicas=f"parity:{self.parity}" if self.parity else "copies",
                replicate="gradients" if self.is_followed else "state",
                breakpoints=self.breakpoints,
                upstream_log=self.upstream_log,
                streams=self.streams,
                pin=self.pin,
            ),
            storage=StorageConfig(
                persist_dir=storage,
                persist_interval=self.persist_interval,
                persist_dense_interval=self.dense_interval,
                keep=self.keep,
            ),
            recovery=RecoveryConfig(
                recovery=self.recovery,
                layout="any" if self.later else "same",
                capacity_boost=self.boost,
            ),
        )

    def training(self, root: Path) -> Training:
        return Training(
            shape=self.shape,
            iterations=self.iterations,
            config=self.config(root),
            stop_interval=self.stop_interval,
        )


@dataclass(kw_only=True)
class Start:
    """One start of a job.

    Attributes:
        number: from 0, as the launcher counts.
        shape: its layout.
        nodes: ``[rank]`` its node.
        lives: ``[rank]``.
        processes: ``[rank]``.
        first_event: number of events before it.
        num_alive: processes that have not ended.
    """

    number: int
    shape: Shape
    nodes: Sequence[str]
    lives: list[Life]
    processes: list[Process] = field(default_factory=list)
    first_event: int = 0
    num_alive: int = 0

    @property
    def has_ended_well(self) -> bool:
        """True if all ranks have trained to the end, or until they were to stop."""
        return all(each.exit_code == 0 for each in self.processes)

    @property
    def last_iteration(self) -> int:
        return max((max(each.digests, default=0) for each in self.lives), default=0)


class Job:
    """Starts the ranks of a job, and all of them again when one has died, as torchrun does.

    Attributes:
        starts: so far.
        notice_s: at most, until the launcher sees that a rank has died.
    """

    def __init__(self, world: World, setup: Setup, root: Path) -> None:
        self.world, self.setup, self.root = world, setup, root
        self.training = setup.training(root)
        self.starts: list[Start] = []
        self.placement = list(range(setup.nodes))
        self._agents: dict[str, Process] = {}
        self.notice_s = NOTICE_S

    @property
    def next_shape(self) -> Shape:
        """Layout of the next start."""
        return self.setup.shape_of(len(self.starts))

    def node_of(self, rank: int) -> str:
        per_node = -(-self.next_shape.num_ranks // self.setup.nodes)
        return f"node-{self.placement[rank // per_node]}"

    @property
    def nodes(self) -> list[str]:
        """``[rank]`` its node in the next start."""
        return [self.node_of(rank) for rank in range(self.next_shape.num_ranks)]

    def start(self) -> Start:
        number, shape, nodes = len(self.starts), self.next_shape, self.nodes
        training = replace(self.training, shape=shape)
        lives = [Life(rank=rank) for rank in range(shape.num_ranks)]
        started = Start(number=number, shape=shape, nodes=nodes, lives=lives)
        started.first_event = self.world.kernel.num_events
        self.starts.append(started)
        for rank, node in enumerate(nodes):
            environ = {
                "MASTER_ADDR": nodes[0],
                "MOE_FT_NODE_ID": node,
                "TORCHELASTIC_RESTART_COUNT": str(number),
                "TORCHELASTIC_RUN_ID": "job",
            }
            process = self.world.kernel.make_process(f"rank-{rank}", node, environ)
            process.local[PARENT] = self.agent_on(node).pid
            self.world.collectives.join(
                process, rank=rank, start=number, world_size=shape.num_ranks
            )
            process.at_death.append(lambda: self._note_death(started))
            started.processes.append(process)
            started.num_alive += 1
        for rank, process in enumerate(started.processes):
            self.world.kernel.spawn(process, Rank(self.world, training, lives[rank]).run)
        return started

    def agent_on(self, node: str) -> Process:
        """Return the process that starts the ranks of a node, which lives as long as the job."""
        if node not in self._agents:
            self._agents[node] = self.world.kernel.make_process("agent", node)
        return self._agents[node]

    def _note_death(self, started: Start) -> None:
        """Have the launcher end the others soon, if a rank has failed."""
        started.num_alive -= 1
        if any(each.exit_code for each in started.processes):
            end = self.end if self.setup.breakpoints else self.kill
            self.world.kernel.call_later(
                self.world.kernel.random.uniform(0.01, self.notice_s), lambda: end(started)
            )

    def end(self, started: Start) -> None:
        for process in started.processes:
            terminate(process)
        self.world.kernel.call_later(GRACE_S, lambda: self.kill(started))

    def kill(self, started: Start) -> None:
        for process in started.processes:
            self.world.kernel.kill(process)

    def run(self, started: Start) -> bool:
        """Run a start to its end; return False if it does not come to one."""
        kernel = self.world.kernel
        return kernel.run(lambda: not started.num_alive, kernel.now + START_DEADLINE_S)


def make_world(seed: int | str, root: Path, *, switching: float = 0.2) -> World:
    """Return a world whose files are below a directory."""
    kernel = Kernel(seed, switching=switching)
    network = Network(kernel)
    return World(
        kernel=kernel,
        files=Files(kernel, root),
        network=network,
        collectives=Collectives(kernel, network),
    )
