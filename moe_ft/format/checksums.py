"""Checksums of many units at once, by several threads: one has 10 to 35 GB/s, and a GPU copies 50.

What a checksum is says moe_ft/format/encoding.py.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moe_ft.format.encoding import checksum

_MOST_THREADS = 4
_LEAST_BYTES = 16 << 20  # below, starting threads takes longer than what they save


def checksums(contents: Sequence[memoryview]) -> list[str]:
    """Return the checksum of each content, in their order.

    The largest begins first: threads have no part in the work of another one.
    """
    num_threads = min(num_free_cores(), len(contents))
    if num_threads < 2 or sum(map(len, contents)) < _LEAST_BYTES:
        return [*map(checksum, contents)]
    order = sorted(range(len(contents)), key=lambda place: -len(contents[place]))
    try:
        with ThreadPoolExecutor(num_threads, "moe_ft-checksum") as pool:
            found = dict(
                zip(order, pool.map(checksum, map(contents.__getitem__, order)), strict=True)
            )
    except RuntimeError:  # there are too many threads, or the interpreter ends
        return [*map(checksum, contents)]
    return [found[place] for place in range(len(contents))]


def num_free_cores() -> int:
    """Return how many cores this process has beside that of its training thread: 1 to 4.

    Ranks share the cores of their node, also where each may run on all of them.
    """
    of_node = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(_MOST_THREADS, max(1, min(of_node, len(os.sched_getaffinity(0))) - 1))
