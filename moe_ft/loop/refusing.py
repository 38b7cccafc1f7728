"""Exit codes of a rank, and refusals in one line."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from moe_ft.errors import BusyError, ConfigError, CorruptionError, UnrecoverableError
from moe_ft.saying import fail

EXIT_REFUSED = 2  # the command line, or the state that is there, cannot work
EXIT_NOT_SAVED = 3  # the last state should be on storage and is not: start the job again
EXIT_BUSY = (
    4  # storage, or memory of this node, cannot be had now: start it again, later or elsewhere
)
EXIT_CORRUPTION = 5  # a check has found corruption, and nobody could replace the rank
REFUSAL_GRACE_S = 10.0


@contextmanager
def refusing() -> Iterator[None]:
    """End the rank with one line where the flags or the state that is there cannot work.

    Corruption, which has had its line, ends it with a code of its own.
    """
    try:
        yield
    except BusyError as error:
        refuse(str(error), code=EXIT_BUSY)
    except (ConfigError, UnrecoverableError) as error:
        refuse(str(error))
    except CorruptionError:
        raise SystemExit(EXIT_CORRUPTION) from None


def refuse(reason: str, program: str | None = None, code: int = EXIT_REFUSED) -> NoReturn:
    """Print one line a node, since what is wrong may be wrong on one node only, and exit.

    The line begins with the name of the program, by default that of the script.
    """
    if os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")) == "0":
        name = program or Path(sys.argv[0]).name
        repeated = _is_repeated(reason)
        fail(f"{name}: {'refused again, for the same reason' if repeated else f'error: {reason}'}")
    else:
        time.sleep(REFUSAL_GRACE_S)  # the first rank to end has the launcher end all others
    raise SystemExit(code) from None


def _is_repeated(reason: str) -> bool:
    """Return whether torchrun, which knows no refusals, has started this node's ranks again after the same.

    All starts of its agent have a folder in common: that of their error files, `attempt_N/RANK/error.json`.
    """
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parent.parent
    if not attempt.name.startswith("attempt_"):
        return False
    note = attempt.with_name("moe_ft_refused")
    with suppress(OSError):
        if note.exists() and note.read_text() == reason:
            return True
        note.write_text(reason)
    return False
