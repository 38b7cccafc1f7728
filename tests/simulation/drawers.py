"""Schedules of any job, and of one kind of jobs alone, for mistakes that only these show."""

import random

from tests.simulation import halves
from tests.simulation.schedule import Schedule, draw


def draw_some(seed: int) -> Schedule:
    """Return a schedule of any job."""
    is_halved = random.Random(f"one region {seed}").random() < halves.SHARE
    return halves.draw_halved(seed) if is_halved else draw(seed)


def draw_changing(seed: int) -> Schedule:
    """Return a schedule of a job whose starts have several layouts."""
    return draw(seed, share_of_layouts=1.0)


def draw_aging(seed: int) -> Schedule:
    """Return a schedule of a job whose starts have several layouts, and whose experts have ages."""
    return draw(seed, share_of_layouts=1.0, share_of_ages=1.0)


def draw_followed(seed: int) -> Schedule:
    """Return a schedule of a job whose peers follow by gradients."""
    return draw(seed, share_of_followed=1.0)


def draw_selective(seed: int) -> Schedule:
    """Return a schedule of a job whose snapshots and peers have budgets of bytes."""
    return draw(seed, share_of_layouts=0.0, is_selective=True)


def draw_parity(seed: int) -> Schedule:
    """Return a schedule of a job whose ranks keep parity."""
    return draw(seed, share_of_layouts=0.0, share_of_parity=1.0)
