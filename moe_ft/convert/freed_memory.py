"""Memory of the C library that a conversion uses again and again.

By default glibc gives large blocks back to the system as soon as they are freed, and the next one is filled
with zeros, page by page. For a conversion that was more work than reading, converting and writing together.
"""

import ctypes

# Of <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_MOST = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, for all threads; return whether the C library can do that.

    To be called before threads are started.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Threads besides the first would have small arenas of their own.
    settings = ((_ARENA_MAX, 1), (_TRIM_THRESHOLD, _MOST), (_MMAP_THRESHOLD, _MOST))
    return all([mallopt(name, value) == 1 for name, value in settings])
