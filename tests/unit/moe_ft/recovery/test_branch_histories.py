"""Random lives of a run: starts, crashes, nodes that are lost, cut off and come back, damaged checkpoints.

A world keeps its own account of which start knew of which, by the objects themselves. At every start it says
which state must win, and at every checkpoint what may be deleted; planning, inventory and retention are real,
and so are the checkpoints on storage.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moe_ft.engine.persist.manifests import manifests
from moe_ft.engine.persist.retention import Retention
from moe_ft.errors import CorruptStateError
from moe_ft.files.storage import Storage, file_tag
from moe_ft.format.identity import Identity, Start
from moe_ft.planning.branches import continue_history, names_to_supersede, number_of_next
from moe_ft.planning.recovery import Plan, Version, plan_recovery
from moe_ft.recovery.inventory import look_at_storage
from tests.unit.moe_ft.builders import make_identity, persist_checkpoint

NUM_RANKS = 2
NODES = ("a", "b", "c", "d")
KEEP = 2


@dataclass(eq=False)
class Life:
    """One start: what it wrote under which name, and what it knew when it began."""

    identity: Identity
    continues: "State | None"
    knew: set["Life"]

    def __str__(self) -> str:
        return str(self.identity.history)


@dataclass(frozen=True)
class State:
    """The state of all ranks at an iteration, as one start made it."""

    life: Life
    iteration: int

    def belongs_to(self, life: Life) -> bool:
        """Return whether a run that has come to a start still has this state in its past."""
        if self.life is life:
            return True
        past = life.continues
        while past is not None:
            if past.life is self.life:
                return self.iteration <= past.iteration
            past = past.life.continues
        return False


@dataclass
class World:
    """Nodes, storage and the lives so far."""

    root: Path
    chance: random.Random
    lives: list[Life] = field(default_factory=list)
    # By node and rank, whose replica it may be: what its memory holds.
    memory: dict[str, dict[tuple[int, bool], list[State]]] = field(default_factory=dict)
    # Of checkpoints; what is cut short shows without reading all of it.
    damaged: set[State] = field(default_factory=set)
    cut: set[State] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.storage = Storage(str(self.root))
        self.memory = {node: {} for node in NODES}

    def start(self, node_of: tuple[str, ...]) -> None:
        """Start on some nodes: recover what must be recovered, train, crash."""
        versions = [*self._in_memory(set(node_of)), *look_at_storage(self.storage).versions]
        visible = self._states_of(versions)
        in_memory, on_storage = self._complete(set(node_of))
        damaged = self.damaged - in_memory
        plan = self._first_intact(plan_recovery(versions, node_of)[0], damaged)
        winner = None if plan is None else self._state_of(plan.version)
        self._check_winner(winner, (in_memory | on_storage) - damaged)
        life = self._begin(plan, winner, versions, visible)
        self._train(life, node_of)

    def _begin(
        self,
        plan: Plan | None,
        winner: State | None,
        versions: list[Version],
        visible: set[State],
    ) -> Life:
        knew = {state.life for state in visible}
        for life in list(knew):
            knew |= life.knew
        found = {start for version in versions for start in version.history}
        remembered = [name for version in versions for name in version.superseded]
        names = [*remembered, *(start.name for start in sorted(found))]
        start = Start(
            number=number_of_next(found),
            resumed_at=plan.iteration if plan else 0,
            name=f"{len(self.lives):04x}",
        )
        history = continue_history(plan.history if plan else (), start)
        lineage = plan.lineage if plan else f"run-{len(self.lives)}"
        identity = Identity(
            job_id="job",
            lineage=lineage,
            history=history,
            superseded=names_to_supersede(names, history),
            fingerprint=make_identity().fingerprint,
            world_size=NUM_RANKS,
            strategy="dense",
        )
        life = Life(identity=identity, continues=winner, knew=knew)
        self.lives.append(life)
        return life

    def _train(self, life: Life, node_of: tuple[str, ...]) -> None:
        first = life.identity.start.resumed_at + 1
        for iteration in range(first, first + self.chance.randint(0, 9)):
            for rank, node in enumerate(node_of):
                self._keep_in_memory(node, rank, State(life, iteration), is_replica=False)
                other = node_of[1 - rank]
                if other != node:
                    self._keep_in_memory(other, rank, State(life, iteration), is_replica=True)
            if iteration % 3 == 0:
                self._persist(State(life, iteration))
        # The crash comes while only some ranks have committed the next one.
        last = State(life, first + 10)
        if self.chance.random() < 0.5:
            self._keep_in_memory(node_of[0], 0, last, is_replica=False)

    def _keep_in_memory(self, node: str, rank: int, state: State, *, is_replica: bool) -> None:
        held = self.memory[node].setdefault((rank, is_replica), [])
        held.append(state)
        del held[:-2]

    def _persist(self, state: State) -> None:
        if self.chance.random() < 0.2:
            return
        before = self._on_storage()
        manifest = persist_checkpoint(self.storage, state.iteration, state.life.identity)
        Retention(self.storage, KEEP).retain(manifest)
        self._check_deleted({*before, state} - self._on_storage(), {*before, state}, state)

    def _check_winner(self, winner: State | None, usable: set[State]) -> None:
        """Check that the winner is the state that got furthest of starts that nobody knew of."""
        lives = {state.life for state in usable}
        latest = {life for life in lives if not any(life in other.knew for other in lives)}
        best = max((each.iteration for each in usable if each.life in latest), default=None)
        if best is None:
            assert winner is None
            return
        assert winner is not None
        assert winner in usable
        assert winner.life in latest
        assert winner.iteration == best

    def _check_deleted(self, gone: set[State], before: set[State], newest: State) -> None:
        """Check that only old states are deleted, or ones that a later start knew of and left."""
        usable = {
            each
            for each in before
            if each.belongs_to(newest.life) and each.iteration <= newest.iteration
        }
        kept = sorted(usable - self.cut, key=lambda each: -each.iteration)[:KEEP]
        assert not gone & set(kept)
        same_place = {each for each in gone if each.iteration == newest.iteration}
        for state in gone - same_place:
            assert len(kept) == KEEP
            assert state.iteration < newest.iteration
            assert state.life is newest.life or state.life in newest.life.knew
            assert state.life.identity.lineage == newest.life.identity.lineage

    def damage(self) -> None:
        """Cut the data of a checkpoint short, or flip a byte of it."""
        on_storage = sorted(self._on_storage(), key=lambda each: each.iteration)
        if on_storage:
            state = self.chance.choice(on_storage)
            tag = file_tag(state.life.identity)
            data = self.root / f"iter_{state.iteration:07d}/rank_00000_{tag}.safetensors"
            content = bytearray(data.read_bytes())
            content[-1] ^= 0x40
            if self.chance.random() < 0.5:
                del content[500:]
                self.cut.add(state)
            data.write_bytes(content)
            self.damaged.add(state)

    def lose(self, node: str) -> None:
        """Empty a node's memory."""
        self.memory[node] = {}

    def _on_storage(self) -> set[State]:
        by_start = {life.identity.start: life for life in self.lives}
        return {
            State(by_start[manifest.identity.start], iteration)
            for iteration, _, manifest in manifests(self.storage)
            if not isinstance(manifest, CorruptStateError)
        }

    def _in_memory(self, nodes: set[str]) -> Iterator[Version]:
        for node in sorted(nodes):
            for (rank, is_replica), held in self.memory[node].items():
                for state in held:
                    identity = state.life.identity
                    yield Version(
                        rank=rank,
                        iteration=state.iteration,
                        lineage=identity.lineage,
                        history=identity.history,
                        superseded=identity.superseded,
                        node=node,
                        path=f"{node}/{rank}/{is_replica}/{state.iteration}/{identity.start.name}",
                        is_replica=is_replica,
                    )

    def _state_of(self, version: Version) -> State:
        (life,) = [life for life in self.lives if life.identity.start == version.start]
        return State(life, version.iteration)

    def _states_of(self, versions: list[Version]) -> set[State]:
        return {self._state_of(version) for version in versions}

    def _complete(self, nodes: set[str]) -> tuple[set[State], set[State]]:
        """Return the states that all ranks have in the memory of some nodes, and those on storage."""
        in_memory = []
        for rank in range(NUM_RANKS):
            held = [
                self.memory[node].get((rank, is_replica), [])
                for node in nodes
                for is_replica in (False, True)
            ]
            in_memory.append({state for states in held for state in states})
        return set.intersection(*in_memory), self._on_storage()

    def _first_intact(self, plans: list[Plan], damaged: set[State]) -> Plan | None:
        """Do what a recovery does: take the next plan if the data of one is damaged."""
        intact = (plan for plan in plans if self._state_of(plan.version) not in damaged)
        return next(intact, None)


@pytest.mark.parametrize("seed", range(60))
def test_random_life_of_a_run_continues_from_the_newest_usable_work_and_keeps_what_it_needs(
    seed: int,
) -> None:
    root = Path(tempfile.mkdtemp(prefix="moe_ft_test_", dir="/dev/shm"))
    chance = random.Random(seed)
    world = World(root, chance)
    try:
        for _ in range(8):
            world.start((chance.choice(NODES), chance.choice(NODES)))
            if chance.random() < 0.4:
                world.lose(chance.choice(NODES))
            if chance.random() < 0.3:
                world.damage()
    finally:
        shutil.rmtree(root)
