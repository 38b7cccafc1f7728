"""Checksums of many units at once, by several threads: one has 10 to 35 GB/s, and a GPU copies 50.

What a checksum is says moe_ft/format/encoding.py.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from moe_ft.format.encoding import checksum
from moe_ft.processes import num_cores_of_rank

_MOST_THREADS = 4
_LEAST_BYTES = 16 << 20  # below, starting threads takes longer than what they save


def checksums(contents: Sequence[memoryview]) -> list[str]:
    """Return the checksum of each content, in their order.

    The largest begins first: threads have no part in the work of another one.
    """
    num_free_cores = num_cores_of_rank() - 1  # beside that of the training thread
    num_threads = min(num_free_cores, _MOST_THREADS, len(contents))
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
