"""A job some of whose ranks share the devices of others (moe_ft/cluster decides), as one rank sees it.

While there are such *guests*, peers run their micro-batches: executor.py takes the place of Megatron's
schedule. All else is as in any job: each rank reduces gradients, steps, evaluates and takes snapshots.
"""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.degraded.executor import Executor, Losses
from megatron.fault_tolerance.degraded.roles import CellBatches, RolePlace, layout_of_job
from megatron.fault_tolerance.degraded.weight_gradients import LateGradients
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.megatron_loop import expert_part_of
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import Function, Layer, Layers
from moe_ft.errors import ConfigError
from moe_ft.loop.listeners import LoopState
from moe_ft.planning.schedules import Role, Schedule, plan_schedule
from moe_ft.saying import say

_UNKNOWN = 1 << 30  # of micro-batches that a rank can hold, before it has run any


class Sharing:
    """Forward and backward passes of one rank, in place of Megatron's. Owned by the training thread."""

    def __init__(
        self,
        data_sets: DataSets,
        loop: LoopState,
        host_rank: int | None = None,
        *,
        is_joining: bool = False,
        late: str = "off",
    ) -> None:
        """Run Megatron's schedule.

        Args:
            loop: is told which ranks are guests.
            host_rank: the rank whose device this one shares; None if it has its own.
            is_joining: whether this process joins a job that trains: it learns of guests in a repair.
            late: value of --moe-ft-late-gradients.
        """
        self._loop = loop
        self._host_rank = host_rank
        self._is_joining = is_joining
        self._late = None if late == "off" else LateGradients()
        self._is_always = late == "always"
        self._batches = CellBatches(data_sets)
        self._links: tuple[Any, Any] = None, None  # groups of all ranks; None is Megatron's
        self._hosts: dict[Role, Role] = {}
        self._planned: dict[int, Schedule] = {}  # by the number of micro-batches
        self._most_more = _UNKNOWN  # micro-batches that this rank can hold beyond those of 1F1B
        self._most_more_of_all = 0
        self._stock: Function | None = None

    def install(self, layers: Layers, patches: Patches) -> None:
        """Stand in for Megatron's schedule in iterations, and prepare the layers of the model."""
        if self._late is not None:
            self._late.install(patches)
        functions = {"train_step": self._train_step, "setup_model_and_optimizer": self._set_up}
        layers.put(Layer.SHARING, functions)

    def begin(self) -> None:
        """Learn who is a guest from now on. Called by all ranks, between iterations."""
        rank, device = dist.get_rank(), torch.cuda.current_device()
        told = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
        told[rank] = 0 if self._host_rank is None else self._host_rank + 1
        dist.all_reduce(told)
        most = torch.tensor(self._most_more, dtype=torch.int64, device=device)
        dist.all_reduce(most, dist.ReduceOp.MIN)
        self._most_more_of_all = 0 if int(most) == _UNKNOWN else int(most)
        hosts = {guest: host - 1 for guest, host in enumerate(told.tolist()) if host}
        self._hosts = layout_of_job(get_args()).hosts_of(hosts)
        self._planned.clear()
        self._loop.shared = tuple(hosts)
        if hosts and rank == 0:
            schedule = self._plan(get_num_microbatches())
            size = schedule.pipelines
            healthy = 3 * (size.num_micro_batches + size.num_stages - 1)
            ranks = ", ".join(map(str, hosts))
            say(
                f"the micro-batches of ranks {ranks} are shared: {schedule.shares.way}. An iteration is "
                f"planned to take {schedule.duration / healthy:.2f} times as long as with all devices"
            )

    def _plan(self, num_micro_batches: int) -> Schedule:
        """Return the schedule of iterations with so many micro-batches, until `begin` is called again."""
        if num_micro_batches not in self._planned:
            self._planned[num_micro_batches] = plan_schedule(
                layout_of_job(get_args()).pipelines(num_micro_batches),
                self._hosts,
                expert_part=expert_part_of(get_args()),
                is_split=self._late is not None,
                most_more_held=self._most_more_of_all,
            )
        return self._planned[num_micro_batches]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward passes of an iteration; arguments and result are those of Megatron's."""
        run = self._stock
        # A stage that runs again alone exchanges nothing with others. All together it takes longer so.
        if (self._hosts or self._is_always) and not self._loop.is_replaying:
            schedule = self._plan(kwargs["num_microbatches"])
            place = RolePlace(layout_of_job(get_args()), dist.get_rank())
            run = Executor(place, schedule, self._batches, self._links, self._late)
        assert run is not None
        before = torch.cuda.memory_allocated()
        losses = run(*args, **kwargs)
        if self._most_more == _UNKNOWN:
            self._note_first(losses, before, kwargs["num_microbatches"])
        return losses

    def _note_first(self, losses: Losses, before: int, num_micro_batches: int) -> None:
        """Note how many more micro-batches this rank could hold than in its first iteration.

        Raises:
            ConfigError: if the loss function returns means.
        """
        if any(each.numel() < 2 for entry in losses for each in entry.values()):
            raise ConfigError(
                "peers cannot share micro-batches: the loss function returns means. Have it return a sum and "
                "the number of its tokens, or give --moe-ft-without-spare crowd."
            )
        layout = layout_of_job(get_args())
        stage = layout.role_of(dist.get_rank())[1]
        held = min(layout.num_stages - stage, num_micro_batches)
        state, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        limit = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        each = (most - before) / held
        # A guest on the same device has its state there too.
        fits = (limit - state - most) / each if limit and each else layout.num_stages
        self._most_more = max(0, min(layout.num_stages, int(fits)))
        if self._is_always and not self._is_joining:
            self.begin()  # all are in their first iteration

    def _train_step(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        self._stock = args[6]  # forward_backward_func
        if self._late is not None:
            self._late.model = args[2]
        return original(*args[:6], self, *args[7:], **kwargs)

    def _set_up(self, original: Function, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not cpu_device.is_active():
            names = "next", "before"
            self._links = tuple(dist.new_group(group_desc=f"moe_ft-{each}") for each in names)
        if not self._is_joining:
            self.begin()
        return result
