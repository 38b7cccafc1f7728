"""Items and shards of conversions."""

from typing import Any

import pytest
import torch

from moe_ft.convert.model import into_shards, list_items, read_ahead
from moe_ft.convert.run_model import model_of_run
from moe_ft.convert.source import RunState
from moe_ft.convert.tensors import find_tensors
from moe_ft.errors import ConfigError
from tests.unit.moe_ft.convert.models import MODEL, known_tensors

EMBEDDING = "embedding.word_embeddings.weight"


def test_weights_alone_have_one_item_each(source: RunState) -> None:
    items = list_items(find_tensors(source), with_optimizer=False, dtype=None)
    assert {each.kind for each in items} == {"weight"}
    assert len(items) == len(MODEL) + 1  # the bias of the router
    assert {each.dtype for each in items} == {"BF16", "F32"}


def test_weights_in_fp32_are_the_masters(source: RunState) -> None:
    items = list_items(find_tensors(source), with_optimizer=False, dtype="fp32")
    (found,) = (each.read(model_of_run(source)) for each in items if each.tensor.name == EMBEDDING)
    assert torch.equal(found, known_tensors()[EMBEDDING, "param"])


def test_other_type_is_rounded_from_the_weights(source: RunState) -> None:
    items = list_items(find_tensors(source), with_optimizer=False, dtype="fp16")
    (found,) = (each.read(model_of_run(source)) for each in items if each.tensor.name == EMBEDDING)
    assert torch.equal(found, known_tensors()[EMBEDDING, "weight"].half())


def test_shards_keep_their_limit_and_all_items(source: RunState) -> None:
    items = list_items(find_tensors(source), with_optimizer=True, dtype=None)
    largest = max(each.num_bytes for each in items)
    shards = into_shards(items, largest + 1)
    assert [each for shard in shards for each in shard] == items
    assert all(sum(each.num_bytes for each in shard) <= largest + 1 for shard in shards)
    assert len(into_shards(items, 1)) == len(items)


def test_missing_moments_are_named(source: RunState) -> None:
    tensors = find_tensors(source)
    iterations = tensors[0].iterations
    assert isinstance(iterations, dict)
    del iterations["exp_avg_sq"]
    with pytest.raises(ConfigError, match=f"--what=all needs exp_avg_sq of {tensors[0].name}"):
        list_items(tensors, with_optimizer=True, dtype=None)


class Fake:
    """Stands for an item, and for the model that it is read from."""

    begun: list[int] = []

    def __init__(self, number: int) -> None:
        self.number = number

    def read(self, model: object) -> int:
        """Return a number of its own."""
        self.begun.append(self.number)
        if self.number == 20:
            raise OSError("unreadable")
        return self.number * self.number


def test_every_item_comes_in_order_one_ahead_and_an_error_at_its_item() -> None:
    model: Any = None
    items: Any = [Fake(number) for number in range(22)]
    found: list[Any] = []
    with pytest.raises(OSError, match="unreadable"):
        ahead: Any = read_ahead(items, model)
        for item, content in ahead:
            assert len(Fake.begun) <= item.number + 2
            found.append((item.number, content))
    assert found == [(number, number * number) for number in range(20)]
    assert list(read_ahead([], model)) == []
