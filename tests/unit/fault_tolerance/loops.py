"""Small values that the seams of the training loop pass to listeners."""

from collections.abc import Mapping

import torch

from moe_ft.events import Event, EventLog, event_path, read_events
from moe_ft.loop.listeners import EndedIteration


def ended(
    iteration: int = 5,
    *,
    losses: Mapping[str, torch.Tensor] | None = None,
    is_skipped: bool = False,
    num_samples: int = 8,
) -> EndedIteration:
    """Return an iteration that took two seconds."""
    return EndedIteration(
        iteration=iteration,
        losses=losses or {},
        is_skipped=is_skipped,
        num_samples=num_samples,
        seconds=2.0,
    )


def events_in(log: EventLog) -> list[Event]:
    """Return what a log holds so far."""
    return list(read_events(event_path(log.directory, log.rank)))


def last_event(log: EventLog) -> Event:
    """Return the last event of a log, without the fields that every event has."""
    common = ("time", "rank", "incarnation")
    return {name: value for name, value in events_in(log)[-1].items() if name not in common}
