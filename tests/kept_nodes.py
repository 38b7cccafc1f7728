"""Nodes that `moe_ft keep` starts without torchrun, on this machine: each can be lost, stopped and woken.

The zygote of a node is a fork of the tests' fork server, as in tests/kept_job.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import psutil

from moe_ft.keeper.worker import socket_path
from tests.harness import DEADLINE_S, _context, prepare_to_fork
from tests.kept_job import ROOT, _serve
from tests.ports import free_port
from tests.processes import kill_all

_TOKEN = "0123456789abcdef"


class KeptNodes:
    """Nodes of one job; what still runs is killed at the end of its context."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        *,
        num_nodes: int,
        ranks_per_node: int,
        lost_after_s: int = 10,
    ) -> None:
        """Start nothing yet.

        Args:
            folder: gets a log of each node, and the status of the job.
            words: command line of the ranks.
            num_nodes: that train.
        """
        prepare_to_fork()
        self._folder, self.status = folder, folder / "status"
        self._words = [
            *("-m", "moe_ft", "keep", "--nodes", str(num_nodes)),
            *("--ranks-per-node", str(ranks_per_node), "--meet", f"127.0.0.1:{free_port()}"),
            *("--lost-after", str(lost_after_s), "--status", str(self.status)),
        ]
        self._script = ["--", *words]
        self._nodes: list[tuple[str, subprocess.Popen[bytes], BaseProcess]] = []
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in dict(self._by_name()):
            self.kill(name)

    def _by_name(self) -> Iterator[tuple[str, tuple[subprocess.Popen[bytes], Any]]]:
        for name, agent, zygote in self._nodes:
            yield name, (agent, zygote)

    def start(self, *names: str, first: int = 0) -> None:
        """Start nodes, numbered from the first one on."""
        for number, name in enumerate(names, first):
            env: Mapping[str, str] = {
                "MOE_FT_NODE_ID": name,
                "MOE_FT_KEEP_TOKEN": _TOKEN,
                "TORCHELASTIC_RUN_ID": "nodes",
                "CUDA_VISIBLE_DEVICES": "",
                "LOCAL_RANK": "1",  # the zygote comes from here
            }
            with self._log(name).open("a") as file:
                agent = subprocess.Popen(
                    [sys.executable, *self._words, "--number", str(number), *self._script],
                    cwd=ROOT,
                    env={**os.environ, **env},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            arguments = (agent.pid, str(socket_path(agent.pid)), str(self._log(name)))
            zygote = _context.Process(target=_serve, args=arguments)
            zygote.start()
            self._nodes.append((name, agent, zygote))

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of the node that was started last under a name."""
        agent, zygote = dict(self._by_name())[name]
        found = []
        for pid in (agent.pid, zygote.pid):
            with suppress(psutil.NoSuchProcess):
                top = psutil.Process(pid)
                found += [top, *top.children(recursive=True)]
        return found

    def kill(self, *names: str) -> None:
        """Lose nodes with all their processes at once."""
        kill_all([each for name in names for each in self.processes(name)])
        for name in names:
            agent, zygote = dict(self._by_name())[name]
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
