"""Ranks in threads of one process, which exchange values."""

import threading
from collections.abc import Callable
from typing import Any

from moe_ft.engine.exchange import decode, encode

GATHER_DEADLINE_S = 120.0


def run_together[Answer](
    num_ranks: int, run: Callable[[int, Callable[[Any, Any], list[Any]]], Answer]
) -> list[Answer]:
    """Run a function for all ranks at once, in threads, with a gather that exchanges values among them.

    Args:
        num_ranks: how many.
        run: called with the rank and the gather.
    """
    values: list[Any] = [None] * num_ranks
    answers: dict[int, Answer] = {}
    barrier = threading.Barrier(num_ranks, timeout=GATHER_DEADLINE_S)

    def gather_of(rank: int) -> Callable[[Any, Any], list[Any]]:
        def gather(value: Any, decoder: Any) -> list[Any]:
            values[rank] = decode(encode(value), decoder)
            barrier.wait()
            everyone = list(values)
            barrier.wait()
            return everyone

        return gather

    def answer(rank: int) -> None:
        try:
            answers[rank] = run(rank, gather_of(rank))
        except BaseException:
            barrier.abort()
            raise

    threads = [threading.Thread(target=answer, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GATHER_DEADLINE_S)
    return [answers[rank] for rank in range(num_ranks)]
