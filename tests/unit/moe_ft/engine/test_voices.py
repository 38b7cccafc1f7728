"""A process that speaks for dead ranks agrees on the voices of all of them, or on none."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import pytest

from moe_ft.engine.exchange import INT, encode
from moe_ft.engine.voices import Voice, VoicedAgreement, VoicedStageSum, Voices

LIMIT_S = 20.0


def no_group(ranks: Any) -> NoReturn:
    raise AssertionError("one process needs no group")


@pytest.fixture
def voices() -> Voices:
    """Be rank 1 of three, of which the others are dead."""
    return Voices({0: 1, 1: 1, 2: 1}, 1, no_group, LIMIT_S)


def on_all[Answer](voices: Voices, act: Callable[[VoicedAgreement], Answer]) -> list[Answer]:
    """Return what each rank's agreement answers, ascending."""

    def run(rank: int) -> Answer:
        agreement = VoicedAgreement(LIMIT_S, Voice(voices, rank))
        agreement.start()
        return act(agreement)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(run, voices.ranks))


def test_speaker_of_the_first_rank_leads() -> None:
    voices = Voices({0: 2, 1: 1, 2: 2, 3: 3}, 2, no_group, LIMIT_S)
    assert voices.live == (2, 1, 3)
    assert voices.ranks == (0, 2)


def test_all_ranks_agree_and_none_is_missing(voices: Voices) -> None:
    done: list[int] = []

    def act(agreement: VoicedAgreement) -> tuple[Any, ...]:
        own = agreement._voice.rank
        agreement.begin([own + 1, 9 - own])
        assert agreement.is_under_way
        agreement.once(lambda: done.append(own))
        agreement.barrier()
        return (
            agreement.result(),
            agreement.gather(own, INT),
            agreement.broadcast(own, INT),
            agreement.collect(own, INT),
            agreement.hand_out([*map(encode, [5, 6, 7])] if own == 0 else [], INT),
        )

    everyone = ([1, 7], [0, 1, 2], 0)
    assert on_all(voices, act) == [
        (*everyone, [0, 1, 2], 5),
        (*everyone, None, 6),
        (*everyone, None, 7),
    ]
    assert done == [1], "what is done once is done by the process's own rank"


def test_ranks_of_a_stage_are_those_of_its_processes(voices: Voices) -> None:
    def run(rank: int) -> list[int]:
        stage = VoicedStageSum(LIMIT_S, Voice(voices, rank))
        stage.start([0, 0, 0], rank)
        return stage.gather(rank, INT)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(run, range(3))) == [[0, 1, 2]] * 3


def test_voice_that_leaves_ends_the_wait_of_the_others(voices: Voices) -> None:
    def act(agreement: VoicedAgreement) -> list[Any]:
        if agreement._voice.rank == 2:
            agreement.leave()
            return []
        with pytest.raises(RuntimeError, match=r"speaks for ranks \[0, 1, 2\]"):
            agreement.gather(0, INT)
        return []

    on_all(voices, act)


def test_error_of_the_answer_is_raised_by_all_voices(voices: Voices) -> None:
    def fail(given: dict[int, Any]) -> NoReturn:
        raise ValueError(str(given))

    def act(agreement: VoicedAgreement) -> None:
        with pytest.raises(ValueError, match="{0: 0, 1: 1, 2: 2}"):
            agreement._voice.exchange(agreement._voice.rank, fail)

    on_all(voices, act)
