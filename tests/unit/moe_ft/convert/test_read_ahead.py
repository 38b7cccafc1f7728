"""Items come in their order, one ahead, and errors where they belong."""

import pytest

from moe_ft.convert.read_ahead import read_ahead


def test_every_item_comes_in_order_with_what_was_read_of_it() -> None:
    assert list(read_ahead(range(50), lambda each: each * each)) == [(n, n * n) for n in range(50)]
    assert list(read_ahead([], str)) == []


def test_reader_is_at_most_one_item_ahead() -> None:
    begun: list[int] = []
    for item, _ in read_ahead(range(20), begun.append):
        assert len(begun) <= item + 2


def test_error_comes_at_its_item_and_ends_the_reading() -> None:
    def read(item: int) -> int:
        if item == 3:
            raise OSError("unreadable")
        return item

    found = []
    with pytest.raises(OSError, match="unreadable"):
        for item, _ in read_ahead(range(9), read):
            found.append(item)
    assert found == [0, 1, 2]
