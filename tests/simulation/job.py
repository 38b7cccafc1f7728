"""A job of simulated ranks: its nodes, its launcher, and its starts until training has ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from moe_ft.config.config import MemoryConfig, MoeFtConfig, RecoveryConfig, StorageConfig
from moe_ft.config.strategy import PrecisionConfig, StrategyConfig
from moe_ft.strategies import registry
from tests.simulation.active import World
from tests.simulation.collectives import Collectives
from tests.simulation.files import Files
from tests.simulation.kernel import Kernel, Process
from tests.simulation.leaving import terminate
from tests.simulation.model import NUM_MICROBATCHES, SAMPLES_PER_ITERATION, Model
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
    """

    nodes: int = 2
    iterations: int = 8
    strategy: str = "dense"
    options: dict[str, Any] = {}
    interval: str = "1"
    sharding: str = "equal"
    replication: str = "auto"
    persist_interval: int = 0
    dense_interval: int = 0
    keep: int = 2
    state_dtype: str = ""
    stop_interval: int = 0
    on_error: str = "degrade"
    breakpoints: bool = False
    upstream_log: bool = False
    recovery: str = "auto"

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
                breakpoints=self.breakpoints,
                upstream_log=self.upstream_log,
            ),
            storage=StorageConfig(
                persist_dir=storage,
                persist_interval=self.persist_interval,
                persist_dense_interval=self.dense_interval,
                keep=self.keep,
            ),
            recovery=RecoveryConfig(recovery=self.recovery),
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
        nodes: ``[rank]`` its node.
        lives: ``[rank]``.
        processes: ``[rank]``.
        first_event: number of events before it.
        num_alive: processes that have not ended.
    """

    number: int
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

    def node_of(self, rank: int) -> str:
        per_node = -(-self.setup.shape.num_ranks // self.setup.nodes)
        return f"node-{self.placement[rank // per_node]}"

    @property
    def nodes(self) -> list[str]:
        """``[rank]`` its node in the next start."""
        return [self.node_of(rank) for rank in range(self.setup.shape.num_ranks)]

    def start(self) -> Start:
        number, count = len(self.starts), self.setup.shape.num_ranks
        lives = [Life(rank=rank) for rank in range(count)]
        nodes = self.nodes
        started = Start(number=number, nodes=nodes, lives=lives)
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
            self.world.collectives.join(process, rank=rank, start=number, world_size=count)
            process.at_death.append(lambda: self._note_death(started))
            started.processes.append(process)
            started.num_alive += 1
        for rank, process in enumerate(started.processes):
            self.world.kernel.spawn(process, Rank(self.world, self.training, lives[rank]).run)
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


def _run_pass(models: Sequence[Model], shape: Shape) -> None:
    """Run forward and backward of all ranks, without links."""
    for model in models:
        model.begin_pass()
    for number in range(shape.dp):
        pipeline = models[number :: shape.dp]
        for stages in (pipeline, pipeline[::-1]):
            for _ in range(NUM_MICROBATCHES):
                received = b""
                for model in stages:
                    received = model.compute(received)


@cache
def undisturbed(shape: Shape, iterations: int, first: str) -> tuple[dict[int, str], ...]:
    """Return ``[rank]`` the digests by iteration of a training without checkpoints or failures."""
    models: list[Model] = []
    digests: tuple[dict[int, str], ...] = tuple({} for _ in range(shape.num_ranks))

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(_: Any) -> list[Any]:
            return [models[each].own_weights() for each in shape.ranks_of(shape.stage_of(rank))]

        return gather

    models += [Model(shape, rank, gather_of(rank), first) for rank in range(shape.num_ranks)]
    for iteration in range(iterations + 1):
        for rank, model in enumerate(models):
            digests[rank][iteration] = model.digest()
        _run_pass(models, shape)
        shares = [model.share() for model in models]
        norms = [model.norm_share() for model in models]
        signals = [
            model.reduce([shares[each] for each in shape.ranks_of(shape.stage_of(model.rank))])
            for model in models
        ]
        told = [each for pair in zip(shares, norms, strict=True) for each in pair]
        norm = models[0].total_norm(told)
        if not models[0].is_skipped(shares):
            for model, signal in zip(models, signals, strict=True):
                model.step(signal, norm)
                model.refresh()
            for model in models:
                model.sync()
                model.scheduler.step(SAMPLES_PER_ITERATION)
    return digests
