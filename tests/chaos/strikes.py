"""Faults from outside: signals, lost and cut nodes, storage that fails, files that are damaged.

Each waits for its moment first. One whose moment or target does not come strikes nothing, and says so.
"""

import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

import psutil

from moe_ft.faults import Phase
from tests.chaos.cases import (
    EVALUATED_EVERY,
    EXITS_EVERY,
    NUM_ITERATIONS,
    Kind,
    Moment,
    Strike,
    When,
)
from tests.chaos.job import ChaosJob
from tests.processes import kill_all

_MOMENT_S, _TARGET_S = 90.0, 20.0
_DISK_MIB = 48


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a file system of its own, for strikes; without root a plain one."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() != 0:
        yield folder
        return
    image = folder.with_suffix(".ext4")
    image.write_bytes(b"")
    os.truncate(image, _DISK_MIB << 20)
    _run("mkfs.ext4", "-q", "-m", "0", image)
    _run("mount", "-o", "loop", image, folder)
    try:
        yield folder
    finally:
        _run("fsfreeze", "--unfreeze", folder, check=False)
        _run("umount", "--lazy", folder)
        image.unlink()


def _run(*words: object, check: bool = True) -> bool:
    done = subprocess.run(list(map(str, words)), check=check, capture_output=True)
    return done.returncode == 0


class Striker:
    """Faults of one job; draws what a case leaves open from its seed."""

    def __init__(self, job: ChaosJob) -> None:
        self._job, self._random = job, random.Random(job.case.seed)
        self._last = 0  # iteration of the last strike

    def strike(self, strike: Strike) -> bool:
        """Wait for the moment and strike; return whether anything was hit."""
        job, moment = self._job, strike.at
        if job.wait(lambda: self._is_now(moment), _MOMENT_S) is None:
            job.note(f"not struck: {strike.kind} at {moment.when} {moment.what}")
            return False
        time.sleep(moment.delay_s)
        self._last = job.iteration()
        if moment.when is not When.LINE:
            job.mark()
        said = f"{strike.kind} {' '.join(map(str, strike.targets))} at {moment.when} {moment.what}"
        job.note(said)
        is_hit = self._acts[strike.kind](self, strike)
        if is_hit:
            job.may_end |= strike.may_end
        else:
            job.note("that has hit nothing")
        return is_hit

    def _is_now(self, moment: Moment) -> bool:
        job, seen = self._job, self._job.progress()
        reached = max((each.iteration for each in seen), default=-1)
        match moment.when:
            case When.START:
                return bool(job.ranks()) and all(each.phase is Phase.SETUP for each in seen)
            case When.LINE:
                return re.search(moment.what, job.new_lines()) is not None
            case When.STORING:
                return reached > self._last + 2 and any(
                    not (each / "manifest.json").exists() for each in job.storage.glob("iter_*")
                )
            case When.END:
                return reached >= NUM_ITERATIONS - 2
        wanted = {When.EVALUATION: "between", When.EXIT: "forward"}.get(moment.when, moment.what)
        period = {When.EVALUATION: EVALUATED_EVERY, When.EXIT: EXITS_EVERY}.get(moment.when, 1)
        return any(
            each.phase == wanted
            and each.iteration >= self._last + moment.iterations + (moment.when is When.EVALUATION)
            and (each.iteration + 1) % period == 0
            for each in seen
        )

    def _ranks(self, strike: Strike) -> list[psutil.Process]:
        """Return the processes of the ranks that a strike is at, once all are there; else none."""

        def find() -> list[psutil.Process] | None:
            ranks = self._job.ranks()
            return [ranks[each] for each in strike.targets if each in ranks] or None

        return self._job.wait(find, _TARGET_S) or []

    def _kill_ranks(self, strike: Strike) -> bool:
        found = self._ranks(strike)
        self._job.send(SIGSTOP, found)  # so that none acts on the death of another
        self._job.send(SIGKILL, found)
        return bool(found)

    def _terminate_rank(self, strike: Strike) -> bool:
        found = self._ranks(strike)
        self._job.send(SIGTERM, found)
        return bool(found)

    def _stop_rank(self, strike: Strike) -> bool:
        return self._stop(self._ranks(strike), strike)

    def _stop(self, found: list[psutil.Process], strike: Strike) -> bool:
        self._job.send(SIGSTOP, found)
        self._job.hold(strike.hold_s)
        self._job.send(SIGCONT, found)
        return bool(found)

    def _nodes(self, strike: Strike) -> list[str]:
        """Return the nodes that a strike is at and that run, and note that they are struck."""
        found = []
        for name in (f"n{number}" for number in strike.targets):
            if (node := self._job.nodes[name]).agent.poll() is None:
                node.is_struck = True
                found.append(name)
        return found

    def _kill_zygote(self, strike: Strike) -> bool:
        found = [
            each for name in self._nodes(strike) for each in self._job.named("moe_ft_zygote", name)
        ]
        for name in strike.targets:
            node = self._job.nodes[f"n{name}"]
            if not found and node.zygote is not None and node.zygote.pid is not None:
                found.append(psutil.Process(node.zygote.pid))  # a fork of ours has another name
        self._job.send(SIGKILL, found)
        return bool(found)

    def _kill_agent(self, strike: Strike) -> bool:
        found = self._nodes(strike)
        for name in found:
            self._job.nodes[name].agent.kill()
        return bool(found)

    def _terminate_agent(self, strike: Strike) -> bool:
        found = self._nodes(strike)
        for name in found:
            self._job.nodes[name].agent.terminate()
        return bool(found)

    def _lose_nodes(self, strike: Strike) -> bool:
        found = self._nodes(strike)
        kill_all(self._job.processes(*found) if found else ())
        for name in found:
            for path in self._job.memory_dir.glob(f"*/{name}"):
                shutil.rmtree(path)
        return bool(found)

    def _stop_node(self, strike: Strike) -> bool:
        found = self._nodes(strike)
        return self._stop(self._job.processes(*found) if found else [], strike)

    def _cut_node(self, strike: Strike) -> bool:
        found, networks = self._nodes(strike), self._job.networks
        if networks is None:
            return False
        for name in found:
            networks.cut(name)
        self._job.hold(strike.hold_s)
        for name in found:
            networks.restore(name)
        return bool(found)

    def _return_node(self, strike: Strike) -> bool:
        """Start nodes again that have ended."""
        gone = [f"n{each}" for each in strike.targets]
        gone = [each for each in gone if self._job.nodes[each].agent.poll() is not None]
        for name in gone:
            self._job.start_node(name)
        return bool(gone)

    def _fill(self, strike: Strike) -> bool:
        filler = self._job.storage / "filler"
        if not self._job.storage.is_mount():
            return False
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        self._job.hold(strike.hold_s)
        filler.unlink()
        return True

    def _freeze(self, strike: Strike) -> bool:
        if not self._job.storage.is_mount():
            return False
        _run("fsfreeze", "--freeze", self._job.storage)
        self._job.hold(strike.hold_s)
        return _run("fsfreeze", "--unfreeze", self._job.storage)

    def _read_only(self, strike: Strike) -> bool:
        """Mount storage read-only, which is possible while no file is open for writing."""
        if not self._job.storage.is_mount():
            return False
        words = ("mount", "-o", "remount,ro", self._job.storage)
        is_hit = self._job.wait(lambda: _run(*words, check=False), _TARGET_S)
        self._job.hold(strike.hold_s if is_hit else 0.0)
        return _run("mount", "-o", "remount,rw", self._job.storage) and bool(is_hit)

    def _memory_file(self, strike: Strike) -> Path | None:
        (rank,) = strike.targets
        found = [
            each for each in self._job.memory_dir.glob(f"*/*/rank_{rank:05d}/*") if each.is_file()
        ]
        return self._random.choice(sorted(found)) if found else None

    def _truncate(self, strike: Strike) -> bool:
        if (path := self._memory_file(strike)) is None:
            return False
        self._job.note(f"cut {path.name}")
        os.truncate(path, self._random.randrange(path.stat().st_size + 1))
        return True

    def _flip(self, strike: Strike) -> bool:
        """Change a byte in the memory of a rank while it stands still, and kill it."""
        ranks = self._ranks(strike)
        self._job.send(SIGSTOP, ranks)
        path = self._memory_file(strike)
        if path is not None and (size := path.stat().st_size):
            place = self._random.randrange(size)
            self._job.note(f"flip byte {place} of {path.name}")
            with path.open("r+b") as file:  # in place: others may have it mapped
                file.seek(place)
                (byte,) = file.read(1)
                file.seek(place)
                file.write(bytes([byte ^ 1 << self._random.randrange(8)]))
        self._job.send(SIGKILL, ranks)
        return bool(ranks) and path is not None

    _acts: dict[Kind, Callable[["Striker", Strike], bool]] = {
        Kind.KILL_RANKS: _kill_ranks,
        Kind.TERMINATE_RANK: _terminate_rank,
        Kind.STOP_RANK: _stop_rank,
        Kind.KILL_ZYGOTE: _kill_zygote,
        Kind.KILL_AGENT: _kill_agent,
        Kind.TERMINATE_AGENT: _terminate_agent,
        Kind.LOSE_NODES: _lose_nodes,
        Kind.STOP_NODE: _stop_node,
        Kind.CUT_NODE: _cut_node,
        Kind.RETURN_NODE: _return_node,
        Kind.FILL: _fill,
        Kind.FREEZE: _freeze,
        Kind.READ_ONLY: _read_only,
        Kind.TRUNCATE: _truncate,
        Kind.FLIP: _flip,
    }
