"""Tokens per expert: counted on the routers, made up where they were lost, written to the event log.

Counting is moe_ft/state/router_load.py, a higher capacity moe_ft/state/capacity.py. The strategies get the
counts through checkpoints.py, and say what they owe. Tables of slots, which follow the tokens, are also
written to the event log.
"""

from collections.abc import Sequence

import torch

from moe_ft.config.config import MoeFtConfig
from moe_ft.elastic.slot_layer import SlotMoELayer, slot_layers
from moe_ft.events import EventLog
from moe_ft.loop.listeners import Built, EndedIteration, LoopListener
from moe_ft.planning.lost_tokens import Debts
from moe_ft.saying import say
from moe_ft.state.capacity import CapacityBoost
from moe_ft.state.record import current_num_microbatches
from moe_ft.state.router_load import RouterLoad, table
from moe_ft.strategies.interface import Counting
from moe_ft.strategies.registry import kind_of


class Routers(LoopListener):
    """Counts the tokens of the experts on this rank, where somebody reads them.

    Owned by the training thread.
    """

    def __init__(self, config: MoeFtConfig, event_log: EventLog) -> None:
        self._is_logged = config.observability.router_log
        self._log = event_log
        self._is_read_by_strategy = config.strategy.is_on
        kind = kind_of(config.strategy.strategy)
        counting = Counting.NOTHING if kind is None else kind.counting(config)
        self._wants_probabilities = counting is Counting.PROBABILITIES
        self._load = RouterLoad()
        self._boost = CapacityBoost(config.recovery.capacity_boost)
        self._debts: Debts | None = None

    def after_setup(self, built: Built) -> None:
        """Hook the routers of the model."""
        model, optimizer, _ = built
        if self._is_logged or (self._is_read_by_strategy and optimizer is not None):
            self._load.start(model, sums_probabilities=self._wants_probabilities)
            self._boost.start(model)

    def suspend(self, iteration: int) -> None:
        """Remove the hooks: `after_setup` adds them again."""
        self.close()

    def begin_attempt(self) -> None:
        """Forget the counts of an attempt that is repeated, and of the iteration before."""
        self._load.begin()
        self._boost.begin()

    def make_up(self, debts: Debts | None, layers: Sequence[str], num_ranks: int) -> None:
        """Raise the capacity of experts that are owed tokens, for the coming iteration.

        Args:
            debts: of all ranks of the stage together; None without a boost.
            layers: of the debts.
            num_ranks: of the stage.
        """
        owed = 0 if self._debts is None else self._debts.num_open
        self._debts = debts
        if debts is not None and debts.num_open:
            # Every rank and micro-batch has an equal part, rounded up: so debts end.
            parts = -(-debts.tokens // (num_ranks * (current_num_microbatches() or 1)))
            self._boost.use(dict(zip(layers, parts.tolist(), strict=True)))
            if not owed and self._log.rank == 0:
                say(f"experts exceed their capacity until {debts.num_open} lost tokens are made up")
        elif owed:
            self._boost.close()
            if self._log.rank == 0:
                left = owed if debts is None else int(debts.tokens.sum())
                say(f"experts have Megatron's capacity again; {left} tokens were not made up")

    def counts(self) -> dict[str, torch.Tensor]:
        """Return ``[expert]`` tokens of this iteration by layer name, on the device."""
        return self._load.counts()

    def popularity(self, layers: Sequence[str], num_experts: int) -> torch.Tensor | None:
        """Return ``[layer, expert]`` tokens or probabilities, as the strategy counts; None without layers.

        With a boost, the tokens above the capacity of experts follow as further rows.
        """
        if not layers:
            return None
        load = self._load
        counts = load.probabilities() if self._wants_probabilities else load.counts()
        found = table(counts, layers, num_experts)
        if self._debts is None:
            return found
        made_up = table(self._boost.made_up(), layers, num_experts)
        return torch.cat([found, made_up.to(found.device)])

    def after_iteration(self, ended: EndedIteration) -> None:
        """Write the events "router_load" and "capacity_boost"."""
        if self._is_logged:
            tokens = {name: counts.tolist() for name, counts in self._load.counts().items()}
            self._log.write(
                "router_load", ended.iteration, tokens=tokens, is_skipped=ended.is_skipped
            )
        if self._debts is not None and self._debts.num_open:
            made_up = sum(int(counts.sum()) for counts in self._boost.made_up().values())
            self._log.write(
                "capacity_boost",
                ended.iteration,
                owed_tokens=self._debts.num_open,
                made_up_tokens=made_up,
                is_skipped=ended.is_skipped,
            )

    def close(self) -> None:
        """Remove the hooks."""
        self._boost.close()  # put on last
        self._load.close()


class SlotTables(LoopListener):
    """Writes the event "slot_table" where the experts of slots change, on one rank of each stage."""

    def __init__(self, event_log: EventLog) -> None:
        self._log = event_log
        self._layers: dict[str, SlotMoELayer] = {}

    def after_setup(self, built: Built) -> None:
        """Find the layers with slots."""
        self._layers = {
            name: layer
            for name, layer in slot_layers(built[0])
            if built[1] is not None and layer.ep_group.rank() == 0
        }

    def after_iteration(self, ended: EndedIteration) -> None:
        """Write the tables that the next iteration begins with, if they are new."""
        found = {
            name: {
                "table": new.table,
                "tokens_before": new.before,
                "tokens_after": new.after,
                "moved_replicas": new.num_moved,
                "dropped_before": new.dropped[0],
                "dropped_after": new.dropped[1],
            }
            for name, layer in self._layers.items()
            if (new := layer.new_table) is not None
        }
        if found:
            sent_bytes = sum(layer.homes.take_sent_bytes() for layer in self._layers.values())
            self._log.write("slot_table", ended.iteration, layers=found, sent_bytes=sent_bytes)
