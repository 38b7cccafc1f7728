"""The log of iteration records: one record for each iteration of which a snapshot was begun.

A window's index takes its records from here (engine/snapshots/index.py). Taking a record is state/record.py.
"""

import threading
from collections.abc import Callable

from moe_ft.format.records import IterationRecord
from moe_ft.state.record import CapturedRecord, encode


class RecordLog:
    """Records by iteration.

    The training thread appends and trims; the copy worker completes and reads. A lock guards the records.
    """

    def __init__(
        self,
        complete: Callable[[CapturedRecord], None],
        encode: Callable[[CapturedRecord], IterationRecord] = encode,
    ) -> None:
        """Make an empty log.

        Args:
            complete: adds to a captured record what moves together with the weights.
        """
        self._complete, self._encode = complete, encode
        self._lock = threading.Lock()
        self._records: dict[int, CapturedRecord | IterationRecord] = {}

    def append(self, iteration: int, record: CapturedRecord) -> None:
        """Add a record that was just captured."""
        with self._lock:
            self._records[iteration] = record

    def complete(self, iteration: int) -> None:
        """Complete a record while its weights are copied, on the stream that copies them."""
        with self._lock:
            record = self._records[iteration]
        assert not isinstance(record, IterationRecord)
        self._complete(record)

    def read(self, first: int, last: int) -> tuple[IterationRecord, ...]:
        """Return the records of consecutive iterations, all of which are complete."""
        return tuple(self._read(iteration) for iteration in range(first, last + 1))

    def _read(self, iteration: int) -> IterationRecord:
        with self._lock:
            record = self._records[iteration]
        if isinstance(record, IterationRecord):
            return record
        encoded = self._encode(record)
        with self._lock:
            self._records[iteration] = encoded
        return encoded

    def trim(self, first: int, last: int) -> None:
        """Forget all records but those of some consecutive iterations. No snapshot may be under way."""
        with self._lock:
            kept = {each: self._records[each] for each in self._records if first <= each <= last}
            self._records = kept

    @property
    def iterations(self) -> list[int]:
        """The iterations that have a record, in ascending order."""
        with self._lock:
            return sorted(self._records)
