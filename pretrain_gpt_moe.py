"""Pretrains a Mixture-of-Experts GPT with Megatron-LM's own training loop and moe_ft's seams.

torchrun --nproc-per-node 4 pretrain_gpt_moe.py --text-dir DIR MEGATRON_FLAGS --moe-ft-FLAGS
"""

import os
import sys
import time
from functools import partial
from typing import NoReturn

from megatron.core.enums import ModelType
from megatron.training import pretrain
from torch.distributed.elastic.multiprocessing.errors import record

from megatron.fault_tolerance.program.arguments import parse_arguments
from megatron.fault_tolerance.program.data import provide_datasets
from megatron.fault_tolerance.program.environment import end_with_rank, prepare_environment
from megatron.fault_tolerance.program.forward_step import forward_step
from megatron.fault_tolerance.program.model import build_config, embedding_ranks
from megatron.fault_tolerance.seams import hooks
from megatron.fault_tolerance.watch.composition import listeners_for
from moe_ft.errors import ConfigError, MoeFtError, UnrecoverableError

EXIT_REFUSED = 2
EXIT_NOT_SAVED = 3
REFUSAL_GRACE_S = 10.0
END_GRACE_S = 2.0


@record
def main(command_line: list[str] | None = None) -> None:
    """Train.

    Exits with EXIT_REFUSED if the command line cannot work, and with EXIT_NOT_SAVED if the last state should
    be on storage and is not: a launcher that starts the job again has it recovered from memory and written.
    """
    try:
        prepare_environment()
        args, config = parse_arguments(sys.argv[1:] if command_line is None else command_line)
        megatron_config = build_config(args)
    except ConfigError as error:
        refuse(error)
    listeners = listeners_for(config, args.rank, on_sigterm=not args.exit_signal_handler)
    try:
        with listeners, hooks.installed(listeners):
            pretrain(
                megatron_config,
                provide_datasets,
                ModelType.encoder_or_decoder,
                forward_step,
                get_embedding_ranks=partial(embedding_ranks, megatron_config.model),
            )
    except (ConfigError, UnrecoverableError) as error:  # only the built model or the disks told
        refuse(error)
    except SystemExit as end:  # one of Megatron's --exit-* flags, or a failed validation of results
        if end.code:
            raise
    if not listeners.loop.is_saved:
        time.sleep(END_GRACE_S)  # the first rank to end has the launcher end all others
        raise SystemExit(EXIT_NOT_SAVED)


def refuse(error: MoeFtError) -> NoReturn:
    """Print one line a node, since what is wrong may be wrong on one node only, and exit refused."""
    if os.environ["LOCAL_RANK"] == "0":
        print(f"pretrain_gpt_moe.py: error: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(REFUSAL_GRACE_S)  # the first rank to end has the launcher end all others
    raise SystemExit(EXIT_REFUSED) from None


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in a process that Megatron starts, such as a checkpoint writer
    end_with_rank()
