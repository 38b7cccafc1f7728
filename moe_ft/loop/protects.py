"""Report of a start on the protection of its run: one block of lines, and the event "protects".

The facts are gathered here, once memory is planned and before the first iteration; planning/protection.py
turns them into words.
"""

import os
from collections.abc import Mapping, Sequence
from typing import override

from moe_ft.cluster.assignment import Assignment
from moe_ft.cluster.member import own_assignment
from moe_ft.config.config import MoeFtConfig
from moe_ft.config.fields import flag_of
from moe_ft.events import EventLog
from moe_ft.loop.checkpoints import Checkpoints, met_of
from moe_ft.loop.listeners import LoopListener, LoopState
from moe_ft.loop.training_loop import TrainingLoop
from moe_ft.planning.host_memory import regions_at_peers
from moe_ft.planning.placement import find_survival, survival_of
from moe_ft.planning.protection import Launcher, Protection, Starter, block_of
from moe_ft.recovery.job_memory import reserved_bytes
from moe_ft.recovery.meet import Met
from moe_ft.saying import say, warn
from moe_ft.strategies.registry import chosen


class Protects(LoopListener):
    """Says on rank 0, once in a start of all ranks, what protects the run. Owned by the training thread."""

    def __init__(
        self,
        config: MoeFtConfig,
        training: TrainingLoop,
        loop: LoopState,
        event_log: EventLog,
        checkpoints: Checkpoints,
        warnings: Sequence[str] = (),
        *,
        on_sigterm: bool,
    ) -> None:
        """Say nothing yet.

        Args:
            warnings: printed above the block.
            on_sigterm: whether moe_ft answers SIGTERM.
        """
        self._config = config
        self._training = training
        self._loop = loop
        self._log = event_log
        self._checkpoints = checkpoints
        self._warnings = warnings
        self._on_sigterm = on_sigterm
        self._has_said = event_log.rank != 0

    @override
    def after_recovery(self) -> None:
        assignment = own_assignment()
        if self._has_said or (assignment is not None and assignment.is_replacement):
            return
        self._has_said = True  # a repair comes here again
        for line in self._warnings:
            warn(line)
        if not self._config.strategy.is_on:
            say(f"off: {flag_of('strategy')} is none: nothing is checkpointed")
        if (met := met_of(self._checkpoints)) is None:
            return
        found = self._protection(met, starter_of(self._config, self._loop, assignment, os.environ))
        for each in block_of(found):
            (warn if each.is_warning else say)(each.text)
        self._log.write("protects", self._loop.iteration, **found.fields())

    def _protection(self, met: Met, starter: Starter) -> Protection:
        config, topology = self._config, met.site.topology
        strategy, storage, kind = config.strategy, config.storage, chosen(config)
        copies = min(map(len, met.peers))
        survival = find_survival(topology, met.peers, regions_at_peers(config.memory, copies))
        if met.groups:
            copies, survival = 0, survival_of(topology, met.groups)
        return Protection(
            strategy=strategy.strategy,
            contents=kind.contents(config),
            is_exact=kind.is_exact and not config.precision.lossy_parts,
            interval=strategy.interval_iterations,
            window=kind.longest_window(config),
            memory_dir=config.memory.memory_dir,
            node_bytes=max(reserved_bytes(met.site, met.peers, met.groups).values()),
            num_nodes=len(topology.nodes),
            copies=copies,
            parity_nodes=max((len(each.ranks) for each in met.groups), default=0),
            survival=survival,
            storage=storage.persist_dir or "",
            persist_interval=storage.persist_interval,
            dense_interval=storage.persist_dense_interval,
            breakpoints=config.memory.breakpoints,
            exit_signal=self._training.exit_signal(),
            answers_sigterm=self._on_sigterm,
            other_states=self._training.own_states(),
            event_log=config.observability.event_log or "",
            starter=starter,
        )


def starter_of(
    config: MoeFtConfig,
    loop: LoopState,
    assignment: Assignment | None,
    environment: Mapping[str, str],
) -> Starter:
    """Return what has started this rank, and what it does about failures.

    Args:
        assignment: of this process by an agent; None without one.
    """
    if assignment is not None:
        return Starter(
            launcher=Launcher.AGENT,
            max_restarts=assignment.max_restarts,
            without_spare=loop.without_spare,
            no_repair=loop.no_repair,
            is_watched=assignment.is_watched,
            shrinks=assignment.fewest_nodes > 0,
            store=assignment.store,
        )
    most = environment.get("TORCHELASTIC_MAX_RESTARTS", "")
    if not most.isdecimal():
        return Starter(no_repair=loop.no_repair)
    done = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    return Starter(
        launcher=Launcher.TORCHRUN,
        max_restarts=max(0, int(most) - (int(done) if done.isdecimal() else 0)),
        no_repair=loop.no_repair,
        shrinks=config.elastic.elastic,
    )
