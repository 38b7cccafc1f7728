"""Micro-batches as ranks send them to each other, and iterators that read each of them once."""

import pytest
import torch
import torch.distributed as dist

from megatron.fault_tolerance.seams.iteration_check import Batches, decode, encode, swap
from moe_ft.errors import ConfigError, ExchangeError

DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.float16)


def test_a_micro_batch_arrives_bit_for_bit() -> None:
    batch = {
        **{str(each): torch.randint(0, 2, (2, 3)).to(each) for each in DTYPES},
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 4, dtype=torch.int32),
        "turned": torch.arange(6).view(2, 3).t(),
        "nested": [{"lengths": (1, 2)}, None, "text", 3.5, True],
    }
    found = decode(encode(batch))
    assert found.keys() == batch.keys()
    assert found["nested"] == [{"lengths": [1, 2]}, None, "text", 3.5, True]
    for name, given in batch.items():
        if isinstance(given, torch.Tensor):
            assert found[name].dtype == given.dtype and torch.equal(found[name], given), name


def test_what_is_no_data_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"--moe-ft-check-iterations .* Have the data give tensors"
    ):
        encode({"tokens": torch.ones(1), "other": object()})


def test_each_micro_batch_is_read_once_in_its_order() -> None:
    first, second = iter([{"a": 1}, {"a": 2}, {"a": 3}]), iter([{"b": 1}])
    batches = Batches([first, second, first, None])
    one, two, same, none = batches.own()
    assert none is None and one is same
    taken = next(one)
    del taken["a"]  # who uses a batch may take entries out of it
    assert [next(same), next(two)] == [{"a": 2}, {"b": 1}]
    one, *_ = batches.own()
    assert [next(one), next(one), next(one)] == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert next(first, None) is None
    assert Batches(None).own() is None


@pytest.mark.parametrize("named", [-1, 2 * 100 + 4096 + 1, 1 << 40])
def test_peer_that_names_more_bytes_than_a_batch_can_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, named: int
) -> None:
    class Work:
        def wait(self) -> None: ...

    def exchange(pair: list[tuple[str, torch.Tensor]]) -> list[Work]:
        (_, _), (_, received) = pair
        received.fill_(named)
        return [Work()]

    changes = {
        "get_rank": lambda: 0,
        "P2POp": lambda operation, tensor, rank: (operation, tensor),
        "batch_isend_irecv": exchange,
    }
    for name, value in changes.items():
        monkeypatch.setattr(dist, name, value)
    monkeypatch.setattr(dist.distributed_c10d, "_get_object_coll_device", lambda: "cpu")
    with pytest.raises(ExchangeError, match=f"a rank has sent {named} bytes where at most 4296"):
        swap(bytes(100), 1, 1)
