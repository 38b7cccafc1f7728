"""Bridge's training loop in the form of Megatron's: functions with layers around them, which repairs call.

Layers and repairs know the functions of `megatron.training.training`, in the form that they have there.
`Dialect` has functions of that form, which end in Bridge's. Those of Bridge are wrapped so that its loop
enters through them:

    Bridge's loop -> wrapped function -> Dialect's function with its layers -> Bridge's function

Bridge's `setup` makes groups, model, optimizer and data in one call. Here data are built after it: a recovery
decides where they begin.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from megatron.core.utils import get_model_config
from megatron.training import global_vars
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fault_tolerance.bridge.loop import BridgeLoop
from megatron.fault_tolerance.bridge.versions import BRIDGE_SEAMS, called
from megatron.fault_tolerance.bridge.view import BridgeArgs
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.stack import of_loop

Function = Callable[..., Any]

# Numbers that forward steps add up for the operations of an iteration, and what they are before it.
_ADDED_UP = {
    "_flops_seqlen_sum": 0,
    "_flops_seqlen_sq_sum": 0,
    "_flops_vision_patches": 0,
    "_flops_cross_seqlen_sum": 0,
    "_flops_cross_seqlen_product_sum": 0,
    "_flops_requires_global_reduce": False,
}
# Functions of one form in both loops: Bridge's name, and Megatron's.
_ALIKE = {
    "save_checkpoint_and_time": "save_checkpoint",
    **{
        name: name
        for name in (
            *("update_pg_timeout", "evaluate_and_print_results", "enable_forward_pre_hook"),
            *("disable_forward_pre_hook", "check_param_hashes_across_dp_replicas"),
        )
    },
}


class Dialect:
    """Functions in the form of `megatron.training.training` for one call of Bridge's `pretrain`.

    Owned by the training thread.
    """

    _seqlen_stats_active = False

    def __init__(self, state: Any, args: BridgeArgs, loop: BridgeLoop) -> None:
        """Wrap nothing yet.

        Args:
            state: Bridge's GlobalState.
        """
        self._state = state
        self._args = args
        self._loop = loop
        self._bridge: dict[str, Function] = {}  # its own functions, by name
        self._given: dict[str, dict[str, Any]] = {}  # arguments of the last call, by function
        self._of_loaders: dict[int, tuple[Any, Any]] = {}  # by data set: how its loader was built
        for bridge, own in _ALIKE.items():
            setattr(self, own, partial(self._end, bridge))

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have Bridge call these functions, and layers put around them."""
        entries: dict[str, Function] = {
            "setup": self._enter_setup,
            "set_jit_fusion_options": self._enter_jit_fusion,
            "train": self._enter_train,
            "train_step": self._enter_train_step,
            "_dummy_train_step": self._enter_dummy_train_step,
            "evaluate": self._enter_evaluate,
            "training_log": self._enter_training_log,
            "build_pretraining_data_loader": self._enter_loader,
            "build_train_valid_test_data_loaders": self._enter_loaders,
            **{bridge: partial(self._enter, own) for bridge, own in _ALIKE.items()},
        }
        with of_loop(self), Patches() as patches:
            patches.set(global_vars, "_GLOBAL_ARGS", self._args)
            patches.set(global_vars, "_GLOBAL_TIMERS", self._state.timers)
            for name, entry in entries.items():
                self._bridge[name] = called(name)
                patches.wrap(*BRIDGE_SEAMS[name].place, entry)
            yield

    def _end(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._bridge[name](*args, **kwargs)

    def _enter(self, name: str, _: Function, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    def _note(self, name: str, args: Any, kwargs: Any) -> dict[str, Any]:
        """Keep the arguments of a call, by the names of the parameters."""
        bound = inspect.signature(self._bridge[name]).bind(*args, **kwargs)
        self._given[name] = given = dict(bound.arguments)
        return given

    def _enter_setup(self, _: Function, *args: Any, **kwargs: Any) -> Any:
        """Have the model built and a state recovered before the iterators of data are made."""
        given = self._note("setup", args, kwargs)
        if self._args.fake_process_group:  # a replacement builds everything alone
            given["restart_store"] = FakeStore()
        self.setup_model_and_optimizer()
        iterators = called("setup_data_iterators")(**self._given["setup_data_iterators"])
        names = ("train_data_iterator", "valid_data_iterator", "test_data_iterator")
        return self._output._replace(**dict(zip(names, iterators, strict=True)))

    def setup_model_and_optimizer(self) -> tuple[Any, Any, Any]:
        """Build everything but the iterators of data."""

        def leave_for_later(**arguments: Any) -> tuple[None, None, None]:
            self._given["setup_data_iterators"] = arguments
            return None, None, None

        with Patches() as patches:
            owner, name = BRIDGE_SEAMS["setup_data_iterators"].place
            patches.set(owner, name, leave_for_later)
            self._output = self._bridge["setup"](**self._given["setup"])
        return self._output.model, self._output.optimizer, self._output.scheduler

    def _enter_jit_fusion(self, _: Function, *args: Any, **kwargs: Any) -> None:
        self._note("set_jit_fusion_options", args, kwargs)
        self.set_jit_fusion_options()

    def set_jit_fusion_options(self) -> None:
        """Compile what the model will call."""
        self._bridge["set_jit_fusion_options"](**self._given["set_jit_fusion_options"])

    def _enter_train(self, _: Function, *args: Any, **kwargs: Any) -> Any:
        given = self._note("train", args, kwargs)
        self._loop.groups = given["pg_collection"]
        model = given["model"]
        return self.train(
            called("prepare_forward_step_func")(given["forward_step_func"], self._state),
            *(model, given["optimizer"], given["scheduler"]),
            *(given["train_data_iterator"], given["valid_data_iterator"]),
            given.get("process_non_loss_data_func"),
            get_model_config(model[0]),
        )

    def train(self, *_: Any) -> Any:
        """Train; Bridge prepares the forward step itself."""
        return self._bridge["train"](**self._given["train"])

    def _enter_train_step(
        self,
        _: Function,
        forward_step: Any,
        data: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        state: Any,
        groups: Any,
        forward_backward: Any,
        links: Any,
    ) -> Any:
        """Run an iteration. The loop counts in the train state, which a repair moves meanwhile."""
        self._loop.groups, self._loop.links = groups, links
        count, iteration = state.train_state, state.train_state.step
        num_operations = count.floating_point_operations_so_far
        result = self.train_step(
            *(forward_step, data, model, optimizer, scheduler, get_model_config(model[0])),
            partial(self._count_operations, forward_backward),
            iteration=iteration,
        )
        count.step, count.floating_point_operations_so_far = iteration, num_operations
        return result

    def train_step(
        self,
        forward_step: Any,
        data: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        config: Any,
        forward_backward: Any,
        iteration: int,
    ) -> Any:
        """Run an iteration of whatever number."""
        groups, links = self._loop.groups, self._loop.links
        own = (self._state, groups, forward_backward, links)
        return self._bridge["train_step"](forward_step, data, model, optimizer, scheduler, *own)

    def _count_operations(self, forward_backward: Function, *args: Any, **kwargs: Any) -> Any:
        """Run forward and backward, and have the operations of this run alone counted.

        Replays and repairs run others in the same call of the loop.
        """
        for name, value in _ADDED_UP.items():
            setattr(self._state, name, value)
        return forward_backward(*args, **kwargs)

    def _enter_dummy_train_step(self, _: Function, state: Any, data: Any, groups: Any) -> None:
        self._loop.groups = groups
        self.dummy_train_step(data)

    def dummy_train_step(self, data_iterator: Any) -> None:
        """Read the batch of an iteration that is skipped."""
        self._bridge["_dummy_train_step"](self._state, data_iterator, self._loop.groups)

    def _enter_evaluate(self, _: Function, *args: Any, **kwargs: Any) -> Any:
        given = self._note("evaluate", args, kwargs)
        prepared = called("prepare_forward_step_func")(given["forward_step_func"], self._state)
        names = ("data_iterator", "model", "process_non_loss_data_func", "config")
        return self.evaluate(prepared, *(given[name] for name in names))

    def evaluate(self, forward_step: Any, *_: Any) -> Any:
        """Evaluate what the last call was about, with this forward step."""
        given = {**self._given["evaluate"], "forward_step_func": forward_step}
        return self._bridge["evaluate"](**given)

    def _enter_training_log(self, _: Function, *args: Any, **kwargs: Any) -> Any:
        return self.training_log(*args, is_first_iteration=False, **kwargs)

    def training_log(self, *args: Any, is_first_iteration: bool, **kwargs: Any) -> Any:
        """Log an iteration; none is special here."""
        return self._bridge["training_log"](*args, **kwargs)

    def _enter_loader(
        self, _: Function, dataset: Any, consumed: int, *args: Any, **kwargs: Any
    ) -> Any:
        self._of_loaders[id(dataset)] = (args, kwargs)
        return self.build_pretraining_data_loader(dataset, consumed)

    def build_pretraining_data_loader(self, dataset: Any, consumed_samples: int) -> Any:
        """Build a loader of a data set that the loop has built one of; a repair builds another."""
        args, kwargs = self._of_loaders[id(dataset)]
        return self._bridge["build_pretraining_data_loader"](
            dataset, consumed_samples, *args, **kwargs
        )

    def _enter_loaders(self, _: Function, *args: Any, **kwargs: Any) -> Any:
        self._note("build_train_valid_test_data_loaders", args, kwargs)
        first, *others = self.build_train_valid_test_data_loaders()
        return first, *(None if each is None else each[0] for each in others)

    def build_train_valid_test_data_loaders(self) -> tuple[Any, ...]:
        """Build all loaders; Megatron's of validation and test are lists."""
        name = "build_train_valid_test_data_loaders"
        first, *others = self._bridge[name](**self._given[name])
        return first, *(None if each is None else [each] for each in others)

    def num_floating_point_operations(self, args: Any, batch_size: int) -> float:
        """Return the operations of one iteration."""
        return float(
            called("num_floating_point_operations")(self._state.cfg, batch_size=batch_size)
        )

    @staticmethod
    def should_disable_forward_pre_hook(args: Any) -> bool:
        """Return whether modules gather weights before they run."""
        is_split = args.use_distributed_optimizer and not args.use_megatron_fsdp
        return bool(is_split and args.overlap_param_gather)
