"""Check of environment variables that matter to recoveries."""

from collections.abc import Mapping, Sequence

from moe_ft.doctor.facts import RankFacts
from moe_ft.doctor.rows import Row, failed, join_nodes, passed, warned

_STORE, _VARIABLES, _HANGS = "shared store", "variables", "hangs"
VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_REMEDY = f"export {VARIABLE}=1 before torchrun starts, with --rdzv-backend c10d."


def check_store(
    environment: Mapping[str, str], *, restarts: bool = False, backend: str | None = None
) -> Row:
    """Return a row on torchrun's store: shared with ranks, it gives restarted ranks addresses of dead ones.

    Args:
        restarts: whether the command of training has --max-restarts.
        backend: its --rdzv-backend; None if it has no torchrun.
    """
    is_disabled = environment.get(VARIABLE) == "1"
    if backend is None:  # the launcher of doctor may also be that of training
        restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        is_shared = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        found = "shared"
    else:
        is_shared = not (is_disabled and backend == "c10d")
        found = f"{VARIABLE}={environment.get(VARIABLE, '')}, --rdzv-backend={backend or 'static'}"
    if restarts and is_shared:
        return failed(_STORE, "torchrun", f"{found}, and --max-restarts is given", _REMEDY)
    if restarts or is_disabled:
        return passed(_STORE, "torchrun", "not shared: ranks can restart")
    return passed(_STORE, "torchrun", f"no --max-restarts, which would need {VARIABLE}=1")


def check_variables(everyone: Sequence[RankFacts]) -> list[Row]:
    """Return rows on variables that differ between ranks, or keep hangs from ending."""
    rows = []
    first = everyone[0]
    for name in sorted({name for facts in everyone for name in facts.variables}):
        others = [
            facts for facts in everyone if facts.variables.get(name) != first.variables.get(name)
        ]
        if others:
            values = [facts.variables.get(name, "not set") for facts in (first, others[0])]
            found = f"{name} is {values[0]} on {first.node} and {values[1]} here"
            nodes = join_nodes(list(dict.fromkeys(facts.node for facts in others)))
            rows.append(warned(_VARIABLES, nodes, found, "Set it the same on all nodes."))
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if first.variables.get(name) == "0":
            found = f"{name}=0: ranks that wait for a lost one never end"
            rows.append(warned(_HANGS, "all nodes", found, f"unset {name}"))
    names = sorted(first.variables)
    return rows or [
        passed(_VARIABLES, "all nodes", f"the same: {', '.join(names) or 'none is set'}")
    ]
