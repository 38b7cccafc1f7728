"""Everything that stands around a function of Megatron, on one page: who wraps it, and in which order.

A part of the product puts its layer around a function by name; when it does so does not matter. The first
layer wraps the function, and the last one that is taken off puts the original back. versions.py checks that
all functions are there. Not here: what a part *sets* for a while, such as a flag that a replay turns off.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, wraps
from typing import Any, Self

from megatron.fault_tolerance.seams.patching import Patches

Function = Callable[..., Any]


class Layer(StrEnum):
    """Parts of the product that put layers around functions."""

    CHECK = "check"  # iteration_check.py: forward and backward once more
    BETWEEN = "between"  # repair/between.py: logs or evaluates again after a death
    DATA = "data"  # data_sets.py: keeps the data sets
    FAULTS = "faults"  # iteration_seams.py: a fault between the optimizer's step and its copies
    IDLE = "idle"  # pipeline_tap.py: times what a rank waits for
    LISTENERS = "listeners"  # hooks.py, iteration_seams.py: listeners learn where the loop is
    LOG = "log"  # pipeline_tap.py: records what stages send
    PLAN = "plan"  # program/stages.py: builds a job that does not exist
    REPAIR = "repair"  # repair/seam.py: runs an iteration again after a death
    REPLACEMENT = "replacement"  # repair/build.py: does alone what the others did together
    REPLAY = "replay"  # replay.py, pipeline_tap.py: iterations from their records
    SHARING = "sharing"  # degraded/sharing.py: peers run micro-batches of others
    SLOTS = "slots"  # hooks.py: slots of experts
    TOGETHER = "together"  # repair/seam.py: all ranks leave an iteration together


_LOOP, _ARGUMENTS = "megatron.training.training", "megatron.training.arguments"
_OPTIMIZER, _TORCH = "megatron.core.optimizer.optimizer", "torch.distributed"
_DDP = "megatron.core.distributed.distributed_data_parallel"
_CONFIG = "megatron.core.model_parallel_config"
FINALIZE = "ModelParallelConfig.finalize_model_grads_func"
_ANSWERS = "idle replay repair plan"  # collectives.py says what each answers
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather"),
    *("gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
    "scatter",
)
# Module, function, and its layers, the outermost first; none where it is only called.
_PAGE = (
    (_LOOP, "pretrain", ""),
    (_LOOP, "setup_model_and_optimizer", "listeners replacement repair sharing"),
    (_LOOP, "get_megatron_optimizer", ""),
    (_LOOP, "build_train_valid_test_data_loaders", "data"),
    (_LOOP, "build_pretraining_data_loader", "listeners"),
    (_LOOP, "train", "between repair listeners"),
    (_LOOP, "train_step", "sharing repair listeners check replacement together"),
    (_LOOP, "dummy_train_step", "listeners"),
    (_LOOP, "training_log", "listeners between"),
    (_LOOP, "evaluate", "between listeners"),
    (_LOOP, "evaluate_and_print_results", "between"),
    (_LOOP, "save_checkpoint", "listeners"),
    (_LOOP, "update_pg_timeout", "repair"),
    (_LOOP, "set_jit_fusion_options", "replacement"),
    (_LOOP, "disable_forward_pre_hook", "replacement"),
    (_LOOP, "enable_forward_pre_hook", "replacement"),
    (_LOOP, "check_param_hashes_across_dp_replicas", "replacement"),
    (_LOOP, "num_floating_point_operations", ""),
    (_ARGUMENTS, "parse_args", ""),
    (_ARGUMENTS, "add_megatron_arguments", ""),
    # Of objects, each wrapped on its own.
    (_OPTIMIZER, "ChainedOptimizer.zero_grad", "listeners"),
    (_OPTIMIZER, "ChainedOptimizer.prepare_grads", "replay listeners"),
    (_OPTIMIZER, "ChainedOptimizer.get_grad_norm", "replay listeners"),
    (_OPTIMIZER, "ChainedOptimizer.step_with_ready_grads", "replay listeners"),
    (_OPTIMIZER, "ChainedOptimizer.step", "slots"),
    (
        _OPTIMIZER,
        "Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
        "listeners",
    ),
    ("torch.optim", "Optimizer.step", "faults listeners"),
    ("megatron.core.optimizer_param_scheduler", "OptimizerParamScheduler.step", "listeners"),
    (_DDP, "DistributedDataParallel.zero_grad_buffer", "slots"),
    (_DDP, "DistributedDataParallel.start_grad_sync", "slots"),
    (_DDP, "DistributedDataParallel.finish_grad_sync", "slots"),
    (_CONFIG, FINALIZE, "check idle listeners replay"),
    # Of all objects of a class, and others.
    ("megatron.core.rerun_state_machine", "RerunDataIterator.__next__", "listeners"),
    (
        "megatron.core.pipeline_parallel.p2p_communication",
        "P2PCommunicator._communicate",
        "idle replay log",
    ),
    (_TORCH, "recv", "idle"),  # by degraded/executor.py
    # Collectives of torch that Megatron has named when it was imported.
    ("megatron.core.tensor_parallel.mappings", "dist_all_gather_func", "idle"),
    ("megatron.core.tensor_parallel.mappings", "dist_reduce_scatter_func", "idle"),
    ("megatron.core.transformer.cuda_graphs", "_set_capture_start", "listeners"),
    ("megatron.core.transformer.moe.router", "apply_router_token_dropping", ""),
    ("megatron.core.transformer.moe.moe_logging", "get_moe_metrics_tracker", ""),
    (_TORCH, "init_process_group", "replacement repair"),
    (_TORCH, "new_group", "replacement repair"),
    *((_TORCH, name, _ANSWERS) for name in COLLECTIVES),
)
_DATA = "model optimizer opt_param_scheduler"
# By function: its first parameters, which are used by their places.
_FIRST = {
    "pretrain": "cfg_container",
    "train": f"forward_step_func {_DATA} train_data_iterator valid_data_iterator"
    " process_non_loss_data_func config",
    "train_step": f"forward_step_func data_iterator {_DATA} config forward_backward_func",
    "dummy_train_step": "data_iterator",
    "evaluate": "forward_step_func",
    "build_pretraining_data_loader": "dataset consumed_samples",
    "disable_forward_pre_hook": "model_chunks",
    "enable_forward_pre_hook": "model_chunks",
    "num_floating_point_operations": "args batch_size",
    "parse_args": "extra_args_provider",
    "add_megatron_arguments": "parser",
}
# By function: parameters that are used by their names.
_NAMED = {
    "train_step": "iteration",
    "training_log": "is_first_iteration",
    "P2PCommunicator._communicate": "tensor_send_next tensor_send_prev recv_prev recv_next tensor_shape",
    "apply_router_token_dropping": "router_topk capacity_factor drop_policy",
}


_others: list[Any] = []  # who has the functions of another loop than Megatron-LM's, in their form


def loop_functions() -> Any:
    """Return what has the functions of the training loop: Megatron's module, or who stands for it."""
    return _others[-1] if _others else importlib.import_module(_LOOP)


@contextmanager
def of_loop(functions: Any) -> Iterator[None]:
    """Have the functions of another loop wrapped and called, in the form of Megatron's own."""
    _others.append(functions)
    try:
        yield
    finally:
        _others.remove(functions)


@dataclass(frozen=True, kw_only=True)
class Seam:
    """A function that is wrapped or called.

    Attributes:
        module, name: where it is; the name of a method has its class before it.
        first: its first parameters, which are used by their places.
        named: parameters that are used by their names.
        layers: who may wrap it, outermost first.
    """

    module: str
    name: str
    first: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()

    @property
    def place(self) -> tuple[Any, str]:
        """The module or class that has it, and its name there."""
        is_of_loop = self.module == _LOOP
        owner: Any = loop_functions() if is_of_loop else importlib.import_module(self.module)
        *classes, last = self.name.split(".")
        for each in classes:
            owner = getattr(owner, each)
        return owner, last

    def misfit(self) -> str | None:
        """Return what does not fit, with the name of the function; None if it fits."""
        if _others and self.module in (_LOOP, _ARGUMENTS):
            return None  # who has them has checked what they end in
        try:
            found = getattr(*self.place)
        except (ImportError, AttributeError):
            return f"{self.module}.{self.name} is not there"
        if not (self.first or self.named):
            return None
        parameters = inspect.signature(found).parameters
        first = tuple(parameters)[: len(self.first)]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if first != self.first:
            return (
                f"{self.name} begins with ({', '.join(first)}) instead of ({', '.join(self.first)})"
            )
        if missing := [] if takes_any else [each for each in self.named if each not in parameters]:
            return f"{self.name} has no parameter {', '.join(missing)}"
        return None


SEAMS = {
    name: Seam(
        module=module,
        name=name,
        first=tuple(_FIRST.get(name, "").split()),
        named=tuple(_NAMED.get(name, "").split()),
        layers=tuple(map(Layer, layers.split())),
    )
    for module, name, layers in _PAGE
}


class _Wrapped:
    """A function that has layers."""

    def __init__(self, seam: Seam, owner: Any, attribute: str) -> None:
        self._original = getattr(owner, attribute)
        self._patches = Patches()
        self.around: dict[Layer, Function] = {}
        self._seam = seam
        self._place = (owner, attribute)
        self._whole = self._original

        @wraps(self._original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._whole(*args, **kwargs)

        self._patches.set(owner, attribute, call)

    def change(self) -> None:
        """Call the layers that are there now; without any, put the original back."""
        whole = self._original
        for layer in reversed(self._seam.layers):
            if (around := self.around.get(layer)) is not None:
                whole = wraps(whole)(partial(around, whole))
        self._whole = whole  # at once, for other threads
        if not self.around:
            owner, attribute = self._place
            del _wrapped[id(owner), attribute]
            self._patches.__exit__()


_wrapped: dict[tuple[int, str], _Wrapped] = {}  # by owner and attribute, in the whole process


class Layers:
    """Layers that one part of the product puts around functions, and takes off together.

    Owned by the training thread; other threads may call the functions.
    """

    def __init__(self) -> None:
        self._own: list[tuple[_Wrapped, Layer]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        while self._own:
            wrapped, layer = self._own.pop()
            del wrapped.around[layer]
            wrapped.change()

    def put(self, layer: Layer, functions: Mapping[str, Function], of: Any = None) -> Self:
        """Call these instead of functions of Megatron, with what lies below before the arguments.

        Args:
            functions: by the name of the seam.
            of: the object whose functions are wrapped; None for the module or class of each seam.

        Raises:
            ValueError: if the page does not list the layer at a seam, or the function has it already.
        """
        for name, around in functions.items():
            if name not in SEAMS or layer not in SEAMS[name].layers:
                raise ValueError(f"{name} has no layer {layer}: list it in _PAGE of {__name__}")
            owner, attribute = SEAMS[name].place
            owner = owner if of is None else of
            wrapped = _wrapped.get((id(owner), attribute))
            if wrapped is None:
                wrapped = _Wrapped(SEAMS[name], owner, attribute)
                _wrapped[id(owner), attribute] = wrapped
            if layer in wrapped.around:
                raise ValueError(f"{name} has a layer {layer} already")
            wrapped.around[layer] = around
            wrapped.change()
            self._own.append((wrapped, layer))
        return self
