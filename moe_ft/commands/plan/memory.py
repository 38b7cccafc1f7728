"""The table of host memory that every strategy's plan has; the formula is planning/host_memory.py."""

from collections.abc import Mapping

from tabulate import tabulate

from moe_ft.planning.host_memory import MemoryShare


def memory_table(
    shares: Mapping[str, MemoryShare],
    num_parameters: float,
    *,
    persists: bool,
    replication_factor: int,
    num_ranks: int,
) -> str:
    """Return the host memory of the rank that needs the most, of a node of such ranks, and by parameter.

    Args:
        shares: by column, the rank's own state in one form.
        num_parameters: that the rank saves of the whole model.
        persists: whether checkpoints also go to storage.
        replication_factor: peers that keep the rank's state; it keeps as many others'.
        num_ranks: on a node.
    """
    own = [share.own_bytes(persists=persists) for share in shares.values()]
    kept = [replication_factor * share.replica_bytes for share in shares.values()]
    both = [
        share.total_bytes(persists=persists, replication_factor=replication_factor)
        for share in shares.values()
    ]
    rows = [
        ("a rank's own, MB", *map(_megabytes, own)),
        (f"replicas that it keeps ({replication_factor}), MB", *map(_megabytes, kept)),
        ("a rank, MB", *map(_megabytes, both)),
        (f"a node of {num_ranks}, at most, MB", *(_megabytes(num_ranks * each) for each in both)),
        ("bytes per parameter, own", *(f"{each / num_parameters:.1f}" for each in own)),
        ("bytes per parameter, all", *(f"{each / num_parameters:.1f}" for each in both)),
    ]
    return tabulate(rows, ("host memory", *shares), "github", disable_numparse=True)


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"
