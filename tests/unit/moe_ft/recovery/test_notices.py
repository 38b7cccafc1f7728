"""Messages of a start on state that it does not use, and its refusals to begin without it."""

from dataclasses import replace

import msgspec
import pytest

from moe_ft.errors import UnrecoverableError
from moe_ft.planning.recovery import Plan, Rejection, Version
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.inventory import Inventory, Problem
from moe_ft.recovery.notices import Notices
from tests.unit.moe_ft.builders import make_identity
from tests.unit.moe_ft.recovery.starts import plans_of, site, start, versions_of, wish

FIRST = (start(0, 0),)
SECOND = (*FIRST, start(1, 8))
KNOWN = (FIRST[0].name,)


def notices(
    asked: Wish | None = None, *, rank: int = 0, url: str | None = None, on_missing: str = "start"
) -> Notices:
    return Notices(site(rank, on_missing=on_missing), asked or wish(), url)


def inventory(text: str = "", *, is_state: bool = False) -> Inventory:
    found = Inventory()
    if text:
        found.problems.append(Problem(text=text, is_state=is_state))
    return found


def plans(*versions: Version) -> list[Plan]:
    return plans_of(versions)[0]


def refusal(speaker: Notices, found: Inventory, plans: list[Plan], problems: list[str]) -> str:
    with pytest.raises(UnrecoverableError) as refused:
        speaker.check_is_empty(found, plans, problems)
    return str(refused.value)


# Beginning without state


def test_start_that_finds_nothing_begins_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    notices().check_is_empty(inventory(), [], [])
    assert capsys.readouterr().err == ""


def test_start_that_finds_only_what_not_all_ranks_had_says_so_and_begins(
    capsys: pytest.CaptureFixture[str],
) -> None:
    problems = ["iteration 2: no state of rank 1 in any tier"]
    notices().check_is_empty(inventory(), [], problems)
    said = capsys.readouterr().err
    assert "nothing to recover from was found in the memory of job 'job' on nodes a, b" in said
    assert problems[0] in said


def test_start_that_finds_nothing_and_is_to_fail_then_says_where_it_looked_and_the_remedy() -> None:
    speaker = notices(on_missing="fail", url="/persist")
    message = refusal(speaker, inventory(), [], [])
    assert message.startswith("--moe-ft-on-missing=fail: nothing to recover from in the memory")
    assert "nodes a, b and /persist: it is empty" in message
    assert "--moe-ft-on-missing start" in message


def test_start_refuses_to_begin_without_state_that_cannot_be_used_and_names_why() -> None:
    found = inventory("region_0.json is cut off", is_state=True)
    message = refusal(notices(), found, [], ["region_0.json is cut off"])
    assert "none of it can be used: region_0.json is cut off." in message
    assert "add --moe-ft-recover-from load: what is on storage stays" in message


def test_start_refuses_to_begin_where_all_plans_were_given_up() -> None:
    given_up = plans(*versions_of(FIRST, 7))
    assert "two starts failed" in refusal(notices(), inventory(), given_up, ["two starts failed"])


def test_iteration_that_is_not_there_is_refused_with_those_that_are() -> None:
    there = plans(*versions_of(FIRST, 12, 8))
    message = refusal(notices(wish("iter_9")), inventory(), there, ["iteration 9: rank 1 has none"])
    assert message.startswith("--moe-ft-recover-from=iter_9 cannot be used.")
    assert ": 8, 12. Rejected: iteration 9: rank 1 has none. Name one of them, or auto." in message
    assert "add --moe-ft-recover-from load: what is on storage stays" in message


@pytest.mark.parametrize("had_state", [True, False])
def test_state_of_another_strategy_is_refused_only_if_all_ranks_had_one(had_state: bool) -> None:
    found = Inventory()
    identity = msgspec.structs.replace(make_identity(), strategy="sparse")
    found.add_identity("the memory of a", identity)
    if not had_state:
        notices().check_is_empty(found, [], [])
        return
    found.lineages.add(identity.lineage)
    message = refusal(notices(), found, [], [])
    assert "cannot continue from the memory of a, which was written with sparse" in message
    assert "Start with that strategy" in message


# What is said of state that is not used


def rejection(iteration: int, *, of: int = 0) -> Rejection:
    return Rejection(
        iteration=iteration, start=SECOND[of], reason=f"iteration {iteration}: rank 1 lacks it"
    )


def said(
    capsys: pytest.CaptureFixture[str],
    rejected: list[Rejection],
    found: Inventory | None = None,
    *,
    rank: int = 0,
) -> list[str]:
    """Return what a rank that continues from iteration 9 of the second start has printed."""
    (plan,) = plans(*versions_of(SECOND, 9, superseded=KNOWN))
    notices(rank=rank).say_rejected(plan, found or inventory(), rejected)
    return capsys.readouterr().err.splitlines()


def test_state_that_may_be_newer_is_said_with_the_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys, [rejection(10, of=1), rejection(3)])
    assert lines == [
        "WARNING moe_ft: continuing from iteration 9; what may be newer is not used:",
        "WARNING moe_ft:   iteration 10: rank 1 lacks it",
    ]


def test_hindrance_of_a_better_recovery_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (plan,) = plans(*versions_of(FIRST, 7))
    for text in ("iteration 9: stage 1 has no record of iteration 8", ""):
        notices().say_blocked_by(plan, text)
    assert capsys.readouterr().err == (
        "moe_ft: all stages recover, up to iteration 7; iteration 9: stage 1 has no record of iteration 8\n"
    )


def test_load_that_is_preferred_is_said_with_the_state_that_it_is_newer_than(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left = plans(*versions_of(FIRST, 12), *versions_of(SECOND, 9, superseded=KNOWN))
    notices(wish(loaded_iteration=11)).say_load(left, ["iteration 10: rank 1 lacks it"])
    first, second = capsys.readouterr().err.splitlines()
    assert "continuing from --load at iteration 11, as a new run" in first
    assert first.endswith("newer than moe_ft's usable state of iteration 9")
    assert second == "moe_ft:   iteration 10: rank 1 lacks it"


def test_other_ranks_than_the_first_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, [rejection(10)], inventory("damaged", is_state=True), rank=1) == []
    notices(wish(loaded_iteration=11), rank=1).say_load(plans(*versions_of(FIRST, 9)), ["reason"])
    notices(rank=1).check_is_empty(inventory(), [], ["reason"])
    assert capsys.readouterr().err == ""


def test_changed_flags_of_the_script_are_said_once_by_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    notices(rank=1).say_changed(["--corpus"])
    speaker = notices()
    speaker.say_changed([])
    for _ in range(2):
        speaker.say_changed(["--corpus", "--log"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING moe_ft: flags of the training script have changed. If they")
    assert line.endswith("undisturbed one: --corpus, --log")


def test_state_of_another_layout_is_said_to_be_divided_again_with_both_numbers_of_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (own,), _ = plans_of(versions_of((start(0, 0),), 7, window=3))
    versions = versions_of((start(0, 0),), 7, window=3)
    (other,), _ = plans_of([replace(each, layout="other", world_size=1) for each in versions])
    notices().say_divided(own)
    notices(rank=1).say_divided(other)
    assert capsys.readouterr().err == ""
    notices().say_divided(other)
    (line,) = capsys.readouterr().err.splitlines()
    assert "by 1 ranks: it is divided among 2 ranks" in line
    assert "2 iterations run again, equal up to the order of sums" in line
