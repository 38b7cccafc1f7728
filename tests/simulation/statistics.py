"""Counts of what has happened in a schedule, by kind: they show whether a fault or an outcome ever occurs."""

from collections import Counter

from tests.simulation.injection import Injection
from tests.simulation.job import Job
from tests.simulation.processes import lines_of


def count(injection: Injection, job: Job) -> Counter[str]:
    """Return how often each fault, recovery, refusal, report and setting has occurred."""
    counts = Counter({f"fault {kind}": number for kind, number in injection.inflicted.items()})
    for start in job.starts:
        counts[f"exit codes {sorted({str(each.exit_code) for each in start.processes})}"] += 1
        errors = {type(each.error).__name__ for each in start.lives if each.error is not None}
        counts.update(f"error {each}" for each in errors)
        recovered = [each.outcome for each in start.lives if each.outcome is not None]
        if recovered:
            first = recovered[0]
            source = "nothing" if first.record is None else "some state"
            counts[f"recovery of {source}"] += 1
            tiers = {tier for each in recovered for tier, units in each.sources.items() if units}
            counts["recovery of some stages alone"] += bool(first.stages)
            counts["recovery of all that replays nothing"] += first.record is not None and not any(
                each.replayed for each in start.lives
            )
            counts.update(f"recovery from {each.name.lower()}" for each in tiers)
        counts["recovery with replay"] += any(each.replayed for each in start.lives)
        said = [line for each in start.processes for line in lines_of(each)]
        for what in ("left a breakpoint", "left no breakpoint", "all stages recover"):
            counts[f"said '{what}'"] += sum(what in line for line in said)
        events = {report.event for each in start.lives for _, report in each.reports}
        counts.update(f"report {each}" for each in events)
    counts["storage taken over"] += any(
        "taking over" in line
        for process in job.world.kernel.processes
        for line in lines_of(process)
    )
    _count_settings(job, counts)
    return +counts


def _count_settings(job: Job, counts: Counter[str]) -> None:
    setup = job.setup
    counts[f"strategy {setup.strategy}"] += 1
    counts.update(f"option {name} {value}" for name, value in setup.options.items())
    counts[f"{setup.shape.num_ranks} ranks on {setup.nodes} nodes"] += 1
    if setup.recovers_locally:
        counts[f"{setup.stages} stages that recover alone, {setup.dp} ranks each"] += 1
    counts["starts that stop by themselves"] += setup.stop_interval > 0
