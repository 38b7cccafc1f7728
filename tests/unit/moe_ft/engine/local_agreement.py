"""Agreement of ranks in one process: the least of what all have put in, or an error if one has left."""

import threading
from collections.abc import Sequence

DEADLINE_S = 120.0


class Meeting:
    """Values of all ranks, by round. Any thread."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.rounds: list[dict[int, list[int]]] = []
        self.has_broken = False
        self._changed = threading.Condition()

    def put(self, number: int, rank: int, values: list[int]) -> None:
        """Put a rank's values into a round."""
        with self._changed:
            while len(self.rounds) <= number:
                self.rounds.append({})
            self.rounds[number][rank] = values
            self._changed.notify_all()

    def least(self, number: int) -> list[int]:
        """Return the least values of a round, once all ranks have put theirs in."""
        with self._changed:
            found = self.rounds[number]
            is_over = self._changed.wait_for(
                lambda: self.has_broken or len(found) == self.num_ranks, DEADLINE_S
            )
            if not is_over or len(found) < self.num_ranks:
                raise RuntimeError("Connection closed by peer")
            return [min(column) for column in zip(*found.values(), strict=True)]

    def end(self) -> None:
        """Have every rank fail from now on that waits for another one."""
        with self._changed:
            self.has_broken = True
            self._changed.notify_all()


class LocalAgreement:
    """One rank's part in a meeting. Owned by one thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._number = 0
        self._has_begun = False

    @property
    def is_under_way(self) -> bool:
        """True if this rank has put in values and not read the result."""
        return self._has_begun

    def begin(self, values: Sequence[int]) -> None:
        """Put in this rank's values."""
        if self._meeting.has_broken:
            raise RuntimeError("Connection closed by peer")
        self._has_begun = True
        self._meeting.put(self._number, self._rank, list(values))

    def result(self) -> list[int]:
        """Return the least values."""
        self._has_begun = False
        self._number += 1
        return self._meeting.least(self._number - 1)

    def leave(self) -> None:
        """Take no further part."""
        self._has_begun = False
        self._meeting.end()
