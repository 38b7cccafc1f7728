"""Flags of ``plan --strategy sparse``, checked, and the window that follows from them.

What is printed about it is sparse.py.
"""

import argparse
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_ft.commands.plan.flags import (
    Schedule,
    check_divides,
    check_least,
    read_bandwidth,
    read_byte_model,
    read_layout,
    read_replication,
    read_schedule,
    read_shape,
    refuse_foreign,
)
from moe_ft.errors import ConfigError
from moe_ft.planning.model_size import ByteModel, ModelShape
from moe_ft.planning.ownership import SavingLayout, Sharding
from moe_ft.strategies.sparse.cost import Machine
from moe_ft.strategies.sparse.size import (
    WindowSize,
    choose_length,
    measure_window,
    position_sizes,
    position_work,
    region_bytes,
    stage_units,
)
from moe_ft.strategies.sparse.strategy import MEMORY_MARGIN
from moe_ft.strategies.sparse.windows import PositionSizes

_NUM_ORDERS = 4

# Flags of other strategies: name, the value it has if it was left out, the remedy.
_FOREIGN = (
    ("k_snapshot", None, "the window says how much a snapshot holds"),
    ("k_persist", None, "storage gets whole windows"),
    ("master_always_full", False, "every unit is at FULL once in a window"),
    ("interval", 1, "a window needs a snapshot of every iteration"),
    ("partial_covers", "both", "every unit is at FULL once in a window"),
    ("overlap_grad_reduce", False, "windows are planned for buffers of one bucket, the least even"),
    ("ddp_bucket_size", None, "windows are planned for buffers of one bucket, the least even"),
)


def add_sparse_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only this strategy has."""
    group = parser.add_argument_group("strategy sparse")
    group.add_argument(
        "--window",
        default="auto",
        metavar="N|auto",
        help="snapshots that hold everything once; auto (default): as few as cost no time",
    )
    group.add_argument(
        "--max-window", type=int, default=8, metavar="N", help="longest with auto (default 8)"
    )
    group.add_argument(
        "--network-bandwidth", metavar="BYTES", help="to other nodes, per second and rank"
    )
    group.add_argument(
        "--moe-router-topk", type=int, default=2, metavar="N", help="of a token (default 2)"
    )
    group.add_argument(
        "--moe-grouped-gemm",
        action="store_true",
        help="Transformer Engine's grouped experts: those of a layer on a rank freeze together or not at all",
    )
    group.add_argument("--mtbf-s", type=float, metavar="S", help="mean time between failures")
    group.add_argument(
        "--restart-s",
        type=float,
        default=0.0,
        metavar="S",
        help="from a failure until processes run again (default 0)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SparsePlan:
    """What was asked about sparse windows, checked.

    Attributes:
        window: None for automatic.
        longest: that automatic may choose.
        active_share: of the experts of a layer, those that a token goes to.
        is_grouped: whether a rank's experts of a layer are one module, frozen only as a whole.
        machine: None if no bandwidth was given.
        mtbf_s: None if not given.
    """

    shape: ModelShape
    layout: SavingLayout
    byte_model: ByteModel
    schedule: Schedule
    window: int | None
    longest: int
    num_stages: int
    ranks_per_node: int
    replication_factor: int
    persists: bool
    active_share: float
    is_grouped: bool
    machine: Machine | None
    mtbf_s: float | None
    restart_s: float

    @property
    def num_orders(self) -> int:
        """Orders of the experts that are tried: with one owner of each it makes no difference."""
        is_alike = self.layout.num_groups == 1 or not self.shape.num_moe_layers
        return 1 if is_alike else _NUM_ORDERS

    def stages(self, seed: int = 0) -> list[PositionSizes]:
        """Return ``[stage]`` what ranks save in an order of popularity; training begins with that of 0."""
        return [
            position_sizes(
                each,
                self.layout,
                self.byte_model,
                np.random.default_rng(seed),
                is_grouped=self.is_grouped,
            )
            for each in stage_units(self.shape, self.num_stages)
        ]

    def works(self, seed: int = 0) -> list[npt.NDArray[np.float64]]:
        """Return ``[stage][position]`` the work that freezes there, in the same order."""
        return [
            position_work(
                each,
                self.layout,
                self.active_share,
                np.random.default_rng(seed),
                is_grouped=self.is_grouped,
            )
            for each in stage_units(self.shape, self.num_stages)
        ]

    def choose_window(self) -> tuple[WindowSize, int]:
        """Return the window, and the order of popularity whose largest snapshot is the largest.

        Which experts will be popular has nothing to do with who owns them: orders are drawn.
        """
        orders = [self.stages(seed) for seed in range(self.num_orders)]
        length = self.window
        if length is None:
            assert self.machine is not None
            budget = self.machine.budget_bytes
            length = max(choose_length(stages, budget, self.longest) for stages in orders)
        windows = [measure_window(stages, length) for stages in orders]
        seed = max(range(self.num_orders), key=lambda number: windows[number].largest_bytes)
        return windows[seed], seed

    def reserve(self) -> int:
        """Return the bytes of a region of the rank that needs the most."""
        return region_bytes(
            self.stages(),
            self.window or self.longest,
            MEMORY_MARGIN,
            shortest=self.window or 1,
        )


def read_plan(options: argparse.Namespace) -> SparsePlan:
    """Return what was asked.

    Raises:
        ConfigError: if a flag cannot be, or two do not fit together.
    """
    shape = read_shape(options, least_moe_layers=0)
    layout = read_layout(options, shape)
    _refuse_foreign(options)
    byte_model = _read_bytes(options)
    schedule = read_schedule(options)
    for name in ("pp", "ranks_per_node", "max_window", "moe_router_topk"):
        check_least(options, name, 1)
    check_divides(options, "pp", "num_layers", shape.num_layers)
    if shape.num_moe_layers and options.moe_router_topk > shape.num_experts:
        raise ConfigError(
            f"--moe-router-topk={options.moe_router_topk} must be at most "
            f"--num-experts={shape.num_experts}. Lower it."
        )
    window = _read_window(options)
    replication_factor = read_replication(options)
    machine = _read_machine(options, schedule, window, replication_factor)
    _check_failures(options, machine)
    return SparsePlan(
        shape=shape,
        layout=layout,
        byte_model=byte_model,
        schedule=schedule,
        window=window,
        longest=options.max_window,
        num_stages=options.pp,
        ranks_per_node=options.ranks_per_node,
        replication_factor=replication_factor,
        persists=options.storage or schedule.storage_bandwidth is not None,
        active_share=min(1.0, options.moe_router_topk / shape.num_experts),
        is_grouped=options.moe_grouped_gemm,
        machine=machine,
        mtbf_s=options.mtbf_s,
        restart_s=options.restart_s,
    )


def _refuse_foreign(options: argparse.Namespace) -> None:
    """Raise ConfigError if a flag was given that another strategy needs."""
    refuse_foreign(options, "sparse", _FOREIGN)
    if options.sharding == Sharding.ADAPTIVE:
        raise ConfigError(
            "--sharding=adaptive does not go with --strategy=sparse: every window holds every expert, so "
            "there is nothing to adapt to. Use equal."
        )


def _read_bytes(options: argparse.Namespace) -> ByteModel:
    byte_model = read_byte_model(options)
    if byte_model.weights > byte_model.optimizer:
        raise ConfigError(
            f"--weight-bytes={byte_model.weights} must be at most --master-bytes={byte_model.master} "
            f"plus --moment-bytes={byte_model.moments}: FULL holds those, and COMPUTE, which is to be "
            "smaller, the weights. Lower it; weights that are their own master count as both."
        )
    return byte_model


def _read_window(options: argparse.Namespace) -> int | None:
    """Return the window, None for automatic."""
    text = options.window
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"--window={text} must be a whole number, at least 1, or auto. Give one of them."
        )
    window = int(text)
    if options.train_iters is not None and window > options.train_iters:
        raise ConfigError(
            f"--window={window} must be at most --train-iters={options.train_iters}: a window is of use "
            "when it is complete. Lower it, or use auto."
        )
    return window


def _read_machine(
    options: argparse.Namespace, schedule: Schedule, window: int | None, replication_factor: int
) -> Machine | None:
    network_bandwidth = read_bandwidth(options, "network_bandwidth")
    if schedule.bandwidth is None or schedule.iteration_s is None or schedule.hidden_s is None:
        if window is None:
            raise ConfigError(
                "--window=auto needs --iteration-s and --bandwidth: it is the shortest window whose "
                "snapshots can be copied in an iteration. Give them, or a number with --window."
            )
        return None
    if replication_factor and network_bandwidth is None:
        raise ConfigError(
            f"--replication-factor={options.replication_factor}, that is {replication_factor}, needs "
            "--network-bandwidth: every snapshot goes to as many peers. Give it, or "
            "--replication-factor 0."
        )
    return Machine(
        iteration_s=schedule.iteration_s,
        hidden_s=schedule.hidden_s,
        bandwidth=schedule.bandwidth,
        network_bandwidth=math.inf if network_bandwidth is None else network_bandwidth,
        replication_factor=replication_factor,
    )


def _check_failures(options: argparse.Namespace, machine: Machine | None) -> None:
    if not 0 <= options.restart_s < math.inf:
        raise ConfigError(
            f"--restart-s={options.restart_s} must be at least 0 seconds. Give what a restart takes."
        )
    if options.mtbf_s is None:
        return
    if not 0 < options.mtbf_s < math.inf:
        raise ConfigError(
            f"--mtbf-s={options.mtbf_s} must be more than 0 seconds. Give the mean time between failures."
        )
    if machine is None:
        raise ConfigError(
            f"--mtbf-s={options.mtbf_s} needs --iteration-s and --bandwidth: what a failure costs follows "
            "from them. Give them, or leave --mtbf-s out."
        )
