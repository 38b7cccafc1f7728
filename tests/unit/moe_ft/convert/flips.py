"""A disk that returns something else than what was written to it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from moe_ft.convert import verifying
from moe_ft.convert.verifying import FilePart, verify_parts


def flip_written_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a bit in the middle of the second part of each file change before it is verified."""

    def flip(path: Path, parts: Iterable[FilePart], **options: Any) -> str:
        parts = list(parts)
        first, second, *_ = parts
        content = bytearray(path.read_bytes())
        content[first.num_bytes + second.num_bytes // 2] ^= 1
        path.write_bytes(content)
        return verify_parts(path, parts, **options)

    monkeypatch.setattr(verifying, "verify_parts", flip)
