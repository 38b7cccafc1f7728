"""What the engine tells: events for the log, and lines on stderr that are worth a person's attention."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from moe_ft.engine.background import Report, Reports, describe
from moe_ft.engine.profile import SnapshotProfile
from moe_ft.errors import DegradedError

_PRINT_INTERVAL_S = 30.0
_NOTABLE_STALL = 0.01  # of an iteration


class Messages:
    """Owned by the training thread.

    Attributes:
        reports: the events, which background threads add too.
    """

    def __init__(self, rank: int, *, is_first_of_stage: bool, raises: bool) -> None:
        """Begin.

        Args:
            rank: whose they are.
            is_first_of_stage: whether it speaks for the ranks of its stage.
            raises: whether a failure ends training.
        """
        self.reports = Reports()
        self._rank, self._speaks, self._raises = rank, is_first_of_stage, raises
        self._printed_s: dict[str, float] = {}
        self._told_length = 0

    def drain(self, log: Callable[[Report], None], *, is_ending: bool = False) -> None:
        """Hand over the events since the last call, and print those that say that something failed.

        Args:
            log: called for each event.
            is_ending: whether training has ended: each failure is printed, and none raises.

        Raises:
            DegradedError: with --moe-ft-on-error=raise, if a part has failed.
        """
        failure = ""
        for report in self.reports.drain():
            try:
                log(report)
            except Exception as error:  # TensorBoard and W&B raise whatever they like
                failed = (
                    f"iteration {report.iteration}: log: event {report.event}: {describe(error)}"
                )
                self._print_failure("log", failed, is_ending)
            if report.event == "degraded":
                failure = f"iteration {report.iteration}: {report.fields['part']}: {report.fields['reason']}"
                self._print_failure(report.fields["part"], failure, is_ending)
        if failure and self._raises and not is_ending:
            raise DegradedError(f"{failure} (--moe-ft-on-error=raise)")

    def _print_failure(self, part: str, failure: str, is_ending: bool) -> None:
        """Print a failure, before the end at most one of a part in a while: the event log has all."""
        now = time.monotonic()
        if is_ending or now - self._printed_s.get(part, -_PRINT_INTERVAL_S) >= _PRINT_INTERVAL_S:
            self._printed_s[part] = now
            self._print(f", {failure}")

    def tell_window(
        self, iteration: int, facts: dict[str, Any], profile: SnapshotProfile, hint: str
    ) -> None:
        """Say what a window was like, and once for each length if training has to wait for it.

        Args:
            iteration: its last one.
            facts: see `OpenWindow.facts`.
            profile: what snapshots have taken so far.
            hint: how to make them smaller.
        """
        length, own_most = facts["length"], max(facts["bytes"], default=0)
        own_stall_s = profile.expected_stall_s(own_most)
        self.reports.add("window", iteration, **facts, expected_stall_s=own_stall_s)
        is_new, self._told_length = self._told_length != length, length
        most = facts["largest_bytes"]
        stall_s = profile.expected_stall_s(most)
        if is_new and self._speaks and stall_s > _NOTABLE_STALL * profile.iteration_s:
            self._print(
                f": windows of {length} snapshots with up to {most / 2**20:.1f} MiB each hold up every "
                f"iteration by about {stall_s:.3f} s of {profile.iteration_s:.3f} s. {hint}"
            )

    def _print(self, text: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads standard error any more
            print(f"moe_ft: rank {self._rank}{text}", file=sys.stderr, flush=True)
