"""A random generator of their own for the packages of object stores.

They draw jitter and shuffle connections, on threads of their own, from Python's generator. Training draws
from it too: its state is recorded, and an iteration that is run again must draw the same numbers.
"""

import random
import sys

_PACKAGES = frozenset(
    {"adlfs", "aiobotocore", "aiohttp", "aiohttp_retry", "azure", "botocore", "boto3", "decorator"}
    | {"fsspec", "gcsfs", "google", "requests", "s3fs", "s3transfer", "tenacity", "urllib3"}
)
_own = random.Random()
_num_modules = 0  # when they were last looked through


def give_own_random() -> None:
    """Let the packages that are loaded by now draw from a generator of their own. Cheap if none is new."""
    global _num_modules
    if len(sys.modules) == _num_modules:
        return
    _num_modules = len(sys.modules)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and getattr(module, "random", None) is random:
            module.random = _own  # type: ignore[attr-defined]
