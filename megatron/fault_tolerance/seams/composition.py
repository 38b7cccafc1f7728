"""Listeners of a run of Megatron's own training loop; listener_order.py has their order."""

from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.config.config import MoeFtConfig
from moe_ft.loop.listener_order import listeners_of
from moe_ft.loop.listeners import Listeners


def listeners_for(config: MoeFtConfig, rank: int, *, on_sigterm: bool) -> Listeners:
    """Return everything that acts at the seams of a run on one rank.

    Without `on_sigterm`, SIGTERM is left alone, for --exit-signal-handler.
    """
    return listeners_of(config, MegatronLoop(), rank, on_sigterm=on_sigterm)
