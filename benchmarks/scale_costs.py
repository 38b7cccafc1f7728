"""Cost of a repair, a start's look and a manifest at sizes that no machine here has, from measured constants.

scale.py prints the table. Measured on this machine: requests of ranks in a round of repairs, what the store's
process needs for one, a message through a group of eight and back, the looks at a node's memory and at
storage, and what rank 0 computes. Calculated: requests and levels at each size. The process of the store has
a core of its own there, and the network adds what it adds.
"""

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch.distributed as dist

from benchmarks.job_store import served
from benchmarks.many_ranks import measure
from benchmarks.output import markdown_table
from megatron.fault_tolerance.repair.store import TorchStore
from moe_ft.engine import exchange
from moe_ft.planning.levels import FAN_OUT, plan_levels

_NUM_CALLS, _NUM_CALLERS = 2000, 8
_NUM_ROUNDS = (
    30  # times that all ranks exchange something in a recovery, counted in a job of 4 ranks
)
_NUM_STAGES = 16
_TIMEOUT = timedelta(seconds=60)
_HEADINGS = (
    *("ranks", "requests", "store s", "exchanges s", "look s", "plan s", "repair s"),
    "manifest s",
)


@dataclass(frozen=True, slots=True)
class Constants:
    """Measured figures.

    Attributes:
        per_rank: requests of a rank in a round of repairs.
        request_s: of the store's process, for a request.
        per_member: requests of a member to make a group of gloo.
        hop_s: for a message up to the leader of a group, and down again.
    """

    per_rank: float
    request_s: float
    per_member: float
    hop_s: float


def measure_constants(num_ranks: int) -> Constants:
    """Measure on this machine."""
    _, repair = measure(num_ranks)
    request_s, per_member = _measure_store()
    return Constants(
        (repair.writes + repair.answers) / num_ranks, request_s, per_member, _measure_hop_s()
    )


def _measure_store() -> tuple[float, float]:
    """Return the seconds of a core for a request, and the requests of a member of a group of gloo."""
    asked = Counter[str]()
    with served("the job's store", 64) as connect:
        (server,) = psutil.Process().children()[-1:]
        stores: list[Any] = [connect() for _ in range(_NUM_CALLERS)]

        def call(store: Any) -> None:
            for _ in range(_NUM_CALLS):
                store.compare_set("key", "-", "-")

        begin_s = sum(server.cpu_times()[:2])
        with ThreadPoolExecutor(_NUM_CALLERS) as pool:
            list(pool.map(call, stores))
        request_s = (sum(server.cpu_times()[:2]) - begin_s) / (_NUM_CALLERS * _NUM_CALLS)
        for store in stores:
            _count(store, asked)
        _make_group(stores)
    return request_s, asked.total() / _NUM_CALLERS


def _count(store: TorchStore, asked: Counter[str]) -> None:
    ask = store._store._ask

    def counting(request: Any) -> Any:
        asked[request.op] += 1
        return ask(request)

    store._store._ask = counting  # type: ignore[method-assign]


def _make_group(stores: Sequence[Any]) -> list[Any]:
    size = len(stores)

    def make(rank: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore("group", stores[rank]), rank, size, _TIMEOUT)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def _measure_hop_s(num_times: int = 200) -> float:
    """Return the seconds for a small message of all members of a group up to its leader, and down again.

    The members are threads here and share cores: the best of many times counts.
    """
    store = dist.HashStore()
    groups = _make_group([store] * FAN_OUT)
    together = threading.Barrier(FAN_OUT)

    def pass_on(rank: int) -> float:
        seconds = []
        for _ in range(num_times):
            together.wait()
            begin_s = time.perf_counter()
            found = exchange.gather(groups[rank], b"x" * 100)
            exchange.scatter(groups[rank], [b"x" * 100] * FAN_OUT if found else [])
            seconds.append(time.perf_counter() - begin_s)
        return min(seconds)

    with ThreadPoolExecutor(FAN_OUT) as pool:
        return max(pool.map(pass_on, range(FAN_OUT)))


@dataclass(frozen=True, slots=True)
class Own:
    """Measured seconds at a size: of rank 0 to plan a recovery, of a start's look, and of a manifest."""

    num_ranks: int
    plan_s: float
    look_s: float
    manifest_s: float


def table(sizes: Sequence[Own], num_counted: int) -> list[str]:
    """Return the constants, and a table of what they make at each size.

    Args:
        num_counted: ranks of the repair in which requests are counted.
    """
    known = measure_constants(num_counted)
    return [
        f"Measured: {known.per_rank:.1f} requests of a rank in a round of repairs of {num_counted} ranks, "
        f"{1e6 * known.request_s:.0f} us of the store's process for each; {known.per_member:.1f} requests "
        f"of a member of a group of gloo; {1e3 * known.hop_s:.2f} ms for {FAN_OUT} messages to a leader "
        "and back",
        "A repair without Megatron's own work. Calculated: requests of the rounds, and of the groups of the "
        f"barrier, the agreement and the sums of {_NUM_STAGES} stages, which are made again; {_NUM_ROUNDS} "
        "exchanges of all ranks, which take all levels up and down. Measured: looks, plans, manifests",
        markdown_table((_row(each, known) for each in sizes), _HEADINGS),
    ]


def _row(own: Own, known: Constants) -> tuple[str, ...]:
    num_ranks = own.num_ranks
    num_stages = min(_NUM_STAGES, max(1, num_ranks // FAN_OUT))
    # Barrier, agreement, and the sums of the stages.
    members = 2 * _num_members(num_ranks) + num_stages * _num_members(num_ranks // num_stages)
    requests = num_ranks * known.per_rank + members * known.per_member
    store_s = requests * known.request_s
    exchanges_s = _NUM_ROUNDS * len(plan_levels(range(num_ranks))) * known.hop_s
    repair_s = store_s + exchanges_s + own.look_s + own.plan_s
    seconds = (store_s, exchanges_s, own.look_s, own.plan_s, repair_s, own.manifest_s)
    return (f"{num_ranks:,}", f"{requests:,.0f}", *(f"{each:.2f}" for each in seconds))


def _num_members(num_ranks: int) -> int:
    """Return the members of all groups of the levels of some ranks."""
    return sum(len(group) for level in plan_levels(range(num_ranks)) for group in level)
