"""Costs for tests of the simulation."""

from typing import Any

from moe_ft.planning.costs import Costs, RecoveryCosts, RecoveryKind


def costs(*, recovery: RecoveryCosts | None = None, **changes: Any) -> Costs:
    """Return costs of iterations of 1 s, with a state every 10 iterations that is complete at once."""
    values: dict[str, Any] = {
        "strategy": "any",
        "iteration_s": 1.0,
        "blocked_s": 0.0,
        "interval": 10.0,
        "window": 1,
        "lag": 0.0,
        "snapshot_bytes": 0.0,
        "peer_bytes": 0.0,
        "storage_bytes": 0.0,
        "host_bytes": 0.0,
        "lost_token_share": 0.0,
        "recoveries": {RecoveryKind.RESTART: recovery or RecoveryCosts(processes_s=30.0)},
    }
    return Costs(**{**values, **changes})
