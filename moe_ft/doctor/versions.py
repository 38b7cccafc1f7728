"""Check of versions: what was tested, and the same on all ranks; and of the GPUs that ranks see."""

from collections.abc import Sequence

from moe_ft.doctor.facts import RankFacts
from moe_ft.doctor.rows import Row, failed, join_nodes, passed, warned

# Copies of what constraints.txt pins; a unit test compares them with it.
TESTED = {"torch": "2.13.0", "megatron-core": "0.19.2"}
TESTED_PYTHON = ("3.12",)
_CHECK = "versions"


def check_versions(everyone: Sequence[RankFacts]) -> list[Row]:
    """Return rows on the versions of all ranks that have answered."""
    rows = [row for name in sorted(_names(everyone)) for row in _compare(name, everyone)]
    own = everyone[0].versions
    for name, tested in TESTED.items():
        if name not in own:
            rows.append(failed(_CHECK, "all ranks", f"no {name}", f"pip install {name}=={tested}"))
        elif own[name].partition("+")[0] != tested:
            found = f"{name} {own[name]}; tested with {tested}"
            rows.append(
                warned(_CHECK, "all ranks", found, f"Install {tested}, or try a short run.")
            )
    if own["python"].rpartition(".")[0] not in TESTED_PYTHON:
        found = f"python {own['python']}; tested with {' and '.join(TESTED_PYTHON)}"
        rows.append(warned(_CHECK, "all ranks", found, f"Use Python {TESTED_PYTHON[0]}."))
    if rows:
        return rows
    found = ", ".join(f"{name} {version}" for name, version in own.items())
    return [passed(_CHECK, "all ranks", found)]


def _names(everyone: Sequence[RankFacts]) -> set[str]:
    return {name for facts in everyone for name in facts.versions}


def _compare(name: str, everyone: Sequence[RankFacts]) -> list[Row]:
    """Return a row if ranks have different versions of something."""
    holders: dict[str, list[RankFacts]] = {}
    for facts in everyone:
        holders.setdefault(facts.versions.get(name, "missing"), []).append(facts)
    if len(holders) == 1:
        return []
    parts = [
        f"{version} on {join_nodes(list(dict.fromkeys(facts.node for facts in group)))} "
        f"(rank {group[0].rank}{', ...' if len(group) > 1 else ''})"
        for version, group in holders.items()
    ]
    remedy = "Start the same environment on all nodes."
    return [failed(_CHECK, "all ranks", f"{name}: {'; '.join(parts)}", remedy)]


def check_gpus(everyone: Sequence[RankFacts], ranks_per_node: int | None) -> list[Row]:
    """Return a row on the GPUs of each node.

    Args:
        ranks_per_node: that training will start; None if that is not known.
    """
    rows = []
    most = max(facts.num_gpus for facts in everyone)
    for facts in {each.node: each for each in reversed(everyone)}.values():
        found = f"{facts.num_gpus} GPUs" if facts.num_gpus else "no GPU: training runs on the CPU"
        if facts.num_gpus < most:
            remedy = "Look at nvidia-smi there, or leave the node out."
            row = failed("gpus", facts.node, f"{found}; other nodes have {most}", remedy)
        elif not facts.num_gpus:
            row = warned(
                "gpus", facts.node, found, "Look for GPUs with nvidia-smi, unless you mean it."
            )
        elif "+cpu" in facts.versions.get("torch", ""):
            found = f"{found}, and torch {facts.versions['torch']}, which uses none"
            row = failed("gpus", facts.node, found, "Install a build of torch for CUDA.")
        elif ranks_per_node is not None and facts.num_gpus < ranks_per_node:
            found = f"{found} for {ranks_per_node} ranks of a node"
            row = failed("gpus", facts.node, found, "Start as many ranks as there are GPUs.")
        else:
            row = passed("gpus", facts.node, found)
        rows.append(row)
    return rows[::-1]
