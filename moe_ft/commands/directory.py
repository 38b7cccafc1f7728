"""The directory that `inspect` and `verify` read."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from moe_ft.errors import ConfigError, MoeFtError
from moe_ft.files.storage import hide_password


def add_directory(parser: argparse.ArgumentParser) -> None:
    """Add the directory to the arguments of a command."""
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="a persist directory (or fsspec URL), one of its iter_* directories, or a memory directory",
    )


@contextmanager
def reading(directory: str, name: str = "DIR", *, changes: bool = False) -> Iterator[None]:
    """Turn an error while a directory or fsspec URL is read, or changed, into a ConfigError.

    Args:
        name: of the argument, for messages.
        changes: whether something in it is removed.
    """
    if not directory.strip().removeprefix("file://"):
        raise ConfigError(
            f"{name}='{directory}' is empty: an unset variable? Name a directory or fsspec URL; the current "
            "directory is a dot."
        )
    # Packages that implement a protocol raise errors of their own, such as botocore's.
    kinds = (Exception,) if "://" in directory else (OSError, ValueError, ImportError)
    try:
        yield
    except MoeFtError:
        raise
    except kinds as error:
        raise ConfigError(
            f"{name}={hide_password(directory)} cannot be {'changed' if changes else 'read'}: "
            f"{type(error).__name__}: {error}. Name a directory that you may "
            f"{'change' if changes else 'read'}, or an fsspec URL whose package is installed."
        ) from error
