"""Faults from outside: signals, lost and cut nodes, storage that fails, files that are damaged."""

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from moe_ft.faults import Phase
from tests.chaos.cases import NUM_ITERATIONS, OF_NODES, OF_STORAGE, Kind, Strike, When
from tests.chaos.job import ChaosJob
from tests.processes import kill_all

_MOMENT_S, _TARGET_S = 90.0, 20.0
_PATIENCE = 5  # iterations
_DISK_BYTES = 48 << 20


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a file system of its own, for strikes; without root a plain one."""
    folder.mkdir(parents=True)
    if os.geteuid() != 0:
        yield folder
        return
    image = folder.with_suffix(".ext4")
    _run("truncate", "--size", _DISK_BYTES, image)
    _run("mkfs.ext4", "-q", "-m", "0", image)
    subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=True)
    try:
        yield folder
    finally:
        _run("fsfreeze", "--unfreeze", folder)
        _run("umount", "--lazy", folder)
        image.unlink()


def _run(*words: object) -> bool:
    return subprocess.run([*map(str, words)], capture_output=True, check=False).returncode == 0


class Striker:
    """Faults of one job; draws what a case leaves open from its seed."""

    def __init__(self, job: ChaosJob) -> None:
        self._job, self._random = job, random.Random(job.case.seed)
        self._last = 0  # iteration of the last strike

    def strike(self, strike: Strike) -> bool:
        """Wait for the moment and strike; return whether both came, the moment and a target."""
        job = self._job
        said = f"{strike.kind} {' '.join(map(str, strike.targets))} at {strike.when} {strike.what}"
        if not job.wait(lambda: self._is_now(strike), _MOMENT_S):
            job.note(f"{said} never came")
            return False
        time.sleep(strike.delay_s)
        self._last = job.iteration()
        if strike.when is not When.LINE:
            job.mark()
        job.note(said)
        is_hit = self._act(strike)
        job.note("hit" if is_hit else "nothing was there to hit")
        job.may_end |= is_hit and strike.may_end
        return is_hit

    def _is_now(self, strike: Strike) -> bool:
        job, seen = self._job, self._job.progress()
        least = self._last + strike.iterations
        match strike.when:
            case When.START:
                return all(each.phase is Phase.SETUP for each in seen) and bool(job.ranks())
            case When.LINE:
                return re.search(strike.what, job.new_lines()) is not None
            case When.STORING:
                found = job.storage.glob("iter_*")
                is_part = any(not (each / "manifest.json").exists() for each in found)
                return is_part and any(each.iteration >= least for each in seen)
        due = [x for x in seen if x.iteration >= least and (x.iteration + 1) % strike.every == 0]
        # A phase may be shorter than the time between two looks.
        latest = least + (_PATIENCE if strike.every == 1 else NUM_ITERATIONS)
        return any(x.phase == strike.what or x.iteration >= latest for x in due)

    def _act(self, strike: Strike) -> bool:
        """Strike; return whether the target was there."""
        job, kind = self._job, strike.kind
        if kind in OF_STORAGE:
            return job.storage.is_mount() and self._strike_storage(strike)
        if kind is Kind.TRUNCATE:
            return self._damage(strike)
        if kind in OF_NODES:
            is_gone = kind is Kind.RETURN_NODE
            nodes = [(f"n{number}", job.nodes[f"n{number}"]) for number in strike.targets]
            names = [name for name, node in nodes if (node.agent.poll() is not None) is is_gone]
            return bool(names) and self._strike_nodes(strike, names)
        find = lambda: [each for rank, each in job.ranks().items() if rank in strike.targets]  # noqa: E731
        ranks = job.wait(find, _TARGET_S) or []
        # All stand still before the first of them dies, so that none acts on the death of another.
        job.send(SIGTERM if kind is Kind.TERMINATE_RANK else SIGSTOP, ranks)
        if kind is Kind.STOP_RANK and ranks:
            job.hold(strike.hold_s)
            job.send(SIGCONT, ranks)
        if kind is Kind.FLIP:
            self._damage(strike)
        if kind in (Kind.FLIP, Kind.KILL_RANKS):
            job.send(SIGKILL, ranks)
        return bool(ranks)

    def _strike_nodes(self, strike: Strike, names: list[str]) -> bool:
        """Strike nodes that run, or start those again that do not; return whether they had the target."""
        job, found = self._job, self._job.processes(*names)
        nodes = [job.nodes[name] for name in names]
        for node in nodes:
            node.is_struck = True
        match strike.kind:
            case Kind.RETURN_NODE:
                for name in names:
                    job.start_node(name)
                return True
            case Kind.LOSE_NODES:
                kill_all(found)
                for path in (path for name in names for path in job.memory_dir.glob(f"*/{name}")):
                    shutil.rmtree(path)
            case Kind.STOP_NODE:
                job.send(SIGSTOP, found)
                job.hold(strike.hold_s)
                job.send(SIGCONT, found)
            case Kind.CUT_NODE if job.networks is not None:
                (name,) = names
                job.networks.cut(name)
                job.hold(strike.hold_s)
                job.networks.restore(name)
            case Kind.KILL_FORK_SERVER:
                found = job.fork_servers(*names)
                job.send(SIGKILL, found)
            case kind:
                for node in nodes:
                    node.agent.send_signal(SIGKILL if kind is Kind.KILL_AGENT else SIGTERM)
        return bool(found)

    def _strike_storage(self, strike: Strike) -> bool:
        """Disturb storage for a while; it cannot be made read-only while a file is open for writing."""
        job, filler, kind = self._job, self._job.storage / "filler", strike.kind
        mount = ("mount", job.storage, "-o")
        if kind is Kind.FILL:
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        elif kind is Kind.FREEZE:
            _run("fsfreeze", "--freeze", job.storage)
        elif not job.wait(lambda: _run(*mount, "remount,ro"), _TARGET_S):
            return False
        job.hold(strike.hold_s)
        _run("fsfreeze", "--unfreeze", job.storage)
        _run(*mount, "remount,rw")
        filler.unlink(missing_ok=True)
        return True

    def _damage(self, strike: Strike) -> bool:
        """Cut a file in the memory of a rank, or flip a bit of it."""
        (rank,) = strike.targets
        paths = self._job.memory_dir.glob(f"*/*/rank_{rank:05d}/*")
        found = sorted(each for each in paths if each.is_file() and each.stat().st_size)
        if not found:
            return False
        path = self._random.choice(found)
        place = self._random.randrange(path.stat().st_size)
        self._job.note(f"byte {place} of {path.name}")
        with path.open("r+b") as file:  # in place: others may have it mapped
            if strike.kind is Kind.TRUNCATE:
                file.truncate(place)
                return True
            file.seek(place)
            (byte,) = file.read(1)
            file.seek(place)
            file.write(bytes([byte ^ 1 << self._random.randrange(8)]))
        return True
