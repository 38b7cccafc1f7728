"""A training loop on `megatron.core`: its links, and iterations run again with values that only records hold.

Forward, backward and the optimizer step run as they are, without timers, overlap and checks. Where some
stages run them alone, a collective of the whole job on one of a few tensors is answered from the numbers of
the iteration: which gradients are not finite, and the number of tokens. Any other one that would reach a rank
outside raises an error, since nobody would answer it. Point-to-point transfers are pipeline_tap.py's, the
order of the iterations is moe_ft/loop/resumption.py's.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, override

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from megatron.fault_tolerance.seams import collectives, pipeline_tap
from megatron.fault_tolerance.seams.patching import Patches
from megatron.fault_tolerance.seams.refusals import has_graphs
from megatron.fault_tolerance.seams.stack import FINALIZE, Function, Layer, Layers
from megatron.fault_tolerance.seams.versions import setting
from moe_ft.errors import UnrecoverableError
from moe_ft.format.records import Counted, JobNumbers, numbers_of
from moe_ft.loop.training_loop import LoopParts, RecordSend, RunAgain, TrainingLoop
from moe_ft.recovery.borders import Borders
from moe_ft.state.freezing import Freezing
from moe_ft.state.parameters import LocalParameter
from moe_ft.state.tensors import all_optimizers, inner_optimizers, layer_wise_chains
from moe_ft.units import UnitId, UnitKind


def can_freeze(config: Any, unit: UnitId) -> bool:
    """Return whether the weight gradients of a unit are computed where autograd expects it.

    Otherwise it also gets gradients where it is frozen, and the replay drops them. A CUDA graph computes
    those that it was captured with; one that is captured in a replay has to compute all.
    """
    if has_graphs(config):
        modules = getattr(config, "cuda_graph_modules", None) or ()  # of a layer; none for all
        in_graph = {getattr(each, "name", each) for each in modules}
        if unit.kind is not UnitKind.EXPERT or not in_graph or "moe" in in_graph:
            return False
    computes_them_later = any(
        getattr(config, name, False)
        for name in (
            "delay_wgrad_compute",
            "overlap_moe_expert_parallel_comm",
            "overlap_dispatch_backward_with_experts_wgrad",
            "defer_embedding_wgrad_compute",
        )
    )
    names = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
    shards_weights = any(setting(config, name) > 1 for name in names)
    return not (computes_them_later or shards_weights)


class CoreLoop(TrainingLoop):
    """A loop whose model, optimizer and pipeline are those of `megatron.core`."""

    @abstractmethod
    def run_forward_backward(self, parts: LoopParts, before: Counted, after: Counted) -> None:
        """Run forward and backward of one iteration again, between two states. Called by all ranks.

        Gradients are zero, and ready afterwards.

        Raises:
            ConfigError: if the iteration would not be the same as before.
        """

    @override
    @contextmanager
    def replaying(
        self, parts: LoopParts, parameters: Sequence[LocalParameter], borders: Borders | None
    ) -> Iterator[RunAgain]:
        tp_size = parts.config.tensor_model_parallel_size
        is_possible = partial(can_freeze, parts.config)
        freezing = Freezing(parameters, tp_size=tp_size, is_possible=is_possible)

        def run_again(
            before: Counted,
            after: Counted,
            frozen: frozenset[UnitId],
            before_step: Callable[[], None],
        ) -> bool:
            with _answering(parts, borders, after):
                for chunk in parts.model:
                    chunk.zero_grad_buffer()
                parts.optimizer.zero_grad()
                with freezing.frozen(frozen):
                    self.run_forward_backward(parts, before, after)
                before_step()
                with _logged(parts.optimizer, after, freezing, frozen):
                    has_stepped, *_ = parts.optimizer.step()
            return bool(has_stepped)

        playing = pipeline_tap.playing(borders.player) if borders else nullcontext()
        with _quiet(parts), playing:
            yield run_again
        clear_metrics()

    @override
    def open_links(self, pipeline: Any) -> None:
        pipeline_tap.open_links(pipeline)

    @override
    def recording(self, record: RecordSend) -> AbstractContextManager[None]:
        return pipeline_tap.recording(record)


def clear_metrics() -> None:
    """Forget numbers that the iterations so far have added up for the next log line."""
    get_moe_metrics_tracker().clear()
    MTPLossLoggingHelper.tracker = {}


def _answering(
    loop: LoopParts, borders: Borders | None, after: Counted
) -> AbstractContextManager[None]:
    if borders is None:
        return nullcontext()
    numbers = after if isinstance(after, JobNumbers) else numbers_of(after)
    return answering(loop.optimizer, loop.config, numbers, borders.ranks)


@contextmanager
def _logged(
    optimizer: ChainedOptimizer,
    record: Counted,
    freezing: Freezing,
    frozen: frozenset[UnitId],
) -> Iterator[None]:
    """Make the optimizer use the logged values: frozen units have no gradients to compute them from."""

    def prepare_grads(original: Function) -> bool:
        original()  # its own answer, whether gradients are finite, lacks the frozen units
        return record.grad_norm is None

    def step_with_ready_grads(original: Function) -> bool:
        freezing.drop_gradients(frozen)  # not earlier: clipping needs at least one gradient
        return bool(original())

    def get_grad_norm(_: Function) -> float:
        return float(record.grad_norm or 0.0)

    def compute_grad_norms_by_group() -> dict[str, float]:
        norms = {name: float(norm) for name, norm in record.grad_norms_by_group.items()}
        optimizer.grad_norms_by_group = norms
        return norms

    with Layers() as layers, Patches() as patches:
        functions = {
            "ChainedOptimizer.prepare_grads": prepare_grads,
            "ChainedOptimizer.step_with_ready_grads": step_with_ready_grads,
            "ChainedOptimizer.get_grad_norm": get_grad_norm,
        }
        layers.put(Layer.REPLAY, functions, of=optimizer)
        patches.set(optimizer, "_compute_grad_norms_by_group", compute_grad_norms_by_group)
        yield


@contextmanager
def _quiet(loop: LoopParts) -> Iterator[None]:
    """Turn off timers, checks that need the loop, and overlap, which frozen units would break."""
    with _without_gathering_hooks(loop.model), Patches() as patches:
        configs = {id(each): each for each in _ddp_configs(loop)}.values()
        for config in configs:
            for name in (
                "overlap_grad_reduce",
                "overlap_param_gather",
                "check_for_nan_in_grad",
                "check_for_large_grads",
            ):
                patches.set(config, name, False)
        for name in ("no_sync_func", "grad_sync_func", "param_sync_func", "timers"):
            patches.set(loop.config, name, None)
        optimizers = [*all_optimizers(loop.optimizer)]
        for config in {id(each.config): each.config for each in optimizers}.values():
            patches.set(config, "timers", None)
            patches.set(config, "log_num_zeros_in_grad", False)
            # MXFP8: it stages masters for the gather only where that is not overlapped.
            patches.set(config, "overlap_param_gather", False)
        for chain in layer_wise_chains(loop.optimizer):
            patches.set(chain, "overlap_param_gather", False)
        yield


@contextmanager
def _without_gathering_hooks(model: Iterable[Any]) -> Iterator[None]:
    """Take off the hooks that gather weights before a module runs; Megatron's own loop puts them on later."""
    hooked = [chunk for chunk in model if chunk.remove_forward_pre_hook_handles]
    for chunk in hooked:
        chunk.disable_forward_pre_hook(param_sync=False)
    try:
        yield
    finally:
        for chunk in hooked:
            chunk.enable_forward_pre_hook()


def _ddp_configs(loop: LoopParts) -> Iterator[Any]:
    for chunk in loop.model:
        yield chunk.ddp_config
        for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
            yield group.ddp_config
    for inner in inner_optimizers(loop.optimizer):
        if hasattr(inner, "ddp_config"):
            yield inner.ddp_config


@contextmanager
def answering(
    optimizer: Any, config: Any, numbers: JobNumbers, ranks: frozenset[int]
) -> Iterator[None]:
    """Have an iteration answered that some ranks run again alone; the numbers are of the state at its end."""
    answers = _Answers(optimizer, numbers, ranks)
    with collectives.answering(Layer.REPLAY, answers.answer), Layers() as layers:
        if config.finalize_model_grads_func is not None:
            layers.put(Layer.REPLAY, {FINALIZE: answers.finalize}, of=config)
        yield


class _Answers:
    def __init__(self, optimizer: Any, numbers: JobNumbers, ranks: frozenset[int]) -> None:
        self._numbers = numbers
        self._ranks = ranks
        self._inner = inner_optimizers(optimizer)
        self._num_tokens: torch.Tensor | None = None

    def finalize(
        self, original: Function, model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Note the tensor that gets the number of tokens of the batch."""
        self._num_tokens = num_tokens
        try:
            return original(model, num_tokens, *args, **kwargs)
        finally:
            self._num_tokens = None

    def answer(self, call: collectives.Call) -> Any:
        """Answer a collective, or run it among the ranks.

        Raises:
            UnrecoverableError: if it reaches another rank, or the record lacks the answer.
        """
        tensor = call.given.get("tensor")
        if isinstance(tensor, torch.Tensor) and self._is_known(tensor):
            return None
        if outside := sorted({*call.ranks} - self._ranks):
            raise UnrecoverableError(
                f"{call} cannot be run again by ranks {sorted(self._ranks)} alone: nothing answers for rank "
                f"{outside[0]}. Start again with --moe-ft-recovery global, and report the model's flags"
            )
        return call.run()

    def _is_known(self, tensor: torch.Tensor) -> bool:
        """Give a tensor its value of that time; return False if it has none."""
        if tensor is self._num_tokens:
            if self._numbers.num_tokens is None:
                raise UnrecoverableError(self._lacking("the number of tokens"))
            tensor.fill_(self._numbers.num_tokens)
            return True
        for number, inner in enumerate(self._inner):
            if tensor is getattr(inner, "found_inf", None):
                found = self._numbers.found_inf
                if len(found) != len(self._inner):
                    raise UnrecoverableError(self._lacking("which gradients are not finite"))
                tensor.fill_(float(found[number]))
                return True
        return False

    def _lacking(self, what: str) -> str:
        return f"the record of iteration {self._numbers.iteration} does not have {what}"
