"""Stand-in for CUDA graphs of Transformer Engine: operations are recorded, and run again without Python.

A graph here is the list of torch's operations that one pass has run, with the tensors that it has used. To
replay it is to run these operations again on the same memory: no module, no hook and no code of Megatron or
moe_ft runs, inputs are copied in, and what is added to a tensor outside of the graph is added by each replay.
As with CUDA, what is captured has no effect when it is captured, may not wait for the device (`item`, sizes
that depend on data), and is prepared by passes whose results nobody reads.

`make_graphed_callables` has the arguments that Megatron gives the one of Transformer Engine, and returns one
callable for each layer and micro-batch in the same order. All around it is Megatron's own.

Only a GPU shows whether the capture itself succeeds (other threads, allocations, streams), and whether
kernels compute the same bits in a graph.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import pretrain_gpt_moe

_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
_is_capturing = False


class Graph(TorchDispatchMode):
    """Operations of one pass, which run while this is entered and have no effect on what was there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()  # storages
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> "Graph":
        global _is_capturing
        _is_capturing = True
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        global _is_capturing
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _is_capturing = False
        for tensor, value in self._before.values():
            tensor.copy_(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        assert name not in _WAITS, f"{name} waits for the device, in a capture"
        for given, of_schema in zip(args, func._schema.arguments, strict=False):
            if of_schema.alias_info is not None and of_schema.alias_info.is_write:
                for tensor in tree_leaves(given):
                    place = tensor.untyped_storage().data_ptr()
                    if place not in self._made and tensor.data_ptr() not in self._before:
                        self._before[tensor.data_ptr()] = tensor, tensor.clone()
        result = func(*args, **kwargs)
        self._made |= {
            each.untyped_storage().data_ptr()
            for each in tree_leaves(result)
            if isinstance(each, torch.Tensor)
        } - {
            each.untyped_storage().data_ptr()
            for each in tree_leaves((args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        self._operations.append((func, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again, into the same memory."""
        for func, args, kwargs, result in self._operations:
            if any(
                each.alias_info and not each.alias_info.is_write for each in func._schema.returns
            ):
                continue  # a view of memory that stays
            new = tree_leaves(func(*args, **kwargs))
            for old, each in zip(tree_leaves(result), new, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != each.data_ptr():
                    old.copy_(each)


class _Pass:
    """Forward and backward of a layer for one micro-batch, captured."""

    def __init__(self, layer: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._names = list(kwargs)
        self._inputs: list[torch.Tensor] = tree_leaves((list(args), list(kwargs.values())))
        self._forward, self._backward = Graph(), Graph()
        with self._forward:
            found = layer(*args, **kwargs)
        outputs, self._spec = tree_flatten(found)
        self._outputs = [each.detach() for each in outputs]
        with_grad = [each for each in outputs if each.requires_grad]
        self._has_grad = [each.requires_grad for each in outputs]
        self._given = [torch.empty_like(each) for each in with_grad]
        self._parameters = [each for each in layer.parameters() if each.requires_grad]
        own = [each for each in self._inputs if each.requires_grad]
        with self._backward:
            grads = torch.autograd.grad(
                with_grad, [*own, *self._parameters], self._given, allow_unused=True
            )
        of_inputs = iter(grads[: len(own)])
        self._of_inputs = [next(of_inputs) if each.requires_grad else None for each in self._inputs]
        pairs = zip(self._parameters, grads[len(own) :], strict=True)
        used = [(each, grad) for each, grad in pairs if grad is not None]
        self._parameters = [each for each, _ in used]
        self._of_parameters = [grad for _, grad in used]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward pass, and the backward pass when its gradients are there."""
        own = self
        given = tree_leaves((list(args), [kwargs[name] for name in self._names]))

        class Graphed(torch.autograd.Function):  # as that of Transformer Engine
            @staticmethod
            def forward(ctx: Any, *tensors: torch.Tensor) -> Any:
                for static, each in zip(own._inputs, tensors, strict=False):
                    static.detach().copy_(each)
                own._forward.replay()
                results = tuple(each.detach().clone() for each in own._outputs)
                pairs = zip(results, own._has_grad, strict=True)
                ctx.mark_non_differentiable(*(each for each, has_grad in pairs if not has_grad))
                return results

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                pairs = zip(grads, own._has_grad, strict=True)
                for static, each in zip(own._given, (g for g, has in pairs if has), strict=True):
                    static.zero_() if each is None else static.copy_(each)
                own._backward.replay()
                found = (*own._of_inputs, *own._of_parameters)
                return tuple(None if each is None else each.clone() for each in found)

        function: Any = Graphed
        return tree_unflatten(function.apply(*given, *self._parameters), self._spec)

    def reset(self) -> None:
        """Let go of the graphs."""
        self._forward, self._backward = Graph(), Graph()


def make_graphed_callables(
    modules: tuple[torch.nn.Module, ...],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Sequence[dict[str, Any]] | None = None,
    fp8_enabled: bool = False,
    retain_graph_in_backward: bool = False,
    _order: Sequence[int] | None = None,
    _num_layers_per_chunk: Sequence[int] = (),
    _reuse_graph_input_output_buffers: bool = False,
) -> list[Callable[..., Any]]:
    """Return what replays each layer in each micro-batch."""
    torch.cuda.is_current_stream_capturing = lambda: _is_capturing
    assert not fp8_enabled and all(module._forward_hooks == {} for module in modules)
    num_microbatches = len(sample_args) // len(modules)
    order, first = [], 0
    for count in _num_layers_per_chunk:
        order += [first + each for _ in range(num_microbatches) for each in range(count)]
        first += count
    graphs: list[Callable[..., Any]] = []
    for index, args in zip(order, sample_args, strict=True):
        kwargs = {} if sample_kwargs is None else sample_kwargs[len(graphs)]
        for _ in range(num_warmup_iters):
            outputs = tree_leaves(modules[index](*args, **kwargs))
            own = [each for each in modules[index].parameters() if each.requires_grad]
            with_grad = [each for each in outputs if each.requires_grad]
            given = [torch.ones_like(each) for each in with_grad]
            torch.autograd.grad(with_grad, own, given, allow_unused=True)
        graphs.append(_Pass(modules[index], args, kwargs))
    return graphs


def install() -> None:
    """Have Megatron find the stand-in where it looks for Transformer Engine's graphs."""
    graphs: Any = importlib.import_module("megatron.core.transformer.cuda_graphs")
    layers: Any = importlib.import_module("megatron.core.transformer.transformer_layer")
    graphs.HAVE_TE_GRAPHS, graphs.make_graphed_callables = True, make_graphed_callables
    for module in (graphs, layers):
        module.is_te_min_version = lambda *args, **kwargs: True
    randoms: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    track = randoms.initialize_rng_tracker

    def track_states(use_te: bool = False, inference: bool = False, *_: Any, **kwargs: Any) -> Any:
        return track(use_te, inference, **{**kwargs, "use_cudagraphable_rng": False})

    randoms.initialize_rng_tracker = (
        track_states  # generators of a GPU; nothing random is captured here
    )
    find = layers.TransformerLayer._get_te_cuda_graph_replay_args
    names = ("transformer_engine", "transformer_engine.pytorch")
    modules = {name: ModuleType(name) for name in names}

    def with_package(*args: Any, **kwargs: Any) -> Any:
        sys.modules.update(modules)  # it imports that, and uses nothing of it
        try:
            return find(*args, **kwargs)
        finally:
            for name in names:
                del sys.modules[name]

    layers.TransformerLayer._get_te_cuda_graph_replay_args = with_package


def train_with_graphs(flags: list[str]) -> None:
    """Run pretrain_gpt_moe.py with the stand-in."""
    install()
    pretrain_gpt_moe.main(flags)
