"""SLURM of three nodes on this machine, with daemons, a key and ports of its own.

Debian's packages slurm-wlm and munge have what it needs. tests/slurm/job.py submits jobs to it.
"""

import getpass
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.ports import free_port
from tests.processes import kill_all
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parent.parent.parent
NODES = ("node1", "node2", "node3")
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_CONFIGURATION = """\
ClusterName=moe_ft_test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=60
Epilog={epilog}
Prolog={epilog}
KillWait=20
MpiDefault=none
CommunicationParameters=NoInAddrAny
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing_programs() -> list[str]:
    """Return the programs of SLURM that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


class Cluster:
    """Daemons of a SLURM. Owned by the test run that started them.

    Attributes:
        environment: variables with which SLURM's commands reach it.
        memory_prefix: of the memory directories of its jobs. The epilog removes the memory of all jobs there
            that this SLURM does not know.
    """

    def __init__(self, folder: Path) -> None:
        """Start nothing yet.

        Args:
            folder: empty, on a short path (munged's socket lies in it), of this user alone.
        """
        self._folder = folder
        self._conf = folder / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self._conf), "PATH": _PATH}
        self.memory_prefix = f"/dev/shm/{folder.name}_"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2"
            for name in NODES
        ]
        (self._folder / "state").mkdir()
        content = _CONFIGURATION.format(
            host=host,
            port=free_port(),
            first_job=random.randrange(1, 50_000),  # other test runs have other ports of jobs
            folder=self._folder,
            user=getpass.getuser(),
            epilog=self._write_epilog(),
            nodes="\n".join(nodes),
            names=",".join(NODES),
        )
        self._conf.write_text(content)
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = [
            f"--{name}-file={self._folder}/munge.{name}" for name in ("key", "log", "pid", "seed")
        ]
        socket_path = self._folder / "munge.socket"
        self._start("munged", "--foreground", "--force", f"--socket={socket_path}", *files)
        wait_for(socket_path.exists, "munged")
        self._start("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        wait_for(lambda: self.states() == ["idle"] * len(NODES), "three idle nodes")

    def _write_epilog(self) -> Path:
        """Write what an administrator would: the example with the variables of this cluster."""
        path = self._folder / "epilog.sh"
        lines = (
            "#!/usr/bin/env bash",
            f"export PYTHON={sys.executable} SLURM_CONF={self._conf} PATH={_PATH}",
            f"export MEMORY_DIRS='{self.memory_prefix}*'",
            f"cd {ROOT} && exec examples/slurm/epilog.sh >>{self._folder}/epilog.log 2>&1",
        )
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o700)
        return path

    def _start(self, program: str, *words: str, name: str = "") -> None:
        with (self._folder / f"{name or program}.out").open("a") as output:
            self._daemons[name or program] = subprocess.Popen(
                [program, *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        """Start a node's daemon, as its boot does."""
        self._start("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon, its steps and everything that they run, as a loss of power does."""
        daemon = self._daemons.pop(node)
        kill_all([psutil.Process(daemon.pid), *self.processes(node)])
        daemon.wait()

    def processes(self, node: str | None = None) -> list[psutil.Process]:
        """Return all processes of this SLURM or of a node: managers of steps, and what they run."""
        return [each for each in psutil.process_iter() if self._is_ours(each, node)]

    def _is_ours(self, process: psutil.Process, node: str | None) -> bool:
        try:
            if process.name() == "slurmstepd":  # hides its variables
                logs = {str(self._log_of(each)) for each in NODES if node in (None, each)}
                return any(file.path in logs for file in process.open_files())
            variables = process.environ()
        except psutil.Error:  # gone, or not of this user
            return False
        is_there = node is None or variables.get("SLURMD_NODENAME") == node
        return variables.get("SLURM_CONF") == str(self._conf) and is_there

    def _log_of(self, node: str) -> Path:
        return self._folder / f"slurmd.{node}.log"

    def call(self, *words: str) -> str:
        """Return what one of SLURM's commands prints; fail if it fails."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout.strip()

    def states(self, nodes: Sequence[str] = NODES) -> list[str]:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T", f"--nodes={','.join(nodes)}"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    def end_jobs(self) -> None:
        """Cancel all jobs, bring all nodes back, and wait until nothing runs."""
        self.call("scancel", f"--user={getpass.getuser()}")
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)
        wait_for(lambda: not self.call("squeue", "--noheader"), "the end of all jobs")
        wait_for(lambda: self.states() == ["idle"] * len(NODES), "three idle nodes")
        # SLURM has forgotten a job while the last srun of its script ends.
        wait_for(lambda: not self._processes_of_jobs(), "the end of what jobs have started")

    def _processes_of_jobs(self) -> list[psutil.Process]:
        found = []
        for each in self.processes():
            with suppress(psutil.Error):  # it has ended
                if each.name() == "slurmstepd" or "SLURM_JOB_ID" in each.environ():
                    found.append(each)
        return found

    def close(self) -> None:
        """End everything, and fail if something is left."""
        for name in reversed(list(self._daemons)):
            self._daemons[name].send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._daemons[name].wait(timeout=20)
            self._daemons[name].kill()
            self._daemons[name].wait()
        left = self.processes()
        kill_all(left)
        assert not left, f"these processes were left: {left}"
