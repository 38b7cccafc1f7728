"""Jobs whose ranks `moe_ft keep` runs, as on one node without torchrun.

The agent is a fork of the tests' fork server, and so are its own fork server and its ranks: nothing is
imported.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from moe_ft.commands.launch import keep
from tests.harness import DEADLINE_S, _context, be_process, prepare_to_fork
from tests.processes import kill_all

ROOT = Path(__file__).resolve().parent.parent
KEEP = [sys.executable, "-m", "moe_ft", "keep"]
_RESTART = "all ranks begin again on nodes"


class KeptAgent:
    """Process of `moe_ft keep`, with all that it starts."""

    def __init__(
        self,
        words: Sequence[str],
        log: Path,
        env: Mapping[str, str],
        *,
        network: str = "",
        command: Sequence[str] = (),
    ) -> None:
        """Start it.

        Args:
            words: of the command line after `keep`.
            log: gets what all processes print.
            env: further environment variables. GPUs are hidden unless they show them.
            network: path of the network namespace of its node, if it has its own.
            command: starts it instead, so that it imports what it needs as on a machine.
        """
        variables = {"CUDA_VISIBLE_DEVICES": "", **env}
        self._started: BaseProcess | subprocess.Popen[bytes]
        if command:
            with log.open("a") as file:
                self._started = subprocess.Popen(
                    [*command, *words],
                    cwd=ROOT,
                    env={**os.environ, **variables},
                    stdout=file,
                    stderr=file,
                    start_new_session=True,
                )
            return
        prepare_to_fork()
        log.touch()
        arguments = (list(words), str(log), variables, network)
        self._started = _context.Process(target=_keep, args=arguments)
        self._started.start()

    @property
    def pid(self) -> int:
        assert self._started.pid is not None
        return self._started.pid

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if isinstance(self._started, BaseProcess):
            return self._started.exitcode
        return self._started.poll()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return the exit code when it has ended; raises TimeoutError if it does not end in time."""
        if isinstance(self._started, BaseProcess):
            self._started.join(deadline_s)
        else:
            with suppress(subprocess.TimeoutExpired):
                self._started.wait(deadline_s)
        if (code := self.poll()) is None:
            raise TimeoutError(f"keep has not ended within {deadline_s:.0f} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Return it, if it runs, and all processes that it or they have started."""
        with suppress(psutil.NoSuchProcess):
            top = psutil.Process(self.pid)
            return [top, *top.children(recursive=True)]
        return []

    def kill(self) -> None:
        """Kill all these processes at once."""
        kill_all(self.processes())
        self.wait()


def _keep(words: Sequence[str], log: str, env: Mapping[str, str], network: str) -> None:
    if network:
        with open(network) as file:
            os.setns(file.fileno(), os.CLONE_NEWNET)
    os.environ.update(env)
    os.chdir(ROOT)
    be_process(Path(log), lambda: keep(words))


@dataclass(frozen=True, kw_only=True)
class KeptResult:
    """End of a job.

    Attributes:
        code: exit code of the agent, which is that of the job.
        log: everything that was printed.
    """

    code: int
    log: Path

    @property
    def num_restarts(self) -> int:
        """Number of times that all ranks were started again."""
        return self.log.read_text().count(_RESTART)

    def check(self) -> "KeptResult":
        """Return self, or fail with the end of the log if the job failed."""
        assert self.code == 0, f"{self.code}\n{self.log.read_text()[-5000:]}"
        return self


def run_kept(
    flags: Sequence[str],
    world_size: int,
    *,
    log: Path,
    script: str = "pretrain_gpt_moe.py",
    max_restarts: int = 0,
    deadline_s: float = DEADLINE_S,
    env: Mapping[str, str] | None = None,
) -> KeptResult:
    """Run a job under `moe_ft keep`; return when it has ended.

    Args:
        log: gets what all processes print.
        max_restarts: of all ranks, after one has failed.
        deadline_s: fails the test if a start takes longer.
        env: further environment variables. GPUs are hidden unless they show them.
    """
    words = ["--ranks-per-node", str(world_size), "--max-restarts", str(max_restarts)]
    variables = {"TORCHELASTIC_RUN_ID": "kept", **(env or {})}
    agent = KeptAgent([*words, "--", script, *flags], log, variables)
    try:
        code = agent.wait(deadline_s * (1 + max_restarts))
    except TimeoutError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-5000:]}") from error
    finally:
        agent.kill()
    return KeptResult(code=code, log=log)


def logged_in(text: str) -> list[int]:
    """Return the iterations that have a log line of Megatron's in a text, in their order."""
    return [int(number) for number in re.findall(r"iteration +(\d+)/ +\d+ \|", text)]
