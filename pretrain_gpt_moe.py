"""Pretrains a Mixture-of-Experts GPT with Megatron-LM's own training loop and moe_ft's seams.

torchrun --nproc-per-node 4 pretrain_gpt_moe.py --text-dir DIR MEGATRON_FLAGS --moe-ft-FLAGS
"""

import inspect
import sys
from functools import partial

from moe_ft.saying import silence_dependencies

silence_dependencies()  # these imports print most of it

from megatron.core.enums import ModelType
from megatron.training import pretrain
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.fault_tolerance.launch.environment import (
    WholeErrorFile,
    prepare_environment,
    prepare_restarts,
)
from megatron.fault_tolerance.launch.pretraining import train
from megatron.fault_tolerance.program.arguments import parse_arguments
from megatron.fault_tolerance.program.forward_step import forward_step, provide_datasets
from megatron.fault_tolerance.program.model import build_config, embedding_ranks
from moe_ft.loop.refusing import refusing


@partial(record, error_handler=WholeErrorFile())
def main(command_line: list[str] | None = None) -> None:
    """Train; moe_ft/loop/refusing.py has the exit codes of a rank that cannot, or cannot save its state."""
    with refusing():
        prepare_environment()
        prepare_restarts()
        args, config = parse_arguments(sys.argv[1:] if command_line is None else command_line)
        model, described = build_config(args)
    call = partial(
        inspect.unwrap(pretrain),  # `moe_ft run` puts the seams around it, and so does this program
        **described,
        train_valid_test_dataset_provider=provide_datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        get_embedding_ranks=partial(embedding_ranks, model),
    )
    train(config, args, call)


if __name__ == "__main__":
    main()
