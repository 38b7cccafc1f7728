"""A peer that follows a rank by its gradients, over a real connection: its replicas are the rank's state."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ft.engine.clock import Clock
from moe_ft.engine.links import peers
from moe_ft.engine.links.messages import PeerReply
from moe_ft.engine.links.peers import PeerReplicator
from moe_ft.engine.updates import adam
from moe_ft.engine.updates.following import find_suspects
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import lossy_packings
from tests.unit.moe_ft.followed import SIZES, Owner
from tests.unit.moe_ft.peer import TOKEN, Peer, no_fault

EXPERT = "layer.0.expert.1"


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def owner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Owner]:
    with closing(Owner(tmp_path, request.param)) as owner:
        yield owner


def follow(owner: Owner, num_iterations: int = 3) -> None:
    """Run iterations until the peer follows by gradients."""
    for _ in range(num_iterations):
        owner.train()
        owner.save()
    *_, last = [each for each in owner.reports.drain() if each.event == "replicate"]
    assert last.fields["fallbacks"] == {}


def test_every_replica_that_follows_by_gradients_is_the_state_of_the_rank(owner: Owner) -> None:
    num_bytes = sum(SIZES.values()) * owner.dtype.itemsize
    for iteration in range(1, 101):
        owner.train(steps=iteration % 7 != 0)
        owner.save()
        sent = owner.sent()
        owner.check_replica()
        expected = (num_bytes if iteration % 7 else 0) if iteration > 1 else 0
        assert (sent["gradient_bytes"], sent["state_bytes"] == 0) == (expected, iteration > 1)


def test_replica_of_fused_adam_has_checksums_of_its_own_and_gets_state_after_a_hundred_steps(
    tmp_path: Path,
) -> None:
    with closing(Owner(tmp_path, fused=True)) as owner:
        for iteration in range(1, 104):
            owner.train(steps=iteration % 7 != 0)
            owner.save()
            sent = owner.sent()
            is_whole = iteration in (1, 102)
            assert (sent["state_bytes"] > 0) == is_whole
            if iteration == 102:
                assert sent["fallbacks"]["7"] == "it has repeated 100 steps that round otherwise"
            kept = owner.peer.indexes()[iteration]
            units, content = kept.units, owner.peer.committed()[iteration]
            # One whose bits come out as the rank's begins again.
            assert max(each.num_repeated or 0 for each in units.values()) <= (iteration - 1) % 101
            for unit in units.values():
                assert checksum(content[unit.offset :][: unit.num_bytes]) == unit.checksum
            if iteration == 101:
                assert {*lossy_packings(units.values())} == {"param", "exp_avg", "exp_avg_sq"}
                with pytest.raises(AssertionError):
                    owner.check_replica()  # the bits of the rank


def test_gradients_of_fused_adam_that_arrive_as_others_make_no_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Owner(tmp_path, fused=True)) as owner:
        follow(owner)
        monkeypatch.setattr(peers, "checksum", lambda content: "0" * 16)
        owner.train()
        owner.save()
        (lost,) = [each for each in owner.reports.drain() if each.event == "degraded"]
        assert "gradients" in lost.fields["reason"]
        assert owner.iteration not in owner.peer.committed()


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str)
def turning(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Owner]:
    """Yield an owner with an expert in slots, which is followed now."""
    with closing(Owner(tmp_path, request.param, rotating=EXPERT)) as owner:
        owner.train()
        owner.save()
        owner.reports.drain()
        owner.followed = owner.rotating
        yield owner


def test_expert_that_is_followed_is_the_state_of_the_rank_in_every_iteration(
    turning: Owner,
) -> None:
    num_bytes = sum(SIZES.values()) * turning.dtype.itemsize
    for iteration in range(2, 260):
        is_step = iteration % 7 != 0
        turning.train(steps=is_step)
        turning.save()
        sent = turning.sent()
        turning.check_replica()
        assert sent["fallbacks"] == {}
        assert (sent["gradient_bytes"], sent["state_bytes"]) == (num_bytes * is_step, 0)
        assert sent["followed"] == 1


def test_expert_that_is_not_followed_is_sent_as_state_besides_gradients(turning: Owner) -> None:
    turning.followed = frozenset()
    turning.train()
    turning.save()
    sent = turning.sent()
    turning.check_replica()
    expert = SIZES[EXPERT]
    num_bytes = (sum(SIZES.values()) - expert) * turning.dtype.itemsize
    assert (sent["gradient_bytes"], sent["followed"], sent["fallbacks"]) == (num_bytes, 0, {})
    assert sent["state_bytes"] >= 12 * expert


@pytest.mark.parametrize("is_damaged", [False, True])
def test_expert_whose_base_the_peer_lacks_is_sent_as_state_with_everything_and_then_followed(
    turning: Owner, is_damaged: bool
) -> None:
    follow(turning)
    if is_damaged:
        directory = turning.peer.regions[0].directory
        (path,) = directory.glob("pool_*.safetensors")
        num_bytes = path.stat().st_size
        with path.open("r+b") as file:  # it stays mapped
            file.write(bytes(num_bytes))
    else:
        turning.faults = {turning.iteration + 1}
        turning.train()
        turning.save()
        turning.complete = turning.iteration - 1
        turning.reports.drain()
    for is_followed in (False, True):
        turning.train()
        turning.save()
        turning.check_replica()
        *found, last = turning.reports.drain()
        sent, accused = last.fields, [each.fields["ranks"] for each in found]
        assert (sent["fallbacks"] == {}, sent["followed"]) == (is_followed, int(is_followed))
        assert accused == ([[7]] if is_damaged and not is_followed else [])


def test_replica_after_a_lost_message_is_sent_as_state_and_the_next_one_follows(
    owner: Owner,
) -> None:
    follow(owner)
    owner.faults = {owner.iteration + 1}
    owner.train()
    owner.save()
    owner.complete = owner.iteration - 1  # it may not replace what the peer has
    owner.reports.drain()
    for is_followed in (False, True):
        owner.train()
        owner.save()
        owner.check_replica()
        assert (owner.sent()["fallbacks"] == {}) == is_followed


def test_replica_after_a_snapshot_that_was_left_out_is_sent_as_state(owner: Owner) -> None:
    follow(owner)
    owner.train()  # of which there is no snapshot
    owner.train()
    owner.complete = owner.iteration - 2
    owner.save()
    assert owner.sent()["fallbacks"] == {
        "7": f"it is not known to have iteration {owner.iteration - 1}"
    }
    owner.check_replica()


def test_peer_that_has_lost_its_replica_gets_state_in_the_same_message_exchange(
    owner: Owner,
) -> None:
    follow(owner)
    for region in owner.peer.regions:
        region.invalidate()
    owner.train()
    owner.save()
    sent = owner.sent()
    assert "on which an update builds, is not here" in sent["fallbacks"]["7"]
    assert sent["state_bytes"] > 0 < sent["gradient_bytes"]
    owner.check_replica()


def accused_by(owner: Owner) -> list[tuple[list[int], bool, str]]:
    """Train, save, and return who is accused of wrong bits, whether that is decided, and why."""
    owner.train()
    owner.save()
    reports = owner.reports.drain()
    found = [each for each in reports if each.event == "corruption"]
    for each in found:
        assert (each.iteration, each.fields["check"]) == (owner.iteration, "replica")
        assert each.fields["since"] == owner.iteration - 1
        assert each.fields["where"].startswith("rank 3: unit ")
    return [(each.fields["ranks"], each.fields["decided"], each.fields["reason"]) for each in found]


@pytest.fixture
def doubled(owner: Owner, tmp_path: Path) -> Iterator[Owner]:
    """Yield a rank with two peers, 7 and 8, both of which follow it."""
    with closing(Peer(tmp_path / "other", owner.peer.size)) as other:
        infos = [owner.peer.info, replace(other.info, rank=8)]
        owner.replicator.close()
        owner.replicator = PeerReplicator(infos, TOKEN, owner.reports, no_fault, Clock())
        follow(owner)
        yield owner


def flip_moment(owner: Owner) -> None:
    """Change a bit of a moment in the memory of the optimizer, after its snapshot."""
    state = owner.inner.optimizer.state[owner.parameters[1].master]
    state["exp_avg_sq"].view(torch.int32)[5] ^= 1 << 22


def repeat_wrongly(
    monkeypatch: pytest.MonkeyPatch, is_wrong: Callable[[int], bool], factor: float = 1 + 2**-20
) -> None:
    """Have repetitions of the step, by their numbers from 0, come out otherwise than the owner's."""
    original, calls = adam.repeat_step, count()

    def repeat_step(before: Any, gradient: torch.Tensor, *rest: Any) -> None:
        number = next(calls) // len(SIZES)
        original(before, gradient * (factor if is_wrong(number) else 1), *rest)

    monkeypatch.setattr(adam, "repeat_step", repeat_step)


def test_base_that_has_changed_accuses_the_peer_costs_state_and_never_a_wrong_replica(
    owner: Owner,
) -> None:
    follow(owner)
    (base,) = (each for each in owner.peer.regions if each.iteration == owner.iteration)
    base.mapping[owner.layout.units[1].offset] ^= 1
    reason = "the replica that it began with has changed in its memory"
    assert accused_by(owner) == [([7], True, reason)]
    owner.check_replica()
    assert accused_by(owner) == []
    owner.check_replica()


def test_result_that_is_right_when_it_is_repeated_accuses_the_peer_and_costs_no_state(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(owner)
    repeat_wrongly(monkeypatch, lambda number: number == 0)
    owner.train()
    owner.save()
    accusation, sent = owner.reports.drain()
    assert (accusation.fields["ranks"], accusation.fields["decided"]) == ([7], True)
    assert accusation.fields["reason"] == "its second try gave the owner's bits"
    assert (sent.fields["fallbacks"], sent.fields["state_bytes"]) == ({}, 0)
    owner.check_replica()


def test_moment_that_has_changed_in_the_owner_accuses_both_with_one_peer(owner: Owner) -> None:
    follow(owner)
    flip_moment(owner)
    reason = "twice the same other bits, and no further peer that decides"
    assert accused_by(owner) == [([3, 7], False, reason)]
    owner.check_replica()
    assert accused_by(owner) == []  # the peer has the same state now, right or wrong


def test_moment_that_has_changed_in_the_owner_accuses_it_where_two_peers_agree(
    doubled: Owner,
) -> None:
    flip_moment(doubled)
    assert accused_by(doubled) == [([3], True, "all its peers give the same other bits")]


def test_peer_that_gives_other_bits_than_another_one_is_accused_and_counted(
    doubled: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat_wrongly(monkeypatch, lambda number: number % 3 != 0)  # rank 7 is the first of both
    for times in (1, 2):
        doubled.train()
        doubled.save()
        (found,) = (each for each in doubled.reports.drain() if each.event == "corruption")
        assert (found.fields["ranks"], found.fields["decided"]) == ([8], True)
        assert found.fields["reason"] == "rank 7 gives the owner's bits"
        assert found.fields["times"] == times


def answers(first: str, second: str) -> tuple[PeerReply, PeerReply]:
    return PeerReply(error="x", made=first), PeerReply(error="x", made=second)


# By case: answers of peers, those that have ever agreed, and who is accused, decided or not.
SUSPECTS: dict[str, tuple[dict[int, tuple[PeerReply, PeerReply]], set[int], list[Any]]] = {
    "different results": (
        {7: answers("a", "a"), 8: answers("b", "b")},
        {7, 8},
        [((3, 7, 8), False)],
    ),
    "one peer never agreed": (
        {7: answers("a", "a"), 8: answers("a", "a")},
        {7},
        [((3, 7, 8), False)],
    ),
    "results that change": (
        {7: answers("a", "b"), 8: answers("c", "c")},
        {7, 8},
        [((7,), True), ((3, 8), False)],
    ),
    "nothing the second time": ({7: answers("a", "")}, {7}, [((3, 7), False)]),
}


@pytest.mark.parametrize("case", SUSPECTS)
def test_owner_is_accused_alone_only_by_equal_results_of_peers_that_round_like_it(
    case: str,
) -> None:
    doubts, comparable, expected = SUSPECTS[case]
    found = find_suspects(3, doubts, (), comparable)
    assert [(each.ranks, each.is_decided) for each in found] == expected


def test_peer_whose_processor_computes_other_bits_gets_state_after_three_tries(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(owner)
    repeat_wrongly(monkeypatch, lambda _: True)
    gradients = []
    for _ in range(5):
        owner.train()
        owner.save()
        owner.check_replica()
        reports = owner.reports.drain()
        gradients += [
            each.fields["gradient_bytes"] > 0 for each in reports if "bytes" in each.fields
        ]
        said = [each for each in reports if each.event == "degraded"]
        assert len(said) == (len(gradients) == 3)
    assert gradients == [True, True, True, False, False]


def test_gradients_stay_until_they_are_released(owner: Owner) -> None:
    owner.train()
    owner.train()
    first = owner.capture.lend(2)
    held = bytes(first.gradients)
    for _ in range(3):
        owner.train()
    assert bytes(first.gradients) == held
    second = owner.capture.lend(owner.iteration)
    owner.train()
    assert owner.capture.lend(owner.iteration).reason == "older gradients are still being sent"
    first.release()
    second.release()
    owner.train()
    assert owner.capture.lend(owner.iteration).update is not None
