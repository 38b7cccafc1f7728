"""The pool: slots for versions of units that only some snapshots hold, in addition to a rank's regions.

It keeps the newest version of each unit, however long ago it was saved. The pool has no index of its own:
those of the regions point into it. engine/memory/region_stores.py says which slots are filled.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import override

from moe_ft.arithmetic import round_up
from moe_ft.engine.memory.layout import declare, encode_header
from moe_ft.engine.memory.regions import MappedFile
from moe_ft.format.entries import Place, UnitEntry
from moe_ft.format.packings import ALIGNMENT_BYTES


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FetchedVersion:
    """A unit version that a recovery puts back."""

    entry: UnitEntry
    content: memoryview
    is_in_pool: bool


class Pool(MappedFile):
    """Slots of equal size in one file, which is a valid safetensors file.

    Slots that a snapshot fills belong to the copy worker until it is complete, all others to the training
    thread. The slots of a replica belong to the threads of its connections.

    Its name holds its geometry: a start with other settings makes another one and can still read this.
    """

    def __init__(self, directory: Path, slot_bytes: int, num_slots: int) -> None:
        self.slot_bytes = round_up(slot_bytes, ALIGNMENT_BYTES)
        self.num_slots = num_slots
        self._header = _header(self.slot_bytes, num_slots)
        name = f"pool_{num_slots}x{self.slot_bytes}.safetensors"
        super().__init__(directory / name, len(self._header) + num_slots * self.slot_bytes)

    @property
    def name(self) -> str:
        """The file's name, as unit entries have it."""
        return self.data_path.name

    @override
    def open(self) -> None:
        super().open()
        self.mapping[: len(self._header)] = self._header

    def offset_of(self, slot: int) -> int:
        """Return where a slot begins, in bytes from the start of the file."""
        return len(self._header) + slot * self.slot_bytes

    def slot_at(self, offset: int) -> int:
        """Return the slot that begins at an offset."""
        return (offset - len(self._header)) // self.slot_bytes

    def has_place(self, unit: UnitEntry | Place) -> bool:
        """Return whether a unit version is said to be in one of the slots."""
        slot = self.slot_at(unit.offset)
        return (
            unit.file == self.name
            and 0 <= slot < self.num_slots
            and unit.offset == self.offset_of(slot)
            and unit.num_bytes <= self.slot_bytes
        )


def _header(slot_bytes: int, num_slots: int) -> bytes:
    slots = {
        f"slot/{slot}": declare("U8", [slot_bytes], slot * slot_bytes, (slot + 1) * slot_bytes)
        for slot in range(num_slots)
    }
    return encode_header(slots)
