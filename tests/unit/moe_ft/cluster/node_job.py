"""Nodes of a job and their coordinator, over one store."""

from pathlib import Path
from typing import Any

from moe_ft.cluster.nodes import Coordinator
from moe_ft.cluster.roster import NodeSeat
from tests.unit.signed import signed


class Job:
    """Nodes of one rank each, by default two, and their coordinator."""

    def __init__(
        self, status: Path | None = None, num_nodes: int = 2, fewest: int = 0, **changes: Any
    ) -> None:
        self.store = signed()
        self.starts = {0: self.store}
        self.coordinator = Coordinator(
            lambda start: self.starts.setdefault(start, signed()),
            num_nodes=num_nodes,
            fewest=fewest,
            ranks_per_node=1,
            own_number=0,
            lost_after_s=1000,
            can_repair=True,
            status=status,
            **{"waits": False, **changes},
        )
        self.seats: dict[str, NodeSeat] = {}

    def come(self, name: str, number: int) -> NodeSeat:
        seat = self.seats[name] = NodeSeat(self.store, name, number)
        self.coordinator.step()
        return seat

    def lose(self, *names: str) -> None:
        """Have nodes be silent for long, and the others not."""
        coordinator = self.coordinator
        lost = [each for each in coordinator._nodes if each.name in names]
        for each in lost:
            self.seats.pop(each.name, None)
        coordinator._lose(lost, "silent")
        coordinator.step()

    def orders(self) -> dict[str, list[tuple[int, int, list[int]]]]:
        """Return start, nodes and ranks of the new orders of each node that is there."""
        return {
            name: [(each.start, each.num_nodes, [*each.ranks]) for each in seat.new_orders()]
            for name, seat in self.seats.items()
        }


def ranks(seat: NodeSeat) -> list[int]:
    return [rank for order in seat.new_orders() for rank in order.ranks]
