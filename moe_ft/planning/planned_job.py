"""The job that `python -m moe_ft plan` plans: model, ranks, bytes, settings, and what was measured of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moe_ft.config.config import MoeFtConfig
from moe_ft.errors import ConfigError
from moe_ft.planning.boundary_log import PipelineTraffic, most_log_bytes
from moe_ft.planning.interval import CheckpointCost, choose_interval
from moe_ft.planning.model_size import ByteModel, ModelShape
from moe_ft.planning.ownership import SavingLayout
from moe_ft.units import UnitId

_UNPLANNED = {
    "network_bandwidth": "the time to send replicas is not planned",
    "mtbf_s": "the time of a recovery is not planned",
    "restart_s": "the time of a recovery is not planned",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Times and bandwidths that no flag of training gives; None for unknown ones.

    Attributes:
        update_s: its optimizer step, during which no state can be copied.
        bandwidth: from device to host, bytes per second and rank.
    """

    iteration_s: float | None = None
    update_s: float = 0.0
    bandwidth: float | None = None
    network_bandwidth: float | None = None
    storage_bandwidth: float | None = None
    mtbf_s: float | None = None
    restart_s: float = 0.0

    def __post_init__(self) -> None:
        self._check("iteration_s", self.iteration_s, "more than 0 seconds", above=0)
        self._check("mtbf_s", self.mtbf_s, "more than 0 seconds", above=0)
        self._check("restart_s", self.restart_s, "at least 0 seconds")
        self._check("update_s", self.update_s, "at least 0 seconds")
        if self.iteration_s is not None and self.update_s >= self.iteration_s:
            raise ConfigError(
                f"--update-s={self.update_s} must be less than --iteration-s={self.iteration_s}, of which "
                "it is a part. Lower it."
            )
        for name in ("bandwidth", "storage_bandwidth"):
            if getattr(self, name) is not None and self.iteration_s is None:
                flag = flag_of(name)
                raise ConfigError(
                    f"{flag}={getattr(self, name):g} needs --iteration-s: the time of a copy is compared "
                    f"with an iteration. Give it, or leave {flag} out."
                )

    def _check(
        self, name: str, value: float | None, rule: str, *, above: float | None = None
    ) -> None:
        if value is None:
            return
        fits = 0 <= value < math.inf if above is None else above < value < math.inf
        if not fits:
            raise ConfigError(f"{flag_of(name)}={value} must be {rule}. Give a measured value.")

    @property
    def hidden_s(self) -> float:
        """Forward and backward pass of an iteration, during which state can be copied."""
        return (self.iteration_s or 0.0) - self.update_s

    @property
    def budget_bytes(self) -> float | None:
        """Bytes that a rank can copy during forward and backward; None if that is not known."""
        return None if self.bandwidth is None else self.bandwidth * self.hidden_s

    def refuse_unplanned(self, strategy: str) -> None:
        """Raise ConfigError if a value was given that only plans of replays and replicas use."""
        for name, reason in _UNPLANNED.items():
            if getattr(self, name):
                raise ConfigError(
                    f"{flag_of(name)}={getattr(self, name):g} does not go with "
                    f"--moe-ft-strategy={strategy}: {reason}. Leave it out."
                )


def flag_of(name: str) -> str:
    """Return the flag that gives a value, as people write it."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedJob:
    """A training job that need not exist.

    Attributes:
        stages: ``[stage]`` the parameters of its units.
        bucket_parameters: elements that fill a bucket of the distributed optimizer on the first stage
            (--overlap-grad-reduce); None: every buffer is one.
        byte_model: bytes of a parameter.
        train_iterations: of the whole training, None if that is not known.
        active_share: of the experts of a layer, those that a token goes to.
        live_bytes: of a parameter's master weight and moments in training, which breakpoints keep as they
            are.
        traffic: what the pipeline sends in an iteration, if that is logged.
    """

    shape: ModelShape
    stages: tuple[Mapping[UnitId, int], ...]
    layout: SavingLayout
    bucket_parameters: int | None
    byte_model: ByteModel
    config: MoeFtConfig
    ranks_per_node: int
    replication_factor: int
    train_iterations: int | None
    active_share: float
    is_grouped: bool
    measured: Measured
    live_bytes: int = ByteModel().optimizer
    traffic: PipelineTraffic | None = None

    def boundary_bytes(self, longest_window: int) -> int:
        """Return the bytes of the boundary log of the rank with the largest one; 0 without a log."""
        interval = self.config.strategy.interval_iterations
        if self.traffic is None or interval is None:
            return 0
        return most_log_bytes(self.traffic, longest_window=longest_window, interval=interval)

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.layout.dp * len(self.stages)

    @property
    def persists(self) -> bool:
        """True if checkpoints go to storage."""
        return self.config.storage.persists

    @property
    def persist_interval(self) -> int:
        """Snapshots (or windows) for each one that goes to storage."""
        return max(1, self.config.storage.persist_interval)

    def breakpoint_bytes(self, num_parameters: float) -> int:
        """Return the bytes of a rank's breakpoint, whatever format snapshots have; 0 without one."""
        if not self.config.memory.breakpoints:
            return 0
        return math.ceil(num_parameters * self.live_bytes)

    def interval(self, snapshot_bytes: int, persisted_bytes: int) -> int:
        """Return the iterations between snapshots.

        Automatic ones follow from the bandwidths, as if nothing else slowed training down.

        Args:
            snapshot_bytes: that the rank with the most copies.
            persisted_bytes: that it writes to storage.

        Raises:
            ConfigError: if the interval is automatic and the bandwidths are not known.
        """
        given, measured = self.config.strategy.interval_iterations, self.measured
        if given is not None:
            return given
        if measured.iteration_s is None or measured.bandwidth is None:
            raise ConfigError(
                "--moe-ft-interval=auto needs --iteration-s and --bandwidth: the interval follows from the "
                "time of a copy. Give them before the --, or plan with a number."
            )
        copy_s = snapshot_bytes / measured.bandwidth
        persist_s = 0.0
        if measured.storage_bandwidth is not None and self.persists:
            persist_s = persisted_bytes / measured.storage_bandwidth / self.persist_interval
        cost = CheckpointCost(
            iteration_s=measured.iteration_s,
            overhead_s=max(0.0, copy_s - measured.hidden_s),
            completion_s=copy_s + persist_s,
        )
        return choose_interval(cost, self.config.strategy.overhead_limit)
