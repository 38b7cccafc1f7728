"""Progress of a run in the event log: its start, its iterations, its end, and the phases between."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args

from megatron.fault_tolerance.seams.listeners import (
    Built,
    EndedIteration,
    LoopListener,
    LoopState,
)
from moe_ft.config.config import MoeFtConfig
from moe_ft.events import EventLog, last_incarnation
from moe_ft.faults import Phase


class Progress(LoopListener):
    """Opens the event log and writes what every run writes. Owned by the training thread."""

    def __init__(self, config: MoeFtConfig, loop: LoopState, event_log: EventLog) -> None:
        self._config, self._loop, self._log = config, loop, event_log
        self._has_log = config.observability.event_log is not None

    def after_setup(self, built: Built) -> None:
        """Open the log under the same incarnation on all ranks. Called by all ranks."""
        if not self._has_log:
            return
        log = self._log
        # A rank may have died before it wrote a line: all ranks agree on the highest count.
        incarnation = torch.tensor(last_incarnation(log.directory, log.rank) + 1, device="cuda")
        dist.all_reduce(incarnation, op=dist.ReduceOp.MAX)
        log.start()
        log.incarnation = int(incarnation)

    def after_recovery(self) -> None:
        """Write the event "start"."""
        if self._has_log:
            self._log.write("start", self._loop.iteration, **self._start_fields(get_args()))

    def _start_fields(self, args: Any) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "world_size": args.world_size,
            "tp": args.tensor_model_parallel_size,
            "pp": args.pipeline_model_parallel_size,
            "ep": args.expert_model_parallel_size,
            "etp": args.expert_tensor_parallel_size,
            "dp": args.data_parallel_size,
            "seq_length": args.seq_length,
            "num_experts": args.num_experts,
            "train_iterations": args.train_iters,
            "state_dtype": dict(self._config.precision.packings),
            "lossy": dict(self._config.precision.lossy_parts),
        }

    def enter_phase(self, iteration: int, phase: Phase) -> None:
        """Overwrite the progress record, which survives the process."""
        self._log.progress(iteration, phase)

    def after_iteration(self, ended: EndedIteration) -> None:
        """Write the event "iteration"."""
        if not self._has_log:
            return  # reading a loss waits for the GPU
        loss = ended.losses.get("lm loss")
        self._log.write(
            "iteration",
            ended.iteration,
            iteration_s=ended.seconds,
            stall_s=self._loop.stall_s,
            loss=None if loss is None else float(loss),
            num_tokens=ended.num_samples * get_args().seq_length,
        )

    def end(self, reason: str, exit_code: int) -> None:
        """Write the event "end"."""
        # On a CPU this is the largest resident set, see cpu/device.py.
        peak_bytes = torch.cuda.max_memory_allocated()
        if not self._loop.is_saved:
            reason += ", the last state is not on storage"
        self._log.write(
            "end", self._loop.iteration, reason=reason, peak_device_memory_bytes=peak_bytes
        )

    def close(self) -> None:
        """Close the event log."""
        self._log.close()
