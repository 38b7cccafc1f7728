"""Attempts of one rank that all ranks must know of: its answer, or its error as it travels to the others."""

import builtins
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_ft import errors
from moe_ft.errors import MoeFtError


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """Error of one rank, as all ranks raise it.

    Attributes:
        kind: name of one of ours or of Python's that can be made of a text; others become a RuntimeError.
    """

    kind: str
    text: str

    @property
    def error(self) -> Exception:
        """The error, to be raised."""
        kind: Any = getattr(errors, self.kind, getattr(builtins, self.kind, None))
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        return kind(self.text) if is_error else RuntimeError(self.text)


def attempt[Answer](find: Callable[[], Answer], where: str = "") -> Answer | RankError:
    """Return what a rank finds, or its error, where others would wait for it in vain. Not collective.

    Args:
        where: begins the text of the error.
    """
    try:
        return find()
    except (MoeFtError, OSError, MemoryError) as error:
        # Of a library's own kind the nearest one that a text is enough for.
        ours = ("builtins", MoeFtError.__module__)
        kind = next(each for each in type(error).__mro__ if each.__module__ in ours)
        return RankError(kind=kind.__name__, text=f"{where}{error}")
    except Exception as error:  # a mistake of ours: the place is what helps
        text = "".join(traceback.format_exception(error)).rstrip()
        return RankError(kind="RuntimeError", text=f"{where}{text}")
