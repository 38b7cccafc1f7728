"""A real job of chaos: starts its nodes, follows its progress, and knows its processes and files.

A process belongs to a job if a log of the job is its output. tests/chaos/strikes.py has the faults.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

from moe_ft.events import RankProgress, event_path, read_progress
from moe_ft.processes import process_name
from tests.chaos.cases import LOST_AFTER_S, NUM_ITERATIONS, NUM_RANKS, Case
from tests.demo_model import event_flags, layout_flags, model_flags
from tests.harness import prepare_to_fork
from tests.kept_job import KEEP, KeptAgent
from tests.kept_nodes import TOKEN
from tests.namespaces import INTERFACE, Namespaces
from tests.ports import free_port
from tests.processes import kill_all
from tests.references import Place

SILENT_S = 180.0  # groups time out after 120 s; imports on a busy machine take a minute
_LATE_S = 20.0  # for a node that came back when the others had ended
_MOST_S = 900.0  # until a job that moves should have come to its end
MODEL: dict[str, Any] = dict(hidden_size=32, hidden_dropout=0.1, global_batch_size=4)
MODEL |= dict(micro_batch_size=1, train_iters=NUM_ITERATIONS, distributed_timeout_minutes=2)


class HangError(Exception):
    """No rank got any further, and nothing was held."""


@dataclass
class Node:
    """A node as it was started last; what its agent may end with is open if it was struck."""

    agent: KeptAgent
    is_struck: bool = False
    is_late: bool = False


class ChaosJob:
    """The job of a case; what still runs is killed at the end of its context."""

    networks: Namespaces | None = None  # of the nodes, if each has its own

    def __init__(self, case: Case, place: Place, storage: Path) -> None:
        self.case, self.storage, self.memory_dir = case, storage, place.memory_dir
        self.events_dir = place.folder / "events"
        names = [f"n{number}" for number in range(case.num_nodes + case.num_spares)]
        self.logs = {name: place.folder / f"{name}.log" for name in names}
        layout = {"num_layers": case.layout.get("pp", 2), "sequence_parallel": "tp" in case.layout}
        changes = {**MODEL, **layout, **case.changes}
        self.base = [*model_flags(**changes), *layout_flags(case.layout), *place.dataset_flags]
        self.nodes: dict[str, Node] = {}
        self.starts, self.notes, self.may_end = 0, list[str](), False
        self._marks: dict[Path, int] = {}
        self._begin = self._moved = time.monotonic()
        self._late_since, self._seen = 0.0, object()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        kill_all(self.processes())
        for node in self.nodes.values():
            node.agent.wait()

    def note(self, text: str) -> None:
        seconds = time.monotonic() - self._begin
        self.notes.append(f"{seconds:.1f} s, iteration {self.iteration()}: {text}")

    def start(self) -> None:
        """Start all nodes, for the first time or again after all have ended."""
        prepare_to_fork()
        self._port, self.starts = free_port(), self.starts + 1
        self._moved, self._late_since, self.may_end = time.monotonic(), 0.0, False
        self.nodes.clear()
        for name in self.logs:
            self.start_node(name, is_real=self.case.is_real)

    def start_node(self, name: str, *, is_real: bool = False) -> None:
        """Start a node, again if it was lost."""
        env = dict(MOE_FT_NODE_ID=name, MOE_FT_KEEP_TOKEN=TOKEN, TORCHELASTIC_RUN_ID="chaos")
        env |= dict(TORCHELASTIC_RESTART_COUNT=f"{self.starts - 1}", PYTHONUNBUFFERED="1")
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        enter, network = list[str](), ""
        if self.networks is not None:
            enter, network = self.networks.command(name), self.networks.path(name)
            env["GLOO_SOCKET_IFNAME"] = INTERFACE
        command = KEEP if is_real else []
        if not self.case.ranks_per_node:
            command = [sys.executable, *self._torchrun(), *KEEP[1:]]
        words, log = self._words(name[1:]), self.logs[name]
        command = [*enter, *command] if command else []
        is_late = name in self.nodes
        agent = KeptAgent(words, log, env, network=network, command=command)
        self.nodes[name] = Node(agent, is_struck=is_late, is_late=is_late)

    def _torchrun(self) -> list[str]:
        """Return the words of torchrun, after Python."""
        program = "-m torch.distributed.run --nproc-per-node 1 --max-restarts 20 --rdzv-id chaos"
        program += f" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{self._port}"
        return [*program.split(), "--local-addr", "127.0.0.1"]

    def _words(self, number: str) -> list[str]:
        """Return the command line of a node, after `keep`."""
        case, host = self.case, "127.0.0.1"
        script = "tests/chaos/broken.py" if "TEST_BREAKAGE" in os.environ else "pretrain_gpt_moe.py"
        job = ["--", script, *self.base, *event_flags(self.events_dir), *case.flags]
        job += ["--moe-ft-memory-dir", str(self.memory_dir), "--moe-ft-job-id", "chaos"]
        job += ["--moe-ft-persist-dir", str(self.storage)] if case.has_disk else []
        if not case.ranks_per_node:
            return ["--ranks-per-node", str(NUM_RANKS), *job]
        if self.networks is not None:
            host = self.networks.address("n0")
        nodes = f"{case.fewest}:{case.num_nodes}" if case.fewest else case.num_nodes
        program = f"--nodes {nodes} --ranks-per-node {case.ranks_per_node}"
        program += f" --meet {host}:{self._port} --number {number} --lost-after {LOST_AFTER_S}"
        return [*program.split(), *job]

    def processes(self, *names: str) -> list[psutil.Process]:
        """Return the processes of some nodes, or of all."""
        logs = {str(self.logs[each]) for each in names or self.logs}
        found = []
        for pid in psutil.pids():
            with suppress(OSError, psutil.NoSuchProcess):
                if {os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)} & logs:
                    found.append(psutil.Process(pid))
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the youngest process of each rank that has one."""
        found: dict[int, psutil.Process] = {}
        for each in sorted(self.processes(), key=lambda process: process.pid):
            with suppress(psutil.NoSuchProcess):
                name, number = process_name(each.pid), process_name(each.pid).removeprefix("rank_")
                if number.isdecimal() and process_name(each.ppid()) != name:
                    found[int(number)] = each
        return found

    def fork_servers(self, *nodes: str) -> list[psutil.Process]:
        """Return the processes from which ranks of some nodes are forked."""
        return [x for x in self.processes(*nodes) if process_name(x.pid) == "moe_ft_forks"]

    def send(self, number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
        for each in processes:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def iteration(self) -> int:
        """Return the furthest iteration that any rank has begun in its last start; -1 before."""
        return max((each.iteration for each in self.progress()), default=-1)

    def progress(self) -> list[RankProgress]:
        """Return the progress of all ranks that have any."""
        found = (read_progress(self.events_dir, rank) for rank in range(NUM_RANKS))
        return [each for each in found if each is not None]

    def mark(self) -> None:
        """Begin to count lines from here."""
        self._marks = {path: path.stat().st_size for path in self.logs.values()}

    def new_lines(self) -> str:
        """Return what was printed since the mark."""
        found = ""
        for path, start in self._marks.items():
            with path.open(errors="replace") as file:
                file.seek(start)
                found += file.read()
        return found

    def wait[Found](self, find: Callable[[], Found], limit_s: float = _MOST_S) -> Found | None:
        """Return what is found; None if the time is over or the job has ended before.

        Raises:
            HangError: if the job stands still.
        """
        end = time.monotonic() + limit_s
        while not (found := find()):
            if time.monotonic() > end or self.has_ended():
                return find() or None
            self._check_moves()
            time.sleep(0.001)  # phases are short
        return found

    def hold(self, seconds: float) -> None:
        """Let the job run for a while in which standing still is not its fault."""
        time.sleep(seconds)
        self._moved = time.monotonic()

    def _check_moves(self) -> None:
        logs = (event_path(self.events_dir, rank) for rank in range(NUM_RANKS))
        seen = self.progress(), [path.stat().st_size for path in logs if path.exists()]
        if seen != self._seen:
            self._seen, self._moved = seen, time.monotonic()
        if time.monotonic() > self._moved + SILENT_S:
            raise HangError(f"no rank has got any further for {SILENT_S:.0f} s")

    def has_ended(self) -> bool:
        """Return whether no agent and no rank runs; end nodes that came back too late for the job."""
        running = {name: node for name, node in self.nodes.items() if node.agent.poll() is None}
        if not running:
            return not any(process_name(each.pid).startswith("rank_") for each in self.processes())
        if all(node.is_late for node in running.values()):
            self._late_since = self._late_since or time.monotonic()
            if time.monotonic() > self._late_since + _LATE_S:
                self.note(f"nodes that came too late are killed: {', '.join(running)}")
                kill_all(self.processes(*running))
        return False
