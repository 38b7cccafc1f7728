"""Starts of a small run as the steps of a recovery see them: histories, plans, flags, a place."""

from collections.abc import Sequence
from pathlib import Path

from moe_ft.config.config import MoeFtConfig, RecoveryConfig
from moe_ft.format.identity import History, Start
from moe_ft.launches import Launch
from moe_ft.planning.recovery import Plan, Rejection, Version, plan_recovery
from moe_ft.recovery.choice import Wish
from moe_ft.recovery.site import Site
from moe_ft.topology import RankInfo, Topology

NODES = ("a", "b")


def start(number: int, resumed_at: int, name: str = "", *, is_chosen: bool = False) -> Start:
    return Start(
        number=number,
        resumed_at=resumed_at,
        name=name or f"start-{number}-{resumed_at}",
        is_chosen=is_chosen,
    )


def versions_of(
    history: History,
    *iterations: int,
    num_ranks: int = 1,
    superseded: tuple[str, ...] = (),
    began_with: str = "",
    window: int = 1,
    replay_settings: str = "",
) -> list[Version]:
    """Return what the last start of a history has written, for some ranks on nodes of their own."""
    return [
        Version(
            rank=rank,
            iteration=iteration,
            lineage="run-a",
            history=history,
            node=NODES[rank],
            path=f"rank_{rank:05d}/{history[-1].name}_{iteration}.json",
            window=window,
            replay_settings=replay_settings,
            superseded=superseded,
            began_with=began_with,
        )
        for iteration in iterations
        for rank in range(num_ranks)
    ]


def plans_of(versions: Sequence[Version], num_ranks: int = 1) -> tuple[list[Plan], list[Rejection]]:
    """Return the plans for ranks on nodes of their own."""
    return plan_recovery(versions, NODES[:num_ranks])


def wish(
    recover_from: str = "auto",
    *,
    is_restart: bool = False,
    loaded_iteration: int = 0,
    began_with: str = "",
    known_before: frozenset[str] = frozenset(),
) -> Wish:
    """Return what the flags of a start say."""
    return Wish(
        recover_from=recover_from,
        only_iteration=RecoveryConfig(recover_from=recover_from).only_iteration,
        is_restart=is_restart,
        loaded_iteration=loaded_iteration,
        began_with=began_with,
        known_before=known_before,
    )


def site(rank: int = 0, *, on_missing: str = "start") -> Site:
    """Return a rank's place in a job of two ranks on nodes of their own."""
    ranks = tuple(
        RankInfo(rank=each, node=node, stage=0, pid=1, address=None, region_bytes=1)
        for each, node in enumerate(NODES)
    )
    return Site(
        config=MoeFtConfig(recovery=RecoveryConfig(on_missing=on_missing)),
        job_id="job",
        node=NODES[rank],
        node_dir=Path("/nowhere"),
        rank=rank,
        topology=Topology(ranks=ranks),
        launch=Launch(),
    )
