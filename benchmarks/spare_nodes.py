"""Seconds from the loss of a node until training continues: with a spare, peers that share, and a restart.

    python -m benchmarks.spare_nodes [--nodes N] [--kinds NAME ...] [--repeats N] [--lost-after SECONDS]
        [--nvrx DIR] [--quick] [--output FILE.md]

Two nodes with two ranks each train the demo model of the tests, and a third one waits; or four with one
rank each, PP 2 x DP 2, and a fifth. Each has a network namespace of its own. Needs root, and `ip` (iproute2).
Kinds:

power     The link of a node is cut, and all its processes are killed: no connection ends. Two others find
          that its kernel does not answer for a second.
killed    All its processes are killed, and their connections end: 2 s of silence are enough then.
rank      One rank of a node is killed, and its own node replaces it: what a repair takes without a verdict.
shared    As `killed`, without a spare: another node also runs its rank, and peers the micro-batches. Of four
          nodes.
restart   As `power`, without a spare that waits: the job ends, and `keep` is started on both nodes again. The
          time is that of a launcher that does so at once.
nvrx      As `power`, in the in-process wrapper of nvidia-resiliency-ext (benchmarks/inprocess.py), from the
          folder --nvrx, with its own intervals. The ranks of the last node are in reserve. A rank is lost
          after --lost-after here too, instead of its own 30 s.

After each loss the node comes back as a spare, or takes its rank back; `restart` and `nvrx` are jobs with
one loss each. Seconds count from the loss to the end of the next iteration on the slowest rank: with a
repair, of the one that was broken off. Phases are of the event "repair": free on the slowest survivor, the
others on the slowest replacement. Notice is the silence before the verdict, as `keep` logs it; of `rank`, the
time until the slowest survivor knows. Survivors leave their iteration (free) while the replacements are
built.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.inprocess import WrappedNodes, find_problem
from benchmarks.jobs import JobFolder, data_folder, job_folder
from benchmarks.output import conditions, markdown_table, read_options, show, spread
from benchmarks.recoveries import OF_SURVIVORS, REPAIR_PHASES, check_not_degraded
from tests.harness import events
from tests.kept_nodes import KeptNodes
from tests.namespaces import Namespaces, why_none
from tests.processes import kill_all
from tests.waiting import wait_for

KINDS = ("rank", "killed", "power", "shared", "restart", "nvrx")
_NUM_RANKS = 4
_LAYOUTS = {2: {"pp": 2, "ep": 2}, 4: {"pp": 2}}  # by number of nodes
_WARM_ITERATIONS = 8  # before the first loss, and between two
_DEADLINE_S = 300.0
_ENDLESS = 100_000  # iterations: the job ends with its last loss
_SHARED = ("--moe-ft-without-spare", "share")
_SILENT = re.compile(r"is lost: silent for ([\d.]+) s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Seconds from one loss.

    Attributes:
        phases_s: by name, of `REPAIR_PHASES`; empty without a repair.
    """

    seconds: float
    phases_s: dict[str, float]


class Watched:
    """A job whose nodes are lost, and what its ranks have logged."""

    def __init__(
        self,
        place: JobFolder,
        networks: Namespaces,
        nodes: KeptNodes | WrappedNodes,
        names: Sequence[str],
    ) -> None:
        self._place, self._networks, self._nodes = place, networks, nodes
        *self._others, self._active, self._spare = names
        per_node = _NUM_RANKS // (len(names) - 1)
        self._lost = list(range(_NUM_RANKS - per_node, _NUM_RANKS))

    def wait_for_iterations(self, since_s: float, number: int) -> float:
        """Wait until each rank has finished some iterations since a time; return that of the last rank."""
        return self._place.wait_for_iterations(_NUM_RANKS, since_s, number)

    def lose(self, *, is_cut: bool) -> float:
        """Lose the node that trains and does not keep the store; return when."""
        lost_s = time.time()
        if is_cut:
            self._networks.cut(self._active)
        self._nodes.kill(self._active)
        return lost_s

    def take_over(self, nodes: KeptNodes, *, is_cut: bool) -> Loss:
        """Lose a node, and have it come back as a spare when another one has taken over."""
        # Agents have this name when they can fork ranks at once.
        agent = nodes.processes(self._spare)[0]
        wait_for(lambda: agent.name() == "moe_ft_node", "the imports of a spare", _DEADLINE_S)
        loss = self._replaced(nodes, is_cut=is_cut)
        self._networks.restore(self._active)
        said = f"node {self._active} is a spare"
        before = nodes.log("node0").count(said)
        nodes.start(self._active, first=1)
        wait_for(lambda: nodes.log("node0").count(said) > before, said, _DEADLINE_S)
        self._active, self._spare = self._spare, self._active
        return loss

    def share(self, nodes: KeptNodes) -> Loss:
        """Lose a node, and have peers run the micro-batches of its rank."""
        return self._replaced(nodes, is_cut=False, shared=self._lost)

    def bring_back(self, nodes: KeptNodes) -> None:
        """Have the lost node take its rank back."""
        back_s = time.time()
        nodes.start(self._active, first=len(self._others))
        self._repaired(back_s, self._lost)

    def replace_rank(self, nodes: KeptNodes) -> Loss:
        """Kill a rank of the node that does not keep the store."""
        pid = self._place.logged(3, "start")[-1]["pid"]
        killed_s = time.time()
        kill_all([each for each in nodes.processes(self._active) if each.pid == pid])
        return self._repaired(killed_s, [3])

    def restart(self, nodes: KeptNodes) -> Loss:
        """Lose a node without a spare; start the others and a new one when the job has ended."""
        nodes.start(*self._others, self._active)
        self.wait_for_iterations(0.0, _WARM_ITERATIONS)
        lost_s = self.lose(is_cut=True)
        assert nodes.wait() == dict.fromkeys(self._others, 1), nodes.log("node0")[-3000:]
        nodes.start(*self._others, self._spare, restart=1)
        return self.until_trained(lost_s)

    def until_trained(self, lost_s: float) -> Loss:
        """Wait for the iteration after a loss, and return its seconds."""
        # An iteration that ended just before the loss may be logged after it.
        return Loss(seconds=self.wait_for_iterations(lost_s + 0.5, 1) - lost_s, phases_s={})

    def _replaced(self, nodes: KeptNodes, *, is_cut: bool, shared: Sequence[int] = ()) -> Loss:
        """Lose the node that trains, whose ranks another one runs then."""
        loss = self._repaired(self.lose(is_cut=is_cut), self._lost, shared)
        silent_s = float(_SILENT.findall(nodes.log("node0"))[-1])
        # Of a replacement, `build` begins when its node was heard last.
        loss.phases_s.update(notice=silent_s, build=loss.phases_s["build"] - silent_s)
        return loss

    def _repaired(self, lost_s: float, dead: Sequence[int], shared: Sequence[int] = ()) -> Loss:
        """Return what the first repair after a time has taken."""

        def found() -> list[dict[str, Any]]:
            later = [
                [each for each in self._place.logged(rank, "repair") if each["time"] > lost_s]
                for rank in range(_NUM_RANKS)
            ]
            return [each[0] for each in later] if all(later) else []

        repairs = wait_for(found, "the repair", _DEADLINE_S, poll_s=0.5)
        for each in repairs:
            assert each["dead_ranks"] == list(dead), repairs
            assert each["shared"] == list(shared), repairs
        phases_s = {
            name: max(
                each["phases_s"].get(name, 0.0)
                for rank, each in enumerate(repairs)
                if (rank in dead) is (name not in OF_SURVIVORS)
            )
            for name in REPAIR_PHASES
        }
        return Loss(seconds=max(each["time"] for each in repairs) - lost_s, phases_s=phases_s)


def run(kind: str, data: Sequence[str], folder: Path, options: argparse.Namespace) -> list[Loss]:
    """Run jobs of a kind, and return what each loss has taken.

    Raises:
        AssertionError: if a loss is not answered as it should be.
    """
    found: list[Loss] = []
    names = [f"node{number}" for number in range(options.nodes + 1)]
    per_node, lost_after_s = _NUM_RANKS // options.nodes, options.lost_after
    is_one_job = kind not in ("restart", "nvrx")
    for _ in range(1 if is_one_job else options.repeats):
        with job_folder(folder) as place, Namespaces(*names) as networks:
            # Log lines of experts need collectives between iterations: a death in one ends the job.
            endless = {"train_iters": _ENDLESS, "log_interval": _ENDLESS}
            dense = ("--moe-ft-strategy", "dense")
            flags = place.words(data, _LAYOUTS[options.nodes], dense, endless)
            if kind == "nvrx":
                with WrappedNodes(
                    flags,
                    networks,
                    names,
                    ranks_per_node=per_node,
                    lost_after_s=lost_after_s,
                    nvrx=options.nvrx,
                    log_path=place.log / "output",
                ) as wrapped:
                    watched = Watched(place, networks, wrapped, names)
                    watched.wait_for_iterations(0.0, _WARM_ITERATIONS)
                    found.append(watched.until_trained(watched.lose(is_cut=True)))
            else:
                flags += ["--moe-ft-repair", "auto", *(_SHARED if kind == "shared" else ())]
                with KeptNodes(
                    place.log,
                    ["pretrain_gpt_moe.py", *flags],
                    num_nodes=options.nodes,
                    ranks_per_node=per_node,
                    lost_after_s=lost_after_s,
                    networks=networks,
                    imports=True,
                ) as nodes:
                    watched = Watched(place, networks, nodes, names)
                    if is_one_job:
                        nodes.start(*(names[:-1] if kind == "shared" else names))
                        found += _repair(kind, options.repeats, watched, nodes)
                    else:
                        found.append(watched.restart(nodes))
            check_not_degraded([events(place.events, rank) for rank in range(_NUM_RANKS)])
    return found


def _repair(kind: str, repeats: int, watched: Watched, nodes: KeptNodes) -> Iterator[Loss]:
    since_s = 0.0
    for number in range(repeats):
        if number and kind == "shared":
            watched.bring_back(nodes)
        watched.wait_for_iterations(since_s, _WARM_ITERATIONS)
        if kind == "rank":
            yield watched.replace_rank(nodes)
        elif kind == "shared":
            yield watched.share(nodes)
        else:
            yield watched.take_over(nodes, is_cut=kind == "power")
        since_s = time.time()


def rows(found: dict[str, list[Loss]]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kind."""
    for kind, losses in found.items():
        phases = [
            f"{median(each.phases_s[name] for each in losses):.2f}" if losses[0].phases_s else "-"
            for name in REPAIR_PHASES
        ]
        yield kind, spread([each.seconds for each in losses], ".2f"), *phases


def main() -> None:
    """Lose nodes, and print the table."""
    options = read_options(
        nodes=(2, 2, "that train: 2 or 4"),
        kinds=(list(KINDS), ["killed"]),
        repeats=(5, 1, "losses of a kind"),
        lost_after=(10, 10, "seconds"),
        nvrx=(Path("runs/nvrx"),),
    )
    parts = [conditions(f"Median (range) of {options.repeats}; --lost-after {options.lost_after}.")]
    if reason := why_none():
        show([*parts, markdown_table([(f"not run: {reason}",)], ("kind",))], options.output)
        return
    if "nvrx" in options.kinds and (problem := find_problem(options.nvrx)):
        options.kinds.remove("nvrx")
        parts.append(f"nvrx: not run: {problem}")
    if "shared" in options.kinds and options.nodes != _NUM_RANKS:
        options.kinds.remove("shared")
        parts.append(f"shared: not run: give --nodes {_NUM_RANKS}; of two nodes each has a stage.")
    found = {}
    with data_folder() as (folder, data):
        for kind in options.kinds:
            print(kind, file=sys.stderr, flush=True)
            found[kind] = run(kind, data, folder, options)
    headers = ("kind", "to the next iteration, s", *(f"{name}, s" for name in REPAIR_PHASES))
    parts += ["Seconds from the loss", markdown_table(rows(found), headers)]
    show(parts, options.output)


if __name__ == "__main__":
    main()
