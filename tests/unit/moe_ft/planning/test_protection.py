"""The block that a start prints: each fact of a job is in its words, and none that is not so."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from moe_ft.config.lost_nodes import ANSWERS
from moe_ft.planning.placement import Survival
from moe_ft.planning.protection import Launcher, Protection, Starter, block_of

JOB = Protection(
    strategy="dense",
    contents="the whole state",
    is_exact=True,
    interval=1,
    window=1,
    memory_dir="/dev/shm/moe_ft_0",
    node_bytes=3 << 30,
    num_nodes=2,
    copies=1,
    survival=Survival(num_nodes=1),
)
ALONE: dict[str, Any] = {"num_nodes": 1, "copies": 0, "survival": Survival(num_nodes=0)}
STORED: dict[str, Any] = {"storage": "s3://b/run", "persist_interval": 10}
AGENTS = Starter(launcher=Launcher.AGENT, max_restarts=3, is_watched=True)
REPAIRED = replace(AGENTS, without_spare="crowd")
ONE_AGENT = Starter(launcher=Launcher.AGENT, max_restarts=3, without_spare="end")
TORCHRUN = Starter(launcher=Launcher.TORCHRUN, max_restarts=1)
LOSS = "on no other node ({}): the loss of a node loses {}"
ONE, NO_COPIES = "there is no other", "--moe-ft-replication-factor 0"
AGAIN = "up to {} and the interrupted one run again"
NEXT = "the next start on these nodes continues from memory"
REPLACED = "is replaced in place, from memory; not before the first iteration or in a save: then"
WITH_IT = "the job ends with it; at the next start "
UNLESS = "the job ends, unless what has started the ranks starts them again"
COPIES = "its state comes from the copies on other nodes"
STORE = "; the loss of node {}, which keeps the job's store, ends the job"
MORE = "torchrun starts all ranks again (at most 1 more time)"
LEFT = "all ranks start again on the nodes that are left"
SAVES = "{} finishes the iteration, and brings its state to storage"
KILLS = "SIGTERM ends the ranks at once; the next start continues from memory on these nodes"
ENDS = "the job ends (--max-restarts 0)"
STARTS = "all ranks start again (at most 3 times in a row without a finished iteration)"


def protection_of(**given: Any) -> Protection:
    """Return the protection of a job on two nodes, with a copy on the other one."""
    return replace(JOB, **given)


def rows(**given: Any) -> dict[str, str]:
    """Return the block of a job by the names of its rows, with the lines of a row joined by `|`."""
    found, name = dict[str, str](), ""
    for line in block_of(replace(JOB, **given))[1:]:
        name = line.text[:14].strip() or name
        found[name] = "|".join(filter(None, (found.get(name), line.text[14:])))
    return found


def test_block_of_a_repaired_job_on_two_nodes_says_what_is_kept_and_what_each_loss_costs() -> None:
    lines = block_of(
        replace(JOB, **STORED, starter=REPAIRED, exit_signal="SIGUSR1", event_log="runs/a b")
    )
    assert not any(each.is_warning for each in lines)
    assert "\n".join(each.text for each in lines) == (
        "on: --moe-ft-strategy is dense: after every iteration a snapshot of the whole state\n"
        "  memory      3.00 GiB reserved on each of 2 nodes, in /dev/shm/moe_ft_0\n"
        "  copies      each rank's state is on another node, too: memory survives the loss of any one "
        "node\n"
        "  storage     s3://b/run: every 10 snapshots one, and the last state\n"
        "  lost work   up to 1 iteration and the interrupted one run again; from storage about 10\n"
        "  lost rank   is replaced in place, from memory; not before the first iteration or in a save: "
        "then\n"
        f"              {STARTS}\n"
        "  lost node   a spare takes over in place; without one a node that trains runs its ranks, too, "
        "if it has the memory\n"
        "              its state comes from the copies on other nodes; the loss of node 0, which keeps "
        "the job's store, ends the job\n"
        "  time limit  SIGUSR1 (or SIGTERM to the agent, with --grace above 30) finishes the iteration, "
        "and brings its state to storage\n"
        "              SIGTERM ends the ranks at once; the next start continues from memory on these "
        "nodes, else from storage\n"
        "  event log   runs/a b\n"
        "              python -m moe_ft watch 'runs/a b'"
    )


def test_block_of_a_job_on_one_node_warns_that_nothing_is_left_of_it_without_the_node() -> None:
    lines = block_of(replace(JOB, **ALONE))
    (warning,) = (each.text for each in lines if each.is_warning)
    assert warning == (
        "  copies      on no other node (there is no other): the loss of a node loses all training so far"
    )
    assert rows(**ALONE)["lost node"] == (
        "the job ends with it; at the next start all training so far is lost"
    )


ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("memory", ALONE, "3.00 GiB reserved on this node, in /dev/shm/moe_ft_0"),
    (
        "copies",
        {"copies": 2, "num_nodes": 4, "survival": Survival(num_nodes=2, domain=True)},
        "each rank's state is on 2 other nodes, too: memory survives the loss of any 2 nodes at once, or of "
        "a failure domain",
    ),
    ("copies", ALONE | STORED, LOSS.format(ONE, "what is not on storage")),
    ("copies", {"copies": 0}, LOSS.format(NO_COPIES, "all training so far")),
    ("copies", ALONE | {"other_states": None}, LOSS.format(ONE, "all that moe_ft keeps")),
    ("copies", ALONE | {"other_states": "--save"}, LOSS.format(ONE, "all but --save")),
    ("storage", {}, "none; --moe-ft-persist-dir names one"),
    ("storage", {"storage": "/s"}, "/s: the last state"),
    ("storage", {"storage": "/s", "persist_interval": 1}, "/s: every snapshot, and the last state"),
    (
        "storage",
        {"storage": "/s", "persist_interval": 4, "window": 8, "dense_interval": 100},
        "/s: every 4 windows one, the whole state every 100 iterations, and the last state",
    ),
    ("lost work", {"interval": 5}, AGAIN.format("5 iterations")),
    ("lost work", {"window": 4}, AGAIN.format("7 iterations")),
    (
        "lost work",
        {"interval": None} | STORED,
        "the iterations since the last snapshot and the interrupted one run again",
    ),
    (
        "lost work",
        {"window": 4} | STORED,
        f"{AGAIN.format('7 iterations')}; from storage about 40",
    ),
    (
        "lost work",
        {"dense_interval": 8} | STORED,
        f"{AGAIN.format('1 iteration')}; from storage about 8",
    ),
    (
        "lost work",
        {"is_exact": False},
        f"{AGAIN.format('1 iteration')}; updates of experts are lost, and counted",
    ),
    ("repair", {"starter": replace(AGENTS, no_repair="so")}, "no rank is replaced in place: so"),
    ("lost rank", {"starter": AGENTS}, f"{STARTS}, from memory"),
    ("lost rank", {"starter": TORCHRUN}, f"{MORE}, from memory"),
    ("lost rank", {"starter": replace(TORCHRUN, max_restarts=0)}, f"{ENDS}|{NEXT}"),
    ("lost rank", {}, f"{UNLESS}|{NEXT}"),
    ("lost rank", {"starter": replace(REPAIRED, max_restarts=0)}, f"{REPLACED}|{ENDS}"),
    ("lost node", ALONE | {"starter": ONE_AGENT}, f"{WITH_IT}all training so far is lost"),
    (
        "lost node",
        ALONE | STORED | {"starter": TORCHRUN},
        f"{WITH_IT}all state comes from storage",
    ),
    (
        "lost node",
        ALONE | {"storage": "/s"},
        f"{WITH_IT}all state comes from storage, which has that of the last planned end",
    ),
    ("lost node", {}, f"{UNLESS}; at the next start {COPIES}"),
    ("lost node", {"starter": TORCHRUN}, f"{MORE}, once it has as many nodes|{COPIES}"),
    (
        "lost node",
        {"starter": replace(TORCHRUN, shrinks=True)},
        f"{MORE}, on the nodes that are left|{COPIES}",
    ),
    (
        "lost node",
        {"starter": AGENTS},
        f"all ranks start again with a spare; without one the job ends|{COPIES}{STORE.format(0)}",
    ),
    (
        "lost node",
        {"starter": replace(AGENTS, max_restarts=0)},
        f"{ENDS}; at the next start {COPIES}",
    ),
    (
        "lost node",
        {"starter": replace(AGENTS, max_restarts=0, shrinks=True, store=6)},
        f"{LEFT}|{COPIES}{STORE.format(6)}",
    ),
    (
        "lost node",
        {"starter": replace(REPAIRED, without_spare="shrink")},  # and no --nodes MIN:N
        f"a spare takes over in place; without one the job ends|{COPIES}{STORE.format(0)}",
    ),
    ("time limit", {"exit_signal": "SIGTERM"} | STORED, SAVES.format("SIGTERM")),
    (
        "time limit",
        {},
        f"{KILLS}|to save first: --moe-ft-persist-dir URL --exit-signal-handler --exit-signal SIGUSR1",
    ),
    (
        "time limit",
        {"breakpoints": True, "exit_signal": "SIGUSR2"} | STORED,
        f"{SAVES.format('SIGUSR2')}|SIGTERM has the ranks write their state to memory: if all can, the next "
        "start on these nodes repeats nothing, else from storage",
    ),
    (
        "time limit",
        {"exit_signal": None, "answers_sigterm": False},
        "SIGTERM is left to the training loop",
    ),
    (
        "event log",
        {},
        "none: --moe-ft-event-log DIR writes one, which python -m moe_ft watch DIR shows",
    ),
]


@pytest.mark.parametrize(("row", "given", "text"), ROWS)
def test_row_of_the_block_says_what_is_so_in_a_job(
    row: str, given: dict[str, Any], text: str
) -> None:
    assert rows(**given)[row] == text


def test_block_has_8_to_14_lines_in_every_job() -> None:
    starters = [Starter(), ONE_AGENT, AGENTS, TORCHRUN]
    starters += [replace(AGENTS, without_spare=each) for each in ANSWERS if each != "auto"]
    for kept, starter, signal in itertools.product((ALONE, STORED), starters, ("", "SIGUSR1")):
        job = replace(JOB, **kept, starter=starter, exit_signal=signal, event_log="log")
        assert 8 <= len(block_of(job)) <= 14
        assert {*job.fields()} == {*JOB.fields()}


def test_fields_of_the_event_have_what_the_words_say() -> None:
    fields = replace(JOB, **STORED, starter=REPAIRED).fields()
    assert (fields["lost_rank"], fields["lost_node"]) == ("repair", "repair")
    assert (fields["lost_node_source"], fields["storage_interval"]) == ("copies", 10)
    alone = replace(JOB, **ALONE, starter=replace(TORCHRUN, max_restarts=0)).fields()
    assert (alone["lost_rank"], alone["lost_node"]) == ("end", "end")
    assert (alone["lost_node_source"], alone["storage"]) == ("nothing", None)
