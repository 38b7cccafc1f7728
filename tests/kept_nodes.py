"""Nodes that `moe_ft keep` starts without torchrun, on this machine: each can be lost, stopped and woken.

The zygote of a node is a fork of the tests' fork server, as in tests/kept_job.py, unless nodes are to import.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import psutil

from moe_ft.cluster.worker import socket_path
from tests.harness import DEADLINE_S, _context, prepare_to_fork
from tests.kept_job import ROOT, _serve
from tests.namespaces import INTERFACE, Namespaces
from tests.ports import free_port
from tests.processes import kill_all

_TOKEN = "0123456789abcdef"


def _serve_in(network: str, *arguments: Any) -> None:
    if network:
        with open(network) as file:
            os.setns(file.fileno(), os.CLONE_NEWNET)
    _serve(*arguments)


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
        prepare_to_fork()
        self._networks, self._imports = networks, imports
        host = "127.0.0.1" if networks is None else networks.address(f"node{store}")
        self._folder, self.status = folder, folder / "status"
        self._words = [
            *("-m", "moe_ft", "keep", "--nodes"),
            f"{num_nodes}" if fewest is None else f"{fewest}:{num_nodes}",
            *("--ranks-per-node", str(ranks_per_node), "--meet", f"{host}:{free_port()}"),
            *(
                "--store",
                str(store),
                "--lost-after",
                str(lost_after_s),
                "--status",
                str(self.status),
            ),
        ]
        self._script = ["--", *words]
        self._nodes: list[tuple[str, subprocess.Popen[bytes], BaseProcess | None]] = []
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in dict(self._by_name()):
            self.kill(name)

    def _by_name(self) -> Iterator[tuple[str, tuple[subprocess.Popen[bytes], Any]]]:
        for name, agent, zygote in self._nodes:
            yield name, (agent, zygote)

    def start(self, *names: str, first: int = 0, restart: int = 0) -> None:
        """Start nodes, numbered from the first one on, in some restart of the job."""
        for number, name in enumerate(names, first):
            env = {
                "MOE_FT_NODE_ID": name,
                "MOE_FT_KEEP_TOKEN": _TOKEN,
                "TORCHELASTIC_RUN_ID": "nodes",
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                "CUDA_VISIBLE_DEVICES": "",
                "LOCAL_RANK": "0" if self._imports else "1",  # the zygote comes from here
            }
            enter: list[str] = []
            if self._networks is not None:
                enter = self._networks.command(name)
                env |= {"GLOO_SOCKET_IFNAME": INTERFACE}
            words, variables = self.command(number)
            with self._log(name).open("a") as file:
                agent = subprocess.Popen(
                    [*enter, *words],
                    cwd=ROOT,
                    env={**os.environ, **env, **variables},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            try:
                pid = self.keep_of(agent)
            except BaseException:
                top = psutil.Process(agent.pid)
                kill_all([top, *top.children(recursive=True)])
                raise
            arguments = (pid, str(socket_path(pid)), str(self._log(name)))
            path = self._networks.path(name) if self._networks is not None else ""
            zygote = None
            if not self._imports:
                zygote = _context.Process(target=_serve_in, args=(path, *arguments))
                zygote.start()
            self._nodes.append((name, agent, zygote))

    def command(self, number: int) -> tuple[list[str], dict[str, str]]:
        """Return what starts a node, and further variables."""
        return [sys.executable, *self._words, "--number", str(number), *self._script], {}

    def keep_of(self, agent: "subprocess.Popen[bytes]") -> int:
        """Return the process of keep that was started."""
        return agent.pid

    def tell_to_end(self, *names: str) -> None:
        """Send SIGTERM to what was started on nodes."""
        for name in names:
            dict(self._by_name())[name][0].terminate()

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of the node that was started last under a name."""
        agent, zygote = dict(self._by_name())[name]
        found = []
        for pid in (agent.pid, *(() if zygote is None else (zygote.pid,))):
            with suppress(psutil.NoSuchProcess):
                top = psutil.Process(pid)
                found += [top, *top.children(recursive=True)]
        return found

    def kill(self, *names: str) -> None:
        """Lose nodes with all their processes at once."""
        kill_all([each for name in names for each in self.processes(name)])
        for name in names:
            agent, zygote = dict(self._by_name())[name]
            if zygote is not None:
                zygote.join()
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
            name: agent.wait(timeout=DEADLINE_S)
            for name, agent, _ in self._nodes
            if agent.pid not in self._killed
        }

    def log(self, name: str) -> str:
        return self._log(name).read_text()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
