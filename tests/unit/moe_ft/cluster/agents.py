"""A launcher's agent that starts workers as torchrun does, with a zygote that imports next to nothing."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.unit.source import ROOT
from tests.waiting import wait_for

_WORKER = (
    "import sys; import moe_ft.cluster.target as target; import moe_ft.cluster.worker as worker; "
    "target.PRELOADED = ('{preload}',); worker._MOST_LOOKS = {looks}; worker._LOOKS_PER_LINE = 1; "
    "worker._LOOK_S = 0.1; "
    "worker._MOST_LOOKS_AT_IMPORTS = {looks_at_imports}; worker.main(sys.argv[1:])"
)
# Starts a worker for each line: rank, then words. Prints the worker's process, and its exit code at its end.
_AGENT = """
import json, os, subprocess, sys, threading

def say(*event):
    os.write(1, (json.dumps(event) + "\\n").encode())  # at once: other threads say something too

def wait(rank, worker):
    say(rank, "ended", worker.wait())

for line in sys.stdin:
    rank, words, cpus = json.loads(line)
    env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "test"}
    bind = ["taskset", "-c", cpus] if cpus else []
    worker = subprocess.Popen([*bind, *sys.argv[1:], *words], env=env, start_new_session=True)
    say(rank, "started", worker.pid)
    threading.Thread(target=wait, args=(rank, worker), daemon=True).start()
"""


class Agent:
    """The agent; its ranks run a script that writes JSON lines to a file of theirs.

    It has its workers look at a zygote that does not answer `looks` or `looks_at_imports` times.
    """

    def __init__(
        self,
        folder: Path,
        preload: str = "colorsys",
        *,
        looks: int = 600,
        looks_at_imports: int = 600,
    ) -> None:
        self.folder = folder
        code = _WORKER.format(preload=preload, looks=looks, looks_at_imports=looks_at_imports)
        worker = [sys.executable, "-c", code]
        self.log = folder / "stderr"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _AGENT, *worker],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(folder), "FOLDER": str(folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._script = folder / "script.py"
        self._events: list[list[Any]] = []
        self._workers: list[int] = []

    def script(self, text: str) -> None:
        """Write what ranks run."""
        self._script.write_text(textwrap.dedent(text))

    def start(self, rank: int, *arguments: str, cpus: str = "") -> int:
        """Start a worker; return its process."""
        assert self.process.stdin is not None
        line = json.dumps([rank, ["--", str(self._script), *arguments], cpus])
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        pid = self._event(rank, "started")
        self._workers.append(pid)
        return pid

    def exit_code(self, rank: int) -> int:
        """Wait for the end of a worker, and return how it ended."""
        return self._event(rank, "ended")

    def _event(self, rank: int, kind: str) -> int:
        assert self.process.stdout is not None
        while True:
            for each in self._events:
                if each[:2] == [rank, kind]:
                    self._events.remove(each)
                    return int(each[2])
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            self._events.append(json.loads(line))

    def read(self, name: str) -> Any:
        """Return what a rank has written to a file, once it is there."""
        path = self.folder / name
        wait_for(path.exists, f"{name}; the log is {self.log}")
        return json.loads(path.read_text())

    def kill(self) -> None:
        """Kill the agent alone."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Kill the agent and its workers."""
        self.kill()
        for pid in self._workers:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes."""
    for pid in pids:
        os.kill(pid, number)
