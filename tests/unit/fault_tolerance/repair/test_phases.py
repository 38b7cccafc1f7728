"""Phases of a repair follow each other without a gap."""

from megatron.fault_tolerance.repair.phases import Phases


def test_phases_add_up_to_the_time_since_the_death() -> None:
    times = iter([12.5, 13.0])
    phases = Phases(10.25, lambda: next(times))
    phases.end("free")
    phases.begin_with(10.0)
    phases.end("swap")
    assert phases.seconds == {"notice": 0.25, "free": 2.25, "swap": 0.5}
    assert sum(phases.seconds.values()) == 13.0 - 10.0


def test_clocks_of_two_machines_never_give_negative_seconds() -> None:
    phases = Phases(10.0, lambda: 9.5)
    phases.begin_with(11.0)
    phases.end("free")
    assert phases.seconds == {"notice": 0.0, "free": 0.0}
