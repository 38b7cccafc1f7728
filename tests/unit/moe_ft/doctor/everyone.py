"""Facts of ranks, for tests of the doctor's checks."""

from typing import Any

from moe_ft.doctor.ranks import TESTED, RankFacts

VERSIONS = {"moe_ft": "0.1.0", "python": "3.12.1", **TESTED}


def facts_of(rank: int, **others: Any) -> RankFacts:
    """Return the facts of a rank that is alone on its node."""
    usual = {
        "rank": rank,
        "node": f"n{rank}",
        "node_problem": "",
        "node_source": "SLURMD_NODENAME",
        "host": f"host{rank}",
        "boot": f"boot{rank}",
        "local_world_size": 1,
        "versions": VERSIONS,
        "variables": {},
        "num_gpus": 8,
    }
    return RankFacts(**{**usual, **others})
