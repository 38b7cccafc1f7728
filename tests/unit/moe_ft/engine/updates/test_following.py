"""A peer that follows a rank by its gradients, over a real connection: its replicas are the rank's state."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ft.engine.links import peers
from moe_ft.engine.updates import adam
from moe_ft.format.encoding import checksum
from moe_ft.format.entries import lossy_packings
from tests.unit.moe_ft.followed import SIZES, Owner

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
        sent = turning.sent()
        assert (sent["fallbacks"] == {}, sent["followed"]) == (is_followed, int(is_followed))


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


def test_base_that_is_not_what_the_rank_believes_costs_state_and_never_a_wrong_replica(
    owner: Owner,
) -> None:
    follow(owner)
    (base,) = (each for each in owner.peer.regions if each.iteration == owner.iteration)
    base.mapping[owner.layout.units[1].offset] ^= 1
    owner.train()
    owner.save()
    assert "does not match its checksum" in owner.sent()["fallbacks"]["7"]
    owner.check_replica()


def test_peer_whose_processor_computes_other_bits_gets_state_after_three_tries(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow(owner)
    original = adam.repeat_step

    def repeat_step(before: Any, gradient: torch.Tensor, *rest: Any) -> None:
        original(before, gradient * (1 + 2**-20), *rest)

    monkeypatch.setattr(adam, "repeat_step", repeat_step)
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
