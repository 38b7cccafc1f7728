"""A job whose ranks are repaired: its nodes, its agents, and their starts until training has ended."""

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_ft.cluster.options import KeepOptions
from moe_ft.cluster.target import Target
from moe_ft.config.lost_nodes import CROWDED
from tests.simulation.active import World
from tests.simulation.kernel import Process
from tests.simulation.repairs.ends import Group
from tests.simulation.repairs.machine import LAYOUT, MACHINE, MEMBER, Machine, be_agent, handler_of
from tests.simulation.repairs.rank import Rank
from tests.simulation.repairs.schedule import RepairSchedule

if TYPE_CHECKING:
    from tests.simulation.repairs.oracle import Oracle

WORDS = ["train.py", "--moe-ft-repair", "auto"]
WITHOUT_SPARE = "--moe-ft-without-spare"
LOST_AFTER_S = 10.0  # silence of a node
GRACE_S = 30.0  # between SIGTERM and SIGKILL
_START_S = 2400.0
_FIRST_PORT = 29500


@dataclass(eq=False, kw_only=True, slots=True)
class Start:
    """One start of a job.

    Attributes:
        groups: of all ranks, by round.
        address: of the job's store.
        keeper: number of the node that keeps it.
        agents: of nodes, in the order in which they were started.
        layout: number of a start of all ranks, within that of the agents.
        layouts: those after the first one, of which there are groups alone.
    """

    number: int
    size: int
    address: tuple[str, int]
    keeper: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    agents: list[Process] = field(default_factory=list)
    layout: int = 0
    layouts: dict[int, "Start"] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """True when no agent runs any more."""
        return not any(each.is_alive for each in self.agents)

    @property
    def has_ended_well(self) -> bool:
        """True if training has ended; a node that was lost may have failed, and that of the store not."""
        return self.agents[self.keeper].exit_code == 0


class Job:
    """The job on its nodes.

    Attributes:
        oracle: is told what ranks do.
    """

    def __init__(self, world: World, schedule: RepairSchedule, oracle: "Oracle") -> None:
        self.world, self.oracle, self.size = world, oracle, schedule.ranks
        self.iterations, self.num_nodes = schedule.iterations, schedule.nodes
        self.machine = Machine(world, self)
        self.num_spares, self.repairs = schedule.spares, schedule.repairs
        self.fewest = schedule.fewest
        self.restarts, self.without_spare = schedule.restarts, schedule.without_spare
        self.bad_batch = schedule.bad_batch
        self.words = [*WORDS, WITHOUT_SPARE, schedule.without_spare]
        self.hang_limit, self.evaluation_steps = schedule.hang_limit, schedule.evaluation_steps
        self.keeper = (schedule.nodes + schedule.spares) * schedule.keeps_apart
        self._memory: dict[tuple[int, str], dict[int, int]] = {}
        self._homes: dict[int, str] = {}  # of ranks
        self._before = {0: 0}  # states of each rank, by iteration, before this layout
        self.starts: list[Start] = []

    def run_rank(self) -> None:
        """Be a rank; called in its process."""
        Rank(self.world).run()

    @property
    def is_kept(self) -> bool:
        """True if there are several nodes, or spares."""
        return self.num_spares > 0 or self.fewest > 0 or self.crowds

    @property
    def crowds(self) -> bool:
        """True if a node that trains gets the ranks of a lost one that no spare gets."""
        return self.without_spare in CROWDED

    def node_of(self, rank: int) -> str:
        """Return the node of a rank: the one where it was started last, else where it is to be started."""
        return self._homes.get(rank, f"node{rank * self.num_nodes // self.size}")

    def memory_on(self, rank: int, node: str) -> dict[int, int]:
        """Return a rank's states by iteration, on the node where it starts.

        They outlive a process and not its node. On another node they begin with what peers have of the last
        one: an older state that the node still has from a time before is not in their histories.
        """
        if (home := self._homes.setdefault(rank, node)) != node:
            self._memory[rank, node] = dict(self._memory[rank, home])
            self._homes[rank] = node
        return self._memory.setdefault((rank, node), dict(self._before))

    def start(self) -> Start:
        """Start the agents of nodes and spares."""
        number = len(self.starts)
        address = f"node{self.keeper}", _FIRST_PORT + number
        started = Start(number=number, size=self.size, address=address, keeper=self.keeper)
        self.starts.append(started)
        if self.fewest:
            self._share_memory()
        for node in range(max(self.num_nodes + self.num_spares, self.keeper + 1)):
            self._start_node(node, started)
        return started

    @property
    def newest_start(self) -> Start:
        """The start, or its last layout."""
        return [self.starts[-1], *self.starts[-1].layouts.values()][-1]

    def start_of(self, process: Process) -> Start:
        """Return the start of a rank: in an elastic job that of its layout."""
        started, layout = self.starts[-1], process.local[LAYOUT]
        if layout and layout not in started.layouts:
            size = int(process.environ["WORLD_SIZE"])
            started.layouts[layout] = Start(
                number=started.number, size=size, address=started.address, layout=layout
            )
            if self.fewest:
                self._share_memory()
            self.oracle.begin_layout(layout)
        return started.layouts[layout] if layout else started

    def _share_memory(self) -> None:
        """Have all ranks of another layout begin with what the slowest one has."""
        known = [self._memory[rank, home] for rank, home in self._homes.items()]
        slowest = min((max(each) for each in known), default=None)
        self._before = next((dict(each) for each in known if max(each) == slowest), self._before)
        self._memory.clear()
        self._homes.clear()

    def come_back(self, node: str, started: Start) -> None:
        """Start a node again that was lost, if its job runs."""
        if started is self.starts[-1] and started.agents[started.keeper].is_alive:
            self._start_node(int(node.removeprefix("node")), started)

    def _start_node(self, number: int, started: Start) -> None:
        node = f"node{number}"
        if node in self.machine.powerless:
            self.machine.powerless.remove(node)
            since_s, _ = self.machine.unreachable_s[node]
            self.machine.unreachable_s[node] = since_s, self.world.kernel.now
        launcher = self.world.kernel.make_process("launcher", node)
        launcher.local[MACHINE] = self.machine
        options = KeepOptions(
            target=Target(words=tuple(self.words)),
            ranks_per_node=self.size // self.num_nodes,
            num_nodes=self.num_nodes,
            fewest=self.fewest,
            number=number,
            store=self.keeper,
            is_alone=not self.is_kept,
            meet=started.address,
            lost_after_s=LOST_AFTER_S,
            grace_s=GRACE_S,
            max_restarts=self.restarts,
            name=node,
            run="job",
            restart=started.number,
            token=f"secret of start {started.number}",
        )
        started.agents.append(
            self.machine.make_process(
                f"agent {number}", node, launcher, {}, lambda: be_agent(options)
            )
        )

    def _terminate(self, process: Process) -> None:
        if (handler := handler_of(process, signal.SIGTERM)) is None:
            self.world.kernel.kill(process, -signal.SIGTERM)
            return

        def act() -> None:
            handler(signal.SIGTERM, None)

        self.world.kernel.spawn(process, act, "signal")

    def run(self, started: Start) -> bool:
        """Run a start to its end; return False if it does not come to one."""
        kernel = self.world.kernel
        return kernel.run(lambda: started.is_over, kernel.now + _START_S)

    def process_of(self, rank: int) -> Process | None:
        """Return the newest process of a rank that runs; None if there is none."""
        found = [each for each in self.processes_of(rank) if each.is_alive]
        return found[-1] if found else None

    def processes_of(self, rank: int) -> list[Process]:
        name = f"rank {rank}"
        return [
            each
            for each in self.world.kernel.processes
            if each.name == name and MEMBER in each.local
        ]

    def tell(self, node: str) -> None:
        """Tell a node that it is to end, as a batch system does, and end it after a while."""
        for each in self.starts[-1].agents:
            if each.node == node and each.is_alive:
                self._terminate(each)
                self.world.kernel.call_later(
                    GRACE_S, lambda each=each: self.world.kernel.kill(each)
                )

    def lose(self, node: str, *, is_power: bool = False) -> None:
        """Lose a node with its processes and its memory; another one gets its name.

        Args:
            is_power: whether its kernel is lost, too: no connection ends.
        """
        if is_power:
            self.machine.powerless.add(node)
            self.machine.unreachable_s[node] = self.world.kernel.now, float("inf")
        for each in self.world.kernel.processes:
            if each.node == node:
                self.world.kernel.kill(each)
        for rank in range(self.size):
            if self.node_of(rank) == node and not self.is_kept:
                self._memory[rank, node] = {0: 0}
