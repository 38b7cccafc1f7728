"""Nodes of a job on this machine: an agent of torchrun each, which a test starts, waits for and kills."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from tests.kept_job import ROOT
from tests.kept_nodes import TOKEN
from tests.ports import free_port
from tests.waiting import wait_for

_DEADLINE_S = 400
_NODE = "MOE_FT_TESTED_NODE"  # environment variable of all processes of a node


def start_torchrun(words: Sequence[str], output: Path, **env: str) -> subprocess.Popen[bytes]:
    """Start torchrun with words of a command line in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run"]
    with output.open("a") as file:
        return subprocess.Popen(
            [*command, *words],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **env},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


class Nodes:
    """Nodes that meet by c10d; those that still run are killed at the end of its context."""

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        *,
        num_nodes: int,
        num_ranks: int,
        max_restarts: int,
        fewest: int | None = None,
        keeps: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            folder: gets a log of each node.
            words: of the command line after torchrun's own options.
            max_restarts: that each agent counts.
            fewest: nodes with which the job starts too; None for all.
            keeps: whether each agent starts one process, `keep`, which runs the ranks of its node.
        """
        self._folder, self._env, self._port = folder, env or {}, free_port()
        per_node = str(num_ranks // num_nodes)
        nodes = str(num_nodes) if fewest is None else f"{fewest}:{num_nodes}"
        # Lost agents are noticed, and others waited for, as soon as a busy machine allows.
        conf = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=8"
        self._words = [
            *(() if fewest is None else ("--rdzv-conf", conf)),
            *("--nnodes", nodes, "--nproc-per-node", "1" if keeps else per_node),
            *("--max-restarts", str(max_restarts), "--rdzv-backend", "c10d", "--rdzv-id", "nodes"),
            *("--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", "127.0.0.1"),
            *(("-m", "moe_ft", "keep", "--ranks-per-node", per_node, "--") if keeps else ()),
            *words,
        ]
        self._agents: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name, agent in self._agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            if agent.poll() is None:
                self.kill(name)

    def start(self, *names: str) -> None:
        """Start agents; the first one keeps the rendezvous."""
        for name in names:
            if self._agents:
                wait_for(self._is_listening, "the first agent", _DEADLINE_S)
            variables = {
                "MOE_FT_NODE_ID": name,
                "MOE_FT_KEEP_TOKEN": TOKEN,
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                _NODE: str(self._log(name)),
            }
            variables |= self._env
            agent = start_torchrun(self._words, self._log(name), **variables)
            self._agents.append((name, agent))

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def wait(self, deadline_s: float = _DEADLINE_S) -> list[int]:
        """Return how all agents that were started have ended."""
        return [agent.wait(timeout=deadline_s) for _, agent in self._agents]

    def kill(self, name: str) -> None:
        """Kill all processes of a node, its agent first, which would start them again."""
        for known, agent in self._agents:
            if known == name:
                agent.kill()
        for path in self._processes(name):
            with suppress(ProcessLookupError):
                os.kill(int(path.parent.name), signal.SIGKILL)

    def variable(self, name: str, variable: str) -> str:
        """Return an environment variable of the ranks of a node."""
        for path in self._processes(name):
            with suppress(OSError):
                found = dict(
                    each.split("=", 1) for each in path.read_text().split("\0") if "=" in each
                )
                if "RANK" in found:
                    return found[variable]
        raise AssertionError(f"{name} has no ranks")

    def _processes(self, name: str) -> Iterator[Path]:
        own = f"{_NODE}={self._log(name)}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if own in path.read_bytes().split(b"\0"):
                    yield path

    def log(self, name: str) -> str:
        return self._log(name).read_text()

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
