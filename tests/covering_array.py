"""Factors of the runs with faults: what a run trains, how it is checkpointed, and its two faults.

The runs are a pairwise covering array over these factors. `make test` runs a share of them, `make test-all`
the rest. `python -m tests.covering_array` chooses the runs again and writes covering_array.txt. The flags of
a run, and what is checked, are in faulty_case.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_ft.faults import BACKGROUND_PHASES, FAULT_PHASES, ITERATION_PHASES, Phase
from tests.covering import Pair, Space, Values

# The state that each fault strikes. The third window of 3 is under way when training ends.
NUM_ITERATIONS, FAULT_ITERATIONS = 8, (5, 7)
NUM_EXPERTS = 4

# (ranks, sizes)
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "ep2": (2, {"ep": 2}),
    "virtual-pp2": (2, {"pp": 2}),
    "tp2": (2, {"tp": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "ep2-dp2": (4, {"ep": 2}),
    "pp2-ep2": (4, {"pp": 2, "ep": 2}),
    "tp2-ep2": (4, {"tp": 2, "ep": 2}),
    "tp4": (4, {"tp": 4}),
    "pp2-ep2-dp2": (8, {"pp": 2, "ep": 2}),
    "tp2-pp2-ep2": (8, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "dense-1": ("--moe-ft-strategy", "dense"),
    "dense-2": ("--moe-ft-strategy", "dense", "--moe-ft-interval", "2"),
    **{
        f"sparse-{window}": ("--moe-ft-strategy", "sparse", "--moe-ft-window", window)
        for window in ("1", "2", "3", "auto")
    },
    # Loses tokens, which are counted again.
    "partial-1": (
        *("--moe-ft-strategy", "partial", "--moe-ft-interval", "2", "--moe-ft-router-log"),
        *("--moe-ft-k-snapshot", "1"),
    ),
    # Every expert in every snapshot: exact.
    "partial-4": (
        *("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "4", "--moe-ft-k-persist", "4"),
    ),
    # Room for every expert, and peers follow all of them by gradients: exact.
    "selective-followed": (
        *("--moe-ft-strategy", "selective", "--moe-ft-local-budget", "1GB"),
        *("--moe-ft-remote-budget", "1GB", "--moe-ft-replicate", "gradients"),
        *("--moe-ft-interval", "1"),
    ),
}
ORDERS: dict[str, tuple[str, ...]] = {
    "fixed": (),
    **{
        order: ("--moe-ft-unit-order", order, "--moe-ft-reorder-change", "0")
        for order in ("count", "soft-count", "decayed")
    },
    "sequential": ("--moe-ft-selection", "sequential"),
    "load-aware": ("--moe-ft-selection", "load-aware"),
}
PACKINGS: dict[str, tuple[str, ...]] = {
    "unpacked": (),
    "packed": ("--moe-ft-staging-bytes", "1MiB"),
    "split": ("--moe-ft-state-dtype", "master=split", "--moe-ft-staging-bytes", "1MiB"),
}
# Things that a run leaves for its recovery, besides windows.
LEFT: dict[str, tuple[str, ...]] = {
    "windows": (),
    "breakpoints": ("--moe-ft-breakpoints",),
    "logs": ("--moe-ft-breakpoints", "--moe-ft-upstream-log"),
}
KINDS = ("kill", "kill-two", "exception", "lose-node")
# The tier that a fault leaves to the ranks that lose something; "nothing" if it costs a snapshot at most.
TIERS = ("memory", "peer", "storage", "nothing")
MODELS = ("moe", "expert-bias", "tied", "no-experts", "deepseek", "grouped-query")
FEATURES = (
    *("dropout", "ramp", "recompute", "selective", "overlap", "evaluation", "reruns"),
    "slots",
)

RUN_FACTORS: dict[str, tuple[str, ...]] = {
    "strategy": tuple(STRATEGIES),
    "order": tuple(ORDERS),
    "layout": tuple(LAYOUTS),
    "packing": tuple(PACKINGS),
    "precision": ("bf16", "fp16", "fp32"),
    "optimizer": ("distributed", "replicated"),
    "model": MODELS,
    "feature": FEATURES,
    "left": tuple(LEFT),
}
FAULT_FACTORS: dict[str, tuple[str, ...]] = {
    "kind": KINDS,
    "phase": tuple(phase.value for phase in FAULT_PHASES),
    "tier": TIERS,
}
# Those of the faults come first: they exclude each other, which then shows at once.
FACTORS = {
    f"{name} {step}": values for step in (1, 2) for name, values in FAULT_FACTORS.items()
} | RUN_FACTORS


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fault of a run.

    Attributes:
        victim: the rank that it strikes.
        iteration: the state at which it strikes, or after it.
    """

    kind: str
    phase: str
    tier: str
    victim: int
    iteration: int

    @property
    def is_costly(self) -> bool:
        return self.tier != "nothing"

    def __str__(self) -> str:
        return f"{self.kind}-{self.phase}-{self.tier}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One run with two faults."""

    layout: str
    strategy: str
    order: str
    packing: str
    precision: str
    optimizer: str
    model: str
    feature: str
    left: str
    faults: tuple[Fault, Fault]

    def __str__(self) -> str:
        names = [getattr(self, name) for name in RUN_FACTORS]
        return "_".join([*names, *map(str, self.faults)])

    @property
    def world_size(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def ep_size(self) -> int:
        """Ranks over which experts are divided; with slots each has a part of all of them."""
        return 1 if self.feature == "slots" else LAYOUTS[self.layout][1].get("ep", 1)

    @property
    def family(self) -> str:
        return family_of(self.strategy)

    @property
    def is_exact(self) -> bool:
        """True if nothing may be lost."""
        return self.strategy != "partial-1"

    @property
    def has_breakpoints(self) -> bool:
        """True if a recovery may be to a newer state than that of the windows."""
        return self.left != "windows"

    @property
    def window(self) -> int | None:
        """Snapshots that make a window, None for automatic."""
        if self.family != "sparse":
            return 1
        length = self.strategy.partition("-")[2]
        return None if length == "auto" else int(length)


def family_of(strategy: str) -> str:
    """Return the name of a strategy without its setting."""
    return strategy.partition("-")[0]


def mode_of(strategy: str) -> str:
    """Return the name of a strategy, and another one for sparse if its windows have one snapshot.

    Where every expert has room, two strategies have the same in memory.
    """
    if strategy == "selective-followed":
        return "partial"
    is_single = strategy in ("sparse-1", "sparse-auto")  # a fast machine has automatic windows of 1
    return "single" if is_single else family_of(strategy)


def case_of(values: Values) -> Case:
    faults = [
        Fault(
            kind=values[f"kind {step}"],
            phase=values[f"phase {step}"],
            tier=values[f"tier {step}"],
            victim=2 - step,
            iteration=1 if is_in_recovery(values[f"phase {step}"]) else FAULT_ITERATIONS[step - 1],
        )
        for step in (1, 2)
    ]
    named = {name: values[name] for name in RUN_FACTORS}
    return Case(**named, faults=(faults[0], faults[1]))


def views(values: Values) -> list[Values]:
    """Return what the run shows with its first fault, and with its second.

    What a recovery is from is checked less strictly if there are breakpoints: such a run only shows how they
    go with each other value.
    """
    run = {name: values[name] for name in RUN_FACTORS if name in values}
    if "strategy" in run:
        run["mode"] = mode_of(run["strategy"])
    found: list[Values] = [
        {**run, **{n: values[f"{n} {step}"] for n in FAULT_FACTORS if f"{n} {step}" in values}}
        for step in (1, 2)
    ]
    left = run.get("left", "windows")
    if left == "windows":
        return found
    return [{"left": left, name: value} for view in found for name, value in view.items()]


def is_in_recovery(phase: str | None) -> bool:
    """Return whether a phase is one of a recovery, so that there must have been a fault before."""
    return phase in (Phase.RECOVERY, Phase.REPLAY)


Rule = Callable[[Mapping[str, str | None]], bool]
# Each returns whether the values of a run exclude each other. Absent values, None, exclude nothing.
RULES: tuple[Rule, ...] = (
    # The order and the selection are settings of one strategy each.
    lambda run: (
        run["strategy"] is not None
        and run["order"] is not None
        and run["order"] not in _orders_of(run["strategy"])
    ),
    lambda run: run["packing"] == "split" and run["precision"] in ("fp16", "fp32"),
    # Gradients lead to state that is not packed.
    lambda run: run["packing"] == "split" and run["strategy"] == "selective-followed",
    lambda run: run["model"] == "no-experts" and _rotates(run["strategy"]),
    # There are only two heads of keys.
    lambda run: run["model"] == "grouped-query" and run["layout"] == "tp4",
    # Its training is counted in samples, and its batches cannot grow.
    lambda run: run["model"] == "grouped-query" and run["feature"] == "ramp",
    # Megatron counts the tokens of an iteration that it runs again twice, and does not run the first one of
    # a start again.
    lambda run: run["feature"] == "reruns" and run["model"] in ("expert-bias", "deepseek"),
    # Slots need experts, in layers that Megatron builds from the spec of the model.
    lambda run: run["feature"] == "slots" and run["model"] in ("no-experts", "deepseek"),
    # Its tokens are counted again from windows.
    lambda run: run["left"] not in (None, "windows") and run["strategy"] == "partial-1",
    # Logs are of stages, for exact strategies with windows of a known length.
    lambda run: run["left"] == "logs" and "pp2" not in (run["layout"] or "pp2"),
    lambda run: (
        run["left"] == "logs"
        and run["strategy"] is not None
        and (_rotates(run["strategy"]) or run["strategy"] == "sparse-auto")
    ),
)
_BACKGROUND = tuple(phase for phase in BACKGROUND_PHASES if not is_in_recovery(phase))
FAULT_RULES: tuple[Rule, ...] = (
    # An exception on a thread other than that of training costs what the thread does.
    lambda run: (
        run["kind"] is not None
        and run["phase"] is not None
        and run["tier"] is not None
        and (run["tier"] == "nothing")
        != (run["kind"] == "exception" and run["phase"] in _BACKGROUND)
    ),
    lambda run: run["tier"] == "nothing" and run["kind"] not in (None, "exception"),
    lambda run: run["tier"] == "nothing" and run["phase"] not in (None, *_BACKGROUND),
    lambda run: run["kind"] == "lose-node" and run["tier"] == "memory",
    lambda run: (
        run["phase"] == Phase.REPLAY and run["strategy"] not in (None, "sparse-2", "sparse-3")
    ),
    # Its tokens are counted again from whole snapshots, of which no part has failed.
    lambda run: run["strategy"] == "partial-1" and run["phase"] not in (None, *ITERATION_PHASES),
    lambda run: run["strategy"] == "partial-1" and run["tier"] not in (None, "memory", "peer"),
)


def _rotates(strategy: str | None) -> bool:
    return family_of(strategy or "") in ("partial", "selective")


def _orders_of(strategy: str) -> tuple[str, ...]:
    if strategy.startswith("dense") or strategy in ("sparse-1", "partial-4", "selective-followed"):
        return ("fixed",)
    if strategy.startswith("partial"):
        return ("sequential", "load-aware")
    return ("count", "soft-count", "decayed")


def is_possible(values: Values) -> bool:
    run = dict.fromkeys(FACTORS) | dict(values)
    if any(rule(run) for rule in RULES):
        return False
    for step in (1, 2):
        named = {name: run[f"{name} {step}"] for name in FAULT_FACTORS}
        if any(rule({**run, **named}) for rule in FAULT_RULES):
            return False
    if is_in_recovery(run["phase 1"]) or run["tier 1"] == run["tier 2"] == "nothing":
        return False
    # A rank that fails with an exception leaves a breakpoint too: nothing is run again. From logs only the
    # stage of the first victim runs again.
    is_never_replayed = (run["left"] not in (None, "windows") and run["kind 1"] == "exception") or (
        run["left"],
        run["layout"],
    ) == ("logs", "virtual-pp2")
    if run["phase 2"] == Phase.REPLAY and is_never_replayed:
        return False
    # A second fault in a recovery strikes the one from the first, whose source stays.
    return not is_in_recovery(run["phase 2"]) or run["tier 1"] in (None, "memory")


def cost(values: Values) -> float:
    """Return the relative time of a run: tensor-parallel ranks exchange most, and all share a few cores."""
    num_ranks, sizes = LAYOUTS[values["layout"]]
    return (1 + num_ranks) * float(sizes.get("tp", 1) ** 0.5)


SPACE = Space(factors=FACTORS, is_possible=is_possible, views=views, cost=cost)
_SLOWEST = {"tp2-pp2-ep2", "tp4"}  # take very long on two cores
_NOT_IN_SHARE = {*_SLOWEST, "pp2-ep2-dp2"}  # too slow on two cores for `make test`


def is_important(pair: Pair) -> bool:
    """Return whether `make test` shows the pair: each value, and each mode with all that changes its bytes.

    Each mode meets each kind of fault in each phase in the simulation.
    """
    values = dict(pair)
    if not _NOT_IN_SHARE.isdisjoint(values.values()):
        return False
    if len(values) == 1:
        return True
    mode = values.get("mode")
    factors = {"tier", "precision", "packing", "optimizer"}
    return mode not in (None, "single") and not factors.isdisjoint(values)


# One run per line: its target of make, then its values in the order of FACTORS.
TABLE = Path(__file__).with_name("covering_array.txt")


def tabulate() -> str:
    """Choose all runs, then those of `make test` among them, and return the table of them."""
    important = list(filter(is_important, SPACE.examples))
    first = SPACE.cover(important)
    found = [*first, *SPACE.cover(SPACE.examples, first)]
    share = SPACE.choose(important, found)
    lines = [("test", run) for run in share]
    lines += [("test-all", run) for run in found if run not in share]
    rows = [(target, *(run[name] for name in FACTORS)) for target, run in lines]
    return "".join(" ".join(row) + "\n" for row in rows)


def runs(target: str | None = None) -> list[Values]:
    """Return the runs in the table, or those that it gives to `test` or to `test-all`."""
    rows = [line.split() for line in TABLE.read_text().splitlines()]
    return [
        dict(zip(FACTORS, values, strict=True))
        for own_target, *values in rows
        if target in (None, own_target)
    ]


def repaired_cases() -> list[Case]:
    """Return a few runs of the table that together show each value of a run, with ranks to be replaced.

    Both faults become kills in an iteration: what else the table has ends a start. So do kills before each
    expert was saved, and after evaluations that draw random numbers.
    """
    left_out = {*_SLOWEST, "partial-1", "evaluation"}
    candidates = [run for run in runs() if left_out.isdisjoint(run.values())]
    missing = {(name, run[name]) for run in candidates for name in RUN_FACTORS}
    found = []
    while missing:
        best = max(candidates, key=lambda run: len(missing & run.items()))
        missing -= best.items()
        found.append(case_of({**best, **_killed(best, 1), **_killed(best, 2)}))
    return found


def _killed(run: Values, step: int) -> dict[str, str]:
    phase = run[f"phase {step}"]
    return {
        f"kind {step}": "kill",
        f"tier {step}": "memory",
        f"phase {step}": phase if phase in ITERATION_PHASES else Phase.BACKWARD.value,
    }


if __name__ == "__main__":
    TABLE.write_text(tabulate())
