"""Nodes that `moe_ft keep` starts without torchrun, on this machine: each can be lost, stopped and woken."""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from tests.harness import DEADLINE_S
from tests.kept_job import KEEP, KeptAgent
from tests.namespaces import INTERFACE, Namespaces
from tests.ports import free_port
from tests.processes import kill_all

TOKEN = "0123456789abcdef"


class KeptNodes:
    """Nodes of one job; what still runs is killed at the end of its context."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        *,
        num_nodes: int,
        ranks_per_node: int,
        fewest: int | None = None,
        lost_after_s: int = 10,
        networks: Namespaces | None = None,
        store: int = 0,
        max_restarts: int = 0,
        imports: bool = False,
    ) -> None:
        """Start nothing yet.

        Args:
            folder: gets a log of each node, and the status of the job.
            words: command line of the ranks.
            num_nodes: that train.
            fewest: nodes with which an elastic job trains too; None for all.
            networks: of the nodes, if each has its own.
            store: number of the node that keeps the job's store.
            imports: whether each node imports what it needs, which takes many seconds, as on a machine.
        """
        self._networks, self._imports = networks, imports
        host = "127.0.0.1" if networks is None else networks.address(f"node{store}")
        self._folder, self.status = folder, folder / "status"
        nodes = f"{num_nodes}" if fewest is None else f"{fewest}:{num_nodes}"
        self._words = [
            *("--nodes", nodes, "--ranks-per-node", str(ranks_per_node)),
            *("--meet", f"{host}:{free_port()}", "--store", str(store)),
            *("--lost-after", str(lost_after_s), "--status", str(self.status)),
            *("--max-restarts", str(max_restarts)),
        ]
        self._script = ["--", *words]
        self._nodes: list[tuple[str, KeptAgent]] = []
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in dict(self._nodes):
            self.kill(name)

    def start(self, *names: str, first: int = 0, restart: int = 0) -> None:
        """Start nodes, numbered from the first one on, in some restart of the job."""
        for number, name in enumerate(names, first):
            env = {
                "MOE_FT_NODE_ID": name,
                "MOE_FT_KEEP_TOKEN": TOKEN,
                "TORCHELASTIC_RUN_ID": "nodes",
                "TORCHELASTIC_RESTART_COUNT": str(restart),
            }
            network, enter = "", list[str]()
            if self._networks is not None:
                network, enter = self._networks.path(name), self._networks.command(name)
                env |= {"GLOO_SOCKET_IFNAME": INTERFACE}
            command, words, variables = self.command(number)
            agent = KeptAgent(
                words,
                self._log(name),
                {**env, **variables},
                network=network,
                command=[*enter, *command] if command else (),
            )
            self._nodes.append((name, agent))

    def command(self, number: int) -> tuple[list[str], list[str], dict[str, str]]:
        """Return what starts a node, if it is to import, the words that follow, and further variables."""
        words = [*self._words, "--number", str(number), *self._script]
        return KEEP if self._imports else [], words, {}

    def tell_to_end(self, *names: str) -> None:
        """Send SIGTERM to what was started on nodes."""
        for name in names:
            dict(self._nodes)[name].send_signal(signal.SIGTERM)

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of the node that was started last under a name."""
        return dict(self._nodes)[name].processes()

    def kill(self, *names: str) -> None:
        """Lose nodes with all their processes at once."""
        kill_all([each for name in names for each in self.processes(name)])
        for name in names:
            agent = dict(self._nodes)[name]
            agent.wait()
            self._killed.add(agent.pid)

    def stop(self, name: str) -> None:
        """Have all processes of a node stand still."""
        for each in self.processes(name):
            each.suspend()

    def wake(self, name: str) -> None:
        for each in self.processes(name):
            each.resume()

    def wait(self) -> dict[str, int]:
        """Return how all nodes have ended that were not killed."""
        return {
            name: agent.wait(DEADLINE_S)
            for name, agent in self._nodes
            if agent.pid not in self._killed
        }

    def log(self, name: str) -> str:
        return self._log(name).read_text()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
