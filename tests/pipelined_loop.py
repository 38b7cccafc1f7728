"""The loop of examples/custom_loop.py in two pipeline stages, with Megatron's schedule instead of its own."""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

from tests.example_loop import EXAMPLE, load_example

NUM_STAGES = 2


class PipelinedLoop:
    """Forward and backward of one stage."""

    def __init__(self, example: Any, model: torch.nn.Module) -> None:
        self.example, self.model, self.loss = example, model, torch.zeros(())
        length = example.SEQUENCE_LENGTH
        self.positions = torch.arange(length).expand(example.MICRO_BATCH, -1)
        self.causal = torch.ones(length, length).triu(1).bool()[None, None]

    def run_forward_backward(self, position: Any, num_microbatches: int) -> None:
        """Run the schedule on the samples of a position, which all stages read."""
        size = self.example.MICRO_BATCH
        first = [position.consumed_samples + index * size for index in range(num_microbatches)]
        self.model.zero_grad_buffer()  # type: ignore[operator]
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter([self.example.read_batch(each) for each in first]),
            model=[self.model],
            num_microbatches=num_microbatches,
            seq_length=self.example.SEQUENCE_LENGTH,
            micro_batch_size=size,
            forward_only=False,
        )

    def _forward_step(self, data: Iterator[torch.Tensor], model: Any) -> tuple[Any, Any]:
        tokens = next(data)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        return model(inputs, self.positions, self.causal, labels=labels), self._loss

    def _loss(self, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.loss = losses.float().mean()
        return self.loss, {}


class StagedState:
    """As much of `megatron.core.parallel_state` as the example uses."""

    @staticmethod
    def initialize_model_parallel(expert_model_parallel_size: int) -> None:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=NUM_STAGES)


def divide(config: TransformerConfig) -> TransformerConfig:
    """Divide a model into stages, and keep all experts of a layer on one rank."""
    config.expert_model_parallel_size = 1
    config.pipeline_model_parallel_size, config.pipeline_dtype = NUM_STAGES, torch.bfloat16
    config.finalize_model_grads_func = finalize_model_grads
    return config


def run_pipelined(words: list[str]) -> None:
    """Run the example in stages on this rank."""
    sys.argv = [str(EXAMPLE), *words]
    example = load_example()

    def layers_of_stage(config: TransformerConfig, **options: Any) -> Any:
        return get_gpt_decoder_block_spec(divide(config), **options)

    def build_stage(**options: Any) -> GPTModel:
        return GPTModel(
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            **options,
        )

    example.get_gpt_decoder_block_spec, example.GPTModel = layers_of_stage, build_stage
    example.Loop = lambda model: PipelinedLoop(example, model)
    example.parallel_state = StagedState
    example.main()
