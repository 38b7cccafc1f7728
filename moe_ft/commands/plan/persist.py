"""The line of a plan on writing to storage."""

from moe_ft.strategies.partial.size import smallest_interval


def persist_line(
    num_bytes: int, *, bandwidth: float, period_s: float, planned: int, unit: str
) -> str:
    """Return how long writing takes, and whether the next checkpoint comes late enough for it.

    Args:
        num_bytes: that the rank with the most writes.
        bandwidth: to storage, bytes per second.
        period_s: of one unit.
        planned: interval between writes, in units.
        unit: of intervals: "iterations" or "windows".
    """
    least = smallest_interval(num_bytes, bandwidth_bytes_per_s=bandwidth, iteration_s=period_s)
    verdict = "is enough" if planned >= least else "is too short: persists will be skipped"
    return (
        f"persist: {num_bytes / bandwidth:.3f} s; smallest interval {least} {unit}; the one planned, "
        f"{planned}, {verdict}"
    )
