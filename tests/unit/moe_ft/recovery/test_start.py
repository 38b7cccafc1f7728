"""A whole start on the only rank of a job, in one process; only the model and its optimizer are stand-ins."""

import errno
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import torch

from moe_ft.config.config import ElasticConfig, MoeFtConfig
from moe_ft.engine.memory.job_directory import node_directory
from moe_ft.engine.persist.storage_lock import LOCK_NAME
from moe_ft.errors import ConfigError, StorageAwayError, UnrecoverableError
from moe_ft.faults import Phase
from moe_ft.files.private_files import write_atomically
from moe_ft.files.progress import excused_until_s
from moe_ft.files.storage import Storage
from moe_ft.format.encoding import checksum, encode
from moe_ft.format.identity import Identity, Start
from moe_ft.planning.recovery import Plan
from moe_ft.planning.tiers import MEMORY
from moe_ft.recovery import claim
from moe_ft.recovery import start as phases
from moe_ft.recovery.checkpointing import Checkpointing
from moe_ft.recovery.facts import JobFacts
from moe_ft.recovery.failures import read_attempts
from moe_ft.recovery.inventory import Inventory
from moe_ft.recovery.job_memory import is_alive
from moe_ft.recovery.meet import Met
from moe_ft.recovery.persist_directory import PersistDirectory, Trouble, open_storage
from moe_ft.recovery.readers import FetchedUnit
from moe_ft.recovery.site import Site
from tests.unit.moe_ft.builders import WINDOW_UNITS, make_identity
from tests.unit.moe_ft.recovery.meetings import (
    FINGERPRINT,
    config_of,
    facts_of,
    initialized,
    leave_window,
    met_alone,
)
from tests.unit.moe_ft.recovery.starts import plans_of, start, versions_of

SETTLING_S = 60.0  # threads may take a moment to end


class Rank:
    """The only rank of a job, which starts in a folder.

    Attributes:
        closed: names of what was closed, in order.
        fault: raised while state is put back; None for no fault.
        met: of the last start.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.closed = folder, list[str]()
        self.fault: Exception | None = None
        self.met: Met | None = None

    @property
    def node_dir(self) -> Path:
        """The node's memory directory."""
        return node_directory(str(self.folder / "memory"), "job", "node")

    @property
    def has_storage_lock(self) -> bool:
        """True if the persist directory is locked."""
        return (self.folder / "storage" / LOCK_NAME).exists()

    def meet(
        self, config: MoeFtConfig, facts: JobFacts, built: Any, hook: Any, opened: ExitStack
    ) -> Met:
        """Meet as the phase of this name does; note the order in which the rest is closed."""
        opened.callback(self._note_closed, "groups")
        self.met = met_alone(config, facts, opened, hook)
        opened.callback(self._note_closed, "server")
        return self.met

    def _note_closed(self, name: str) -> None:
        state = "alive" if is_alive(self.node_dir) else "dead"
        self.closed.append(f"{name} while {state}")

    def start(self, config: MoeFtConfig, facts: JobFacts | None = None) -> Checkpointing:
        """Start checkpointing."""
        built: Any = None
        return phases.start(config, facts or facts_of(), built, self._inflict)

    def _inflict(self, phase: Phase, iteration: int) -> None:
        if self.fault is not None:
            raise self.fault

    def masters(self) -> list[torch.Tensor]:
        """Return the live master weights."""
        assert self.met is not None
        return [local.master for local in self.met.live.parameters if local.master is not None]


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    rank = Rank(tmp_path)
    monkeypatch.setattr(phases, "meet", rank.meet)
    with initialized():
        yield rank


def test_start_recovers_what_is_in_memory(rank: Rank) -> None:
    leave_window(config_of(rank.folder))
    running = rank.start(config_of(rank.folder))
    outcome = running.outcome
    running.close()
    assert (outcome.iteration, outcome.start, outcome.writer) == (5, 1, 0)
    assert outcome.sources == {MEMORY: len(WINDOW_UNITS)}
    assert (outcome.problems, outcome.loss, running.take_replay()) == ((), None, None)
    assert set(outcome.phases_s) == {"inventory", "plan", "restore"}
    assert all(master.count_nonzero() for master in rank.masters())


def fetched_units() -> int:
    """Return how many units that were fetched are still held by anything."""
    gc.collect()
    return sum(isinstance(each, FetchedUnit) for each in gc.get_objects())


@pytest.mark.parametrize("length", [1, 3])
def test_start_holds_nothing_that_was_fetched_once_it_is_live(rank: Rank, length: int) -> None:
    before = fetched_units()
    leave_window(config_of(rank.folder), length=length)
    running = rank.start(config_of(rank.folder))
    running.take_replay()
    assert running.plan is not None
    assert fetched_units() == before
    running.close()
    gc.collect()
    mapped = [each.path for each in psutil.Process().memory_maps(grouped=False)]
    assert not [path for path in mapped if path.startswith(str(rank.folder))]


def test_state_that_is_damaged_is_named_among_the_problems_of_a_refusal(rank: Rank) -> None:
    index = leave_window(config_of(rank.folder))
    (data,) = rank.node_dir.rglob("region_*.safetensors")
    with data.open("r+b") as file:
        file.seek(index.header_bytes)
        file.write(bytes(index.file_bytes - index.header_bytes))
    with pytest.raises(UnrecoverableError, match="iteration 5: rank 0 has no intact"):
        rank.start(config_of(rank.folder))


def test_watcher_excuses_an_elastic_start_that_waits_for_nodes(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config_of(rank.folder), elastic=ElasticConfig(elastic=True))
    leave_window(config)
    for data in rank.node_dir.rglob("region_*.safetensors"):
        data.write_bytes(bytes(data.stat().st_size))
    excused_s: list[float] = []

    def sleep(seconds: float) -> None:
        excused_s.append(excused_until_s(threading.get_ident()) - time.monotonic())

    stand_in = SimpleNamespace(
        sleep=sleep, monotonic=time.monotonic, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(phases, "time", stand_in)
    with pytest.raises(UnrecoverableError, match="iteration 5: rank 0 has no intact"):
        rank.start(config)
    assert excused_s[-1] == pytest.approx(phases._WAIT_S, abs=phases._WAIT_S / 2)


def test_state_that_is_intact_and_not_finite_is_refused_with_the_value_named(rank: Rank) -> None:
    index = leave_window(config_of(rank.folder))
    (data,) = rank.node_dir.rglob("region_*.safetensors")
    name, unit = next((name, unit) for name, unit in index.units.items() if unit.num_bytes)
    content = bytearray(data.read_bytes())
    at = unit.offset + unit.tensors[0].offset
    content[at : at + 4] = b"\x00\x00\xc0\x7f"  # NaN, as training may have left it
    data.write_bytes(content)
    there = checksum(bytes(content[unit.offset : unit.offset + unit.num_bytes]))
    units = {**index.units, name: msgspec.structs.replace(unit, checksum=there)}
    index = msgspec.structs.replace(index, units=units)
    write_atomically(data.with_suffix(".json"), encode(index))
    with pytest.raises(UnrecoverableError, match=f"in unit {name} holds NaN or infinity"):
        rank.start(config_of(rank.folder))
    assert not any(master.count_nonzero() for master in rank.masters())


# Failures


def test_refused_start_closes_everything_in_reverse_order_and_gives_storage_up(rank: Rank) -> None:
    before = our_threads()
    with pytest.raises(UnrecoverableError, match="--moe-ft-recover-from=iter_7"):
        rank.start(config_of(rank.folder, "iter_7", persists=True))
    assert rank.closed == ["server while dead", "groups while dead"]
    assert not rank.has_storage_lock
    assert not left_of(our_threads() - before)


def test_start_that_fails_otherwise_leaves_the_lock_of_storage_to_become_stale(rank: Rank) -> None:
    config = config_of(rank.folder, persists=True)
    leave_window(config)
    rank.fault = ValueError("this cannot be put back")
    before = our_threads()
    with pytest.raises(ValueError, match="this cannot be put back"):
        rank.start(config)
    assert rank.closed == ["server while dead", "groups while dead"]
    assert rank.has_storage_lock
    assert not left_of(our_threads() - before)


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_first_start_with_full_storage_may_be_tried_again_later(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "write_atomically", full)
    with pytest.raises(StorageAwayError, match="--moe-ft-persist-dir=.*No space left on device"):
        rank.start(config_of(rank.folder, persists=True))


def test_first_start_gives_the_lock_up_when_storage_is_full_for_another_node(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_there(site: Site) -> PersistDirectory:
        opened = open_storage(site)
        assert rank.has_storage_lock
        return replace(opened, trouble=Trouble(text="full on node b", is_of_flags=False))

    monkeypatch.setattr(claim, "open_storage", open_there)
    with pytest.raises(StorageAwayError, match="full on node b"):
        rank.start(config_of(rank.folder, persists=True))
    assert not rank.has_storage_lock


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(errno.ENOSPC, "full"), StorageAwayError), (PermissionError("no"), ConfigError)],
)
def test_lock_of_an_earlier_start_that_cannot_be_taken_over_is_refused_as_the_error_asks(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, error: OSError, kind: type[Exception]
) -> None:
    def take(*_: object) -> None:
        raise error

    storage = Storage(str(rank.folder))
    monkeypatch.setattr(claim, "open_storage", lambda site: PersistDirectory(storage=storage))
    monkeypatch.setattr(claim, "take_lock", take)
    with pytest.raises(kind, match=re.escape(str(error))) as refused:
        rank.start(config_of(rank.folder, persists=True))
    assert type(refused.value) is kind


def our_threads() -> set[threading.Thread]:
    """Return the threads of moe_ft; those of tests before may take a while to end."""
    return {each for each in threading.enumerate() if each.name.startswith("moe_ft")}


def left_of(threads: set[threading.Thread]) -> list[str]:
    """Return the names of the threads that do not end within a while."""
    for thread in threads:
        thread.join(SETTLING_S)
    return [each.name for each in threads if each.is_alive()]


def attempts_after(rank: Rank, start: Callable[[], Any], error: type[Exception]) -> list[str]:
    """Return the failures that are noted when a start fails."""
    with pytest.raises(error):
        start()
    return [each.failure for each in read_attempts(rank.node_dir)]


def test_failure_to_put_back_is_noted_and_the_second_one_excludes_the_state(rank: Rank) -> None:
    config = config_of(rank.folder)
    leave_window(config)
    rank.fault = ValueError("this cannot be put back")
    noted = attempts_after(rank, lambda: rank.start(config), ValueError)
    assert noted == ["recovery: ValueError: this cannot be put back"]


# State that the flags leave out


def test_state_of_a_run_that_began_with_other_weights_is_refused_unless_it_is_ignored(
    rank: Rank,
) -> None:
    facts = facts_of(began_with="--finetune")
    leave_window(config_of(rank.folder))
    with pytest.raises(ConfigError, match="--moe-ft-recover-from load"):
        rank.start(config_of(rank.folder), facts)
    running = rank.start(config_of(rank.folder, "load"), facts)
    running.close()
    assert (running.plan, running.outcome.iteration) == (None, 0)
    assert running.outcome.problems == ()


def test_state_of_another_model_is_refused_unless_it_is_ignored(rank: Rank) -> None:
    identity = msgspec.structs.replace(make_identity(), fingerprint={"--hidden-size": 128})
    leave_window(config_of(rank.folder), identity=identity)
    with pytest.raises(ConfigError, match="--hidden-size: 128 there, 64 now"):
        rank.start(config_of(rank.folder))
    running = rank.start(config_of(rank.folder, "load"))
    running.close()
    assert running.plan is None


FIRST, LEFT = start(0, 0, "first"), start(4, 9, "left")


def identity_of(
    folder: Path,
    plan: Plan | None = None,
    inventory: Inventory | None = None,
    *,
    is_chosen: bool = False,
) -> Identity:
    """Return the identity of a start that has found something."""
    config = config_of(folder)
    facts = replace(
        facts_of(iteration=3, began_with="--finetune"), replay_settings={"--clip-grad": 1.0}
    )
    with ExitStack() as opened:
        met = met_alone(config, facts, opened)
        return phases.make_identity(met, inventory or Inventory(), plan, is_chosen=is_chosen)


def test_start_that_begins_a_run_names_it(tmp_path: Path) -> None:
    found = identity_of(tmp_path)
    assert found == Identity(
        job_id="job",
        lineage="run-new",
        history=(Start(number=0, resumed_at=3, name="new"),),
        fingerprint=FINGERPRINT,
        world_size=1,
        strategy="dense",
        replay_settings={"--clip-grad": 1.0},
        began_with="--finetune",
    )


def test_start_that_continues_a_run_keeps_its_name_and_what_it_began_with(tmp_path: Path) -> None:
    (plan,), _ = plans_of(versions_of((FIRST,), 7, began_with="--seed-from"))
    found = identity_of(tmp_path, plan, is_chosen=True)
    assert (found.lineage, found.began_with) == ("run-a", "--seed-from")
    assert found.history == (FIRST, Start(number=0, resumed_at=7, name="new", is_chosen=True))


def test_start_counts_on_from_all_that_it_has_found_and_remembers_what_it_leaves(
    tmp_path: Path,
) -> None:
    inventory = Inventory()
    for history in ((FIRST,), (FIRST, LEFT)):
        other = msgspec.structs.replace(make_identity(), history=history)
        inventory.add_identity("somewhere", other)
    (plan,), _ = plans_of(versions_of((FIRST,), 7))
    found = identity_of(tmp_path, plan, inventory)
    assert found.start.number == 5
    assert found.superseded == ("left",)
