"""Replays of small jobs, run rank by rank and iteration by iteration, and a search of all choices.

Says whether and how a job can be recovered locally without using anything of the planner but its input.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from moe_ft.format.boundary import Direction
from moe_ft.planning.remains import PipelineLayout, Remains


def states_of(remains: Remains, pipelines: PipelineLayout, stage: int) -> set[tuple[int, int]]:
    """Return what all ranks of a stage have: iteration that is put back first, and of the whole state."""
    found = [
        {
            (each.iteration, each.window, each.start if each.window > 1 else None)
            for each in remains.versions
            if each.rank == rank
        }
        for rank in pipelines.stages[stage]
    ]
    return {(end - window + 1, end) for end, window, _ in set.intersection(*found)}


def newest_global(remains: Remains, pipelines: PipelineLayout) -> int:
    """Return the newest iteration that all ranks have saved together, 0 if there is none."""
    everyone = [
        {
            (each.iteration, each.window, each.start if each.window > 1 else None)
            for each in remains.versions
            if each.rank == rank
        }
        for stage in pipelines.stages
        for rank in stage
    ]
    return max((end for end, _, _ in set.intersection(*everyone)), default=0)


def has_record(remains: Remains, pipelines: PipelineLayout, stage: int, iteration: int) -> bool:
    """Return whether a record of a state answers for a stage."""
    ranks = {
        rank
        for other, ranks in enumerate(pipelines.stages)
        for rank in ranks
        if pipelines.has_common_records or other == stage
    }
    return any(
        each.rank in ranks and each.iteration == iteration for each in remains.records
    ) or any(
        each.rank in ranks and each.iteration - each.window < iteration <= each.iteration
        for each in remains.versions
    )


def beginnings(remains: Remains, pipelines: PipelineLayout, stage: int, target: int) -> set[int]:
    """Return the iterations from which a stage could run to the target if it had all tensors."""
    return {
        begin
        for begin, end in states_of(remains, pipelines, stage)
        if end <= target
        and all(has_record(remains, pipelines, stage, n) for n in range(end + 1, target + 1))
    }


def received(pipelines: PipelineLayout, stage: int) -> Iterator[tuple[int, Direction]]:
    """Yield the stages that a stage receives tensors from."""
    last = len(pipelines.stages) - 1
    if last == 0:
        return
    if stage > 0 or pipelines.is_ring:
        yield (stage - 1 if stage else last), Direction.FORWARD
    if stage < last or pipelines.is_ring:
        yield (stage + 1 if stage < last else 0), Direction.BACKWARD


def logs_needed(
    pipelines: PipelineLayout, begins: Sequence[int], target: int
) -> set[tuple[int, int, Direction, int]] | None:
    """Run the iterations; return the logs that are read, None if a collective waits for ever.

    Returns:
        Sender, receiver, direction and iteration of each log.
    """
    at, read = list(begins), set()
    for iteration in range(min(begins), target):
        running = {stage for stage, own in enumerate(at) if own == iteration}
        for coupling in pipelines.couplings:
            if running & set(coupling.stages) and not running >= set(coupling.stages):
                return None
        for stage in running:
            for neighbour, direction in received(pipelines, stage):
                if neighbour not in running:
                    wires = zip(pipelines.stages[neighbour], pipelines.stages[stage], strict=True)
                    read |= {(*wire, direction, iteration) for wire in wires}
            at[stage] += 1
    assert at == [target] * len(at)
    return read


def can_run(
    remains: Remains, pipelines: PipelineLayout, begins: Sequence[int], target: int
) -> bool:
    """Return whether all tensors are there for stages that begin at these iterations."""
    there = {(each.sender, each.receiver, each.direction, each.iteration) for each in remains.logs}
    read = logs_needed(pipelines, begins, target)
    return read is not None and read <= there


def best_choices(
    remains: Remains, pipelines: PipelineLayout
) -> tuple[int, list[tuple[int, ...]]] | None:
    """Try every choice of states. Return the newest target and its best choices, None if it is global."""
    num_stages = len(pipelines.stages)
    reached = {
        end
        for stage in range(num_stages)
        for _, end in states_of(remains, pipelines, stage)
        if end >= newest_global(remains, pipelines)
    }
    for target in sorted(reached, reverse=True):
        options = [
            sorted(beginnings(remains, pipelines, stage, target)) for stage in range(num_stages)
        ]
        runs = [each for each in product(*options) if can_run(remains, pipelines, each, target)]
        if not runs:
            continue
        most = max(map(sum, runs))
        best = [each for each in runs if sum(each) == most]
        if any(set(each) == {target} or len(set(each)) > 1 for each in best):
            return target, best
    return None
