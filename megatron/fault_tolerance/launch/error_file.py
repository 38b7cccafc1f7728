"""torchrun's error file of a rank, which is there as a whole or not at all.

torch writes it in place. If torchrun's SIGTERM comes in between, or there is no room, torchrun reads half a
file, and ends the job whatever restarts it has left.
"""

import os
from pathlib import Path
from typing import override

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from moe_ft.recovery.site import say


class WholeErrorFile(ErrorHandler):
    """Writer of the error file for torch's decorator `record`."""

    _suffix = ""

    @override
    def _get_error_file_path(self) -> str | None:
        path = super()._get_error_file_path()
        return None if path is None else f"{path}{self._suffix}"

    @override
    def record_exception(self, e: BaseException) -> None:
        path = self._get_error_file_path()
        if path is None:
            return
        self._suffix = f".{os.getpid()}"
        temporary = Path(path + self._suffix)
        try:
            super().record_exception(e)
            temporary.replace(path)
        except OSError as error:  # the exception goes on; its traceback is on standard error
            temporary.unlink(missing_ok=True)
            say(f"torchrun's error file is not written: {error}")
        finally:
            self._suffix = ""
