"""Lines have a time, a speaker and a level, in the format of the user's choice, and end no run."""

import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime

import pytest

from moe_ft import saying
from moe_ft.cluster.forked_rank import become
from moe_ft.saying import choose_format, fail, say, silence_dependencies, speak_for, warn

TIME = r"2026-01-02 03:04:05"
AT_S = datetime.strptime(TIME, "%Y-%m-%d %H:%M:%S").timestamp()  # noqa: DTZ007  # local, as lines are


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin without a speaker, at a fixed time, and leave nothing set."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("time.time_ns", lambda: int(AT_S * 1e9))
    monkeypatch.setattr("time.time", lambda: AT_S)
    yield
    choose_format("text")
    speak_for("")


@pytest.fixture
def own_handler() -> Iterator[io.StringIO]:
    """Return what a handler of a user's script gets."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(funcName)s: %(message)s"))
    saying.LOGGER.addHandler(handler)
    yield stream
    saying.LOGGER.removeHandler(handler)


class Broken(io.StringIO):
    """A standard error whose reader has gone."""

    def write(self, text: str, /) -> int:
        """Fail."""
        raise BrokenPipeError


class Writes(list[str]):
    """A standard error that notes each write."""

    write = list.append

    def flush(self) -> None:
        """Do nothing."""


def test_line_has_a_time_the_speaker_and_a_level_unless_it_is_info(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say("100 % of it")
    monkeypatch.setenv("RANK", "3")
    say("a fact")
    warn("a\nfailure")
    fail("train.py: error: --lr=x")
    speak_for("host\x1b7")
    say("a fact")
    assert capsys.readouterr().err == (
        f"{TIME} moe_ft: 100 % of it\n"
        f"{TIME} rank 3 moe_ft: a fact\n"
        f"{TIME} rank 3 WARNING moe_ft: a\nfailure\n"
        "train.py: error: --lr=x\n"
        f"{TIME} node host\\x1b7 moe_ft: a fact\n"
    )


def test_each_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", written := Writes())
    say("a fact")
    assert written == [f"{TIME} moe_ft: a fact\n"]


def test_json_has_an_object_on_each_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose_format("json")
    monkeypatch.setenv("RANK", "3")
    warn("two\nlines")
    speak_for("host7")
    fail("an end")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    time = first.pop("time")
    assert datetime.fromisoformat(time).timestamp() == AT_S
    assert first == {"level": "WARNING", "rank": 3, "logger": "moe_ft", "message": "two\nlines"}
    rest = {"level": "ERROR", "node": "host7", "logger": "moe_ft", "message": "an end"}
    assert second == {"time": time, **rest}


def test_forked_rank_speaks_for_itself_and_not_for_the_node(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")  # torchrun's, of the agent
    speak_for("host7")
    say("of the agent")
    pid = os.fork()
    if pid == 0:
        become("rank_5", {"RANK": "5"})
        say("of a rank")
        os._exit(0)
    os.waitpid(pid, 0)
    say("of the agent")
    assert capfd.readouterr().err == (
        f"{TIME} node host7 moe_ft: of the agent\n"
        f"{TIME} rank 5 moe_ft: of a rank\n"
        f"{TIME} node host7 moe_ft: of the agent\n"
    )


@pytest.mark.parametrize("is_closed", [False, True])
def test_standard_error_that_takes_nothing_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, is_closed: bool
) -> None:
    broken = Broken()
    if is_closed:
        broken.close()
    monkeypatch.setattr(sys, "stderr", broken)
    say("a fact")


def test_root_logger_of_a_script_gets_no_second_copy(capsys: pytest.CaptureFixture[str]) -> None:
    root, handler = logging.getLogger(), logging.StreamHandler(sys.stdout)
    root.addHandler(handler)
    try:
        say("a fact")
    finally:
        root.removeHandler(handler)
    out, err = capsys.readouterr()
    assert (out, err.count("a fact")) == ("", 1)


def test_another_loop_has_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    with saying.in_words_of(lambda line: line.replace("--save", "checkpoint.save")):
        say("give --save")
    say("give --save")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["checkpoint.save", "--save"]


def test_handler_of_a_script_gets_every_line_in_the_place_of_standard_error(
    own_handler: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    say("one \x1b[2J")
    warn("two")
    fail("three")
    place = "test_saying.py test_handler_of_a_script_gets_every_line_in_the_place_of_standard_error"
    assert own_handler.getvalue() == (
        f"INFO {place}: one \\x1b[2J\nWARNING {place}: two\nERROR {place}: three\n"
    )
    assert capsys.readouterr().err == ""


def test_level_of_the_logger_hides_what_is_below(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saying.LOGGER, "level", logging.WARNING)
    say("a fact")
    warn("a failure")
    assert capsys.readouterr().err == f"{TIME} WARNING moe_ft: a failure\n"


def test_what_other_libraries_silence_is_not_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron-Bridge hides warnings of all loggers, and `dictConfig` disables all that it finds."""
    monkeypatch.setattr(saying.LOGGER, "filters", [lambda record: False])
    monkeypatch.setattr(saying.LOGGER, "disabled", True)
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    warn("a failure")
    assert capsys.readouterr().err == f"{TIME} WARNING moe_ft: a failure\n"


@pytest.mark.parametrize(
    ("options", "module", "is_shown"),
    [
        ([], "torch.distributed.c10d_logger", False),
        ([], "megatron", False),
        ([], "torchdata.own", True),
        ([], "pretrain_mine", True),
        (["default"], "megatron", True),
    ],
)
def test_warnings_of_dependencies_are_hidden_unless_the_user_chooses_warnings(
    options: list[str], module: str, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "warnoptions", options)
    monkeypatch.delenv("TORCH_LOGS", raising=False)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_dependencies()
        warnings.warn_explicit("a notice", UserWarning, "a.py", 1, module)
    assert len(shown) == is_shown
