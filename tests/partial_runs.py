"""Small jobs with partial checkpoints, and a recount of what their recoveries lose."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_ft.format.encoding import decode
from moe_ft.format.index import Index
from moe_ft.units import UnitKind, parse_unit
from tests.harness import events
from tests.jobs import CheckpointJob
from tests.recount import Expert, Recount

LAYERS = tuple(f"layer.{number}" for number in range(4))
PARTIAL = ("--moe-ft-strategy", "partial", "--moe-ft-router-log", "--moe-ft-interval", "2")


def recount(job: CheckpointJob, k: int, **rules: object) -> Recount:
    known = {"num_ranks": 2, "layers": LAYERS, "num_experts": 4, "ep_size": 2}
    return Recount(folder=job.events_dir, k_snapshot=k, **{**known, **rules})  # type: ignore[arg-type]


def taken(log: Path, num_ranks: int, incarnation: int, until: int) -> list[int]:
    """Return the iterations of an incarnation's snapshots; a slow machine may skip some."""
    assert not [line for rank in range(num_ranks) for line in events(log, rank, "degraded")]
    lines = events(log, 0, "snapshot")
    found = {line["iteration"] for line in lines if line["incarnation"] == incarnation}
    return sorted(iteration for iteration in found if iteration <= until)


def follow(counted: Recount, incarnation: int, after: int, until: int) -> None:
    """Tell the recount of the snapshots that an incarnation has completed.

    The snapshot of the recovered iteration may have left no event: its rank may have died before writing it.
    """
    counted.read(incarnation, after)
    last = {until} if until > after else set()
    known = taken(counted.folder, counted.num_ranks, incarnation, until)
    for iteration in sorted({*known, *last}):
        counted.snapshot(iteration)


def killed_with_storage(job: CheckpointJob, keep: int) -> None:
    """Run a job and kill it: it leaves memory, and checkpoints that share the files of their experts."""
    job.run(
        *PARTIAL,
        *("--train-iters", "12", "--moe-ft-k-snapshot", "2", "--moe-ft-keep", str(keep)),
        *("--moe-ft-persist-interval", "1", "--moe-ft-inject-fault", "kill:1@11:backward"),
        storage=True,
    )


def check_losses(
    log: Path,
    *,
    num_ranks: int,
    num_experts: int,
    ep_size: int,
    is_load_aware: bool = False,
    where: str = "",
) -> None:
    """Fail unless all recoveries lost the tokens that the routing log says, stage by stage.

    Args:
        log: of the events of a run with k_snapshot 1.
        num_experts: in each layer that has some.
        where: the run, for messages.
    """
    stages = sorted(
        {tuple(events(log, rank, "router_load")[0]["tokens"]) for rank in range(num_ranks)}
    )
    counts = [
        Recount(
            folder=log,
            num_ranks=num_ranks,
            layers=layers,
            num_experts=num_experts,
            ep_size=ep_size,
            k_snapshot=1,
            is_load_aware=is_load_aware,
        )
        for layers in stages
    ]
    after = 0
    for incarnation, recovery in enumerate(events(log, 0, "recovery")):
        lost: dict[str, list[int]] = {}
        for counted in counts:
            follow(counted, incarnation, after, recovery["restored_iteration"])
            lost |= counted.recover(recovery["restored_iteration"])
        told = f"{where}, incarnation {incarnation}"
        assert recovery["lost_per_expert"] == lost, told
        assert recovery["lost_tokens"] == sum(map(sum, lost.values())), told
        assert recovery["total_lost_tokens"] == sum(counted.total for counted in counts), told
        after = recovery["restored_iteration"]
    assert after, f"{where}: nothing was recovered"


def check_debts(log: Path, ranks: Sequence[int]) -> dict[int, int]:
    """Fail unless the ranks of a stage owe what its layers have lost in recoveries, less what they made up.

    Returns:
        What was owed before each iteration, in the last attempt at it.
    """
    layers = events(log, ranks[0], "router_load")[0]["tokens"]
    owed: dict[int, int] = {}
    # From to: parts are rounded up, so an expert may get some tokens more than it is owed.
    known: dict[int, tuple[int, int]] = {}
    for parts in zip(*(_between_recoveries(log, rank) for rank in ranks), strict=True):
        recovery = parts[0][0]
        if recovery["event"] == "recovery":
            first = recovery["iteration"] + 1
            lost = sum(sum(recovery["lost_per_expert"][layer]) for layer in layers)
            low, high = known.get(first, (0, 0))
            known[first] = low + lost, high + lost
            owed = {at: count for at, count in owed.items() if at < first}
        lines = [line for part in parts for line in part if line["event"] == "capacity_boost"]
        for at in sorted({line["iteration"] for line in lines}):
            of_ranks = [line for line in lines if line["iteration"] == at]
            assert len({line["owed_tokens"] for line in of_ranks}) == 1, of_ranks
            owed[at], made_up = (
                of_ranks[0]["owed_tokens"],
                sum(x["made_up_tokens"] for x in of_ranks),
            )
            assert known[at][0] <= owed[at] <= known[at][1], (at, owed, known)
            known[at + 1] = owed[at] - made_up, owed[at] - (made_up > 0)
    return owed


def _between_recoveries(log: Path, rank: int) -> list[list[dict[str, Any]]]:
    """Return the events of a rank from its start to the first recovery, and from each recovery on."""
    parts: list[list[dict[str, Any]]] = [[]]
    for line in events(log, rank):
        if line["event"] == "recovery":
            parts.append([])
        parts[-1].append(line)
    return parts


def versions_left(memory: Path) -> dict[Expert, set[int]]:
    """Return the iterations of the versions of each expert that all ranks have which save parts of it."""
    held: dict[Expert, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for path in memory.glob("*/*/region_*.json"):
        index = decode(path.read_bytes(), Index, str(path))
        for name, entry in (*index.units.items(), *(index.retained or {}).items()):
            unit = parse_unit(name)
            if unit.kind is UnitKind.EXPERT:
                held[unit.layer_name, unit.expert][index.rank].add(entry.iteration)
    return {expert: set.intersection(*of_ranks.values()) for expert, of_ranks in held.items()}


def lost_since(
    counted: Recount, left: dict[Expert, set[int]], restored: int
) -> dict[str, list[int]]:
    """Return by layer the tokens ``[expert]`` that came after the versions that were left."""
    lost = {layer: [0] * counted.num_experts for layer in counted.layers}
    for (layer, number), versions in left.items():
        version = restored if restored in versions else max(versions)
        tokens = counted.routed[layer, number].items()
        lost[layer][number] = sum(count for at, count in tokens if version < at <= restored)
    return lost
