"""Nodes of a job and their coordinator, over one store."""

from typing import Any

from moe_ft.cluster.coordinator import Coordinator
from moe_ft.cluster.membership import Policy, Shape
from moe_ft.cluster.roster import NodeSeat
from tests.unit.signed import signed

KERNEL_SILENCE_S = 1.0


class Job:
    """Nodes of one rank each, by default two, and their coordinator."""

    def __init__(
        self, status: str = "", num_nodes: int = 2, fewest: int = 0, **policy: Any
    ) -> None:
        self.store = signed()
        self.starts = {0: self.store}
        self.coordinator = Coordinator(
            lambda start: self.starts.setdefault(start, signed()),
            Policy(shape=Shape(num_nodes, 1, fewest), **policy),
            1000.0,
            status,
            KERNEL_SILENCE_S,
        )
        self.seats: dict[str, NodeSeat] = {}

    def come(self, name: str, number: int, **facts: Any) -> NodeSeat:
        seat = self.seats[name] = NodeSeat(self.store, name, number, **facts)
        self.coordinator.step()
        return seat


def ranks(seat: NodeSeat) -> list[int]:
    return [rank for order in seat.new_orders() for rank in order.ranks]
