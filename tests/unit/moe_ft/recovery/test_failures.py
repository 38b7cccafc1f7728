"""States from which starts have failed: two that are the same exclude one."""

import errno
from pathlib import Path

import pytest
import torch.distributed as dist
from msgspec.structs import replace

from moe_ft.errors import ConfigError, CorruptStateError, UnrecoverableError
from moe_ft.recovery.failures import (
    Attempt,
    describe,
    failed_locally,
    failed_too_often,
    is_rejected,
    is_timeout,
    note_attempt,
    read_attempts,
    speaks_against_logs,
    speaks_against_state,
)


def attempt(
    by: str, failure: str = "recovery: ValueError: bad", *, iteration: int = 7, start: str = "s"
) -> Attempt:
    return Attempt(start=start, iteration=iteration, failure=failure, by=by)


def test_two_starts_that_failed_in_the_same_way_exclude_the_state() -> None:
    failed = failed_too_often([attempt("a"), attempt("b")])
    assert failed == {("s", 7): "recovery: ValueError: bad"}


@pytest.mark.parametrize(
    "other",
    [
        attempt("a"),
        attempt("b", "recovery: ValueError: worse"),
        attempt("b", iteration=6),
        attempt("b", start="t"),
    ],
    ids=["by the same start", "otherwise", "from another iteration", "from another branch"],
)
def test_two_failures_that_are_not_the_same_exclude_nothing(other: Attempt) -> None:
    assert failed_too_often([attempt("a"), other]) == {}


def test_failure_for_the_logs_excludes_a_local_recovery_at_once_and_never_the_state() -> None:
    found = [replace(attempt(by), is_local=True) for by in ("a", "b")]
    assert failed_locally(found[:1]) == {("s", 7): "recovery: ValueError: bad"}
    assert failed_too_often(found) == {}
    assert failed_locally([attempt("a"), attempt("b")]) == {}


def test_failures_that_the_ranks_of_a_node_have_noted_are_read_together(tmp_path: Path) -> None:
    note_attempt(tmp_path, 0, attempt("a"))
    note_attempt(tmp_path, 1, attempt("a"))
    note_attempt(tmp_path, 0, attempt("b"))
    assert [each.by for each in read_attempts(tmp_path)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    "content", [b"", b"[{", b'[{"surprise": 1}]', b"\xff\xfe", b'[{"start": "\xff"}]']
)
def test_notes_that_cannot_be_read_are_ignored_and_replaced(tmp_path: Path, content: bytes) -> None:
    note_attempt(tmp_path, 1, attempt("a"))
    (tmp_path / "failed_00000.json").write_bytes(content)
    assert [each.by for each in read_attempts(tmp_path)] == ["a"]
    note_attempt(tmp_path, 0, attempt("b"))
    assert [each.by for each in read_attempts(tmp_path)] == ["b", "a"]


def test_failure_is_described_by_its_kind_and_the_first_line_cut_off() -> None:
    assert describe(ValueError("bad\ndetails of this time")) == "ValueError: bad"
    assert describe(ValueError()) == "ValueError: "
    assert len(describe(ValueError("x" * 10_000))) == 200


TIMED_OUT = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms"
MEGATRONS_NAN = RuntimeError(
    "Rank 3, node store-7, device 3, iteration 12: Unexpected result nan "
    "(message='found NaN in local forward loss calculation')"
)
MEGATRONS_INF = RuntimeError("Unexpected result inf (message='found Inf in local grad norm')")


@pytest.mark.parametrize("error", [MEGATRONS_NAN, MEGATRONS_INF])
def test_result_of_megatrons_checks_that_is_rejected_speaks_against_the_state(
    error: Exception,
) -> None:
    assert is_rejected(error)
    assert speaks_against_state(error)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TIMED_OUT, True),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", True),
        ("[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer", False),
    ],
)
def test_wait_that_was_given_up_is_told_from_a_connection_that_has_ended(
    text: str, expected: bool
) -> None:
    assert is_timeout(RuntimeError(text)) is expected


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the shapes do not match"),
        KeyError("layer.0"),
        RuntimeError("the moments cannot be restored"),
        RuntimeError("size mismatch, got input (4) and mat (5)"),
    ],
)
def test_error_of_what_a_start_computes_with_a_state_speaks_against_it(error: Exception) -> None:
    assert speaks_against_state(error)
    assert not is_rejected(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/pytorch/gloo/transport/tcp/pair.cc:538] Connection closed by peer"),
        RuntimeError(TIMED_OUT),
        RuntimeError("NCCL communicator was aborted on rank 1."),
        RuntimeError("[Rank 1] Watchdog caught collective operation timeout: it has timed out"),
        RuntimeError("retrieving an id from the key-value store by store->get('0') failed"),
        dist.DistNetworkError("the server is gone"),
    ],
)
def test_failure_of_communication_says_nothing_of_a_state(error: Exception) -> None:
    assert not speaks_against_state(error)


@pytest.mark.parametrize("error", [ConfigError("bad flag"), UnrecoverableError("nothing there")])
def test_refusal_of_a_start_says_nothing_of_a_state(error: Exception) -> None:
    assert not speaks_against_state(error)


def caused_by(cause: Exception) -> UnrecoverableError:
    """Return the failure to fetch a log."""
    error = UnrecoverableError("the boundary log of rank 0 cannot be fetched")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        CorruptStateError("tensor 3 does not match its checksum"),
        UnrecoverableError("tensor 3 is missing"),
        caused_by(OSError("boundary_1.safetensors is gone")),
    ],
)
def test_replay_that_fails_for_its_logs_speaks_against_them(error: Exception) -> None:
    assert speaks_against_logs(error)
    assert not speaks_against_state(error)


@pytest.mark.parametrize(
    "error",
    [
        caused_by(ConnectionResetError("the other rank has died")),
        caused_by(TimeoutError("not done within 30 s")),
        caused_by(OSError(errno.EHOSTUNREACH, "No route to host")),
        ValueError("bad"),
        OSError("disk"),
    ],
)
def test_replay_that_fails_otherwise_says_nothing_of_its_logs(error: Exception) -> None:
    assert not speaks_against_logs(error)
