"""`python -m moe_ft convert`: a checkpoint in a format that others read."""

import argparse
import ctypes
import sys

from moe_ft.commands.directory import reading
from moe_ft.commands.parsers import Commands, add_command
from moe_ft.config.rules import check_holds_no_secret
from moe_ft.errors import ConfigError
from moe_ft.saying import silence_dependencies

_GIB = 1 << 30
_INTERRUPTED = 130  # as shells have it


def add_convert_command(commands: Commands) -> None:
    """Add the command and its flags."""
    parser = add_command(
        commands,
        "convert",
        "write a checkpoint in a format of Megatron or Hugging Face, or plainly",
        "Also the way back: SRC may be a checkpoint of Megatron or a model of Hugging Face. Two files of "
        "--shard-size fit into memory at a time, never the model. The same command continues one that was "
        "interrupted.",
        "/shared/checkpoints /shared/hf --to hf --dtype bf16",
        codes=f"0: written, 2: it cannot be, {_INTERRUPTED}: interrupted; those of the job with --densify.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a persist directory (or fsspec URL), one of its iter_* directories, a memory directory, a "
        "torch_dist checkpoint of Megatron, or a model of Hugging Face",
    )
    parser.add_argument(
        "destination", metavar="DST", help="a new or empty folder, or a new fsspec URL"
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("torch_dist", "hf", "safetensors"),
        help="torch_dist: for --load of Megatron in any layout; hf: for transformers; safetensors: files "
        "with names of units",
    )
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="of the checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--what",
        choices=("weights", "all"),
        help="all: also masters and moments, to continue training (default, from a run to torch_dist and "
        "safetensors)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp32"),
        help="of the weights (default: the type that forward uses); fp32 gives the masters",
    )
    parser.add_argument(
        "--family",
        metavar="NAME",
        help="model_type of --to hf, such as mixtral (default: the family that the run's flags fit)",
    )
    parser.add_argument(
        "--for-ep",
        type=int,
        metavar="N",
        help="--expert-model-parallel-size of the job that will load a torch_dist (default: the run's): if "
        "it is greater than 1, Megatron keeps another optimizer for experts",
    )
    _add_ways(parser)
    parser.set_defaults(run=run)


def _add_ways(parser: argparse.ArgumentParser) -> None:
    """Add the flags on the way of the conversion, which do not change what is written."""
    parser.add_argument(
        "--shard-size",
        type=float,
        default=2.0,
        metavar="GIB",
        help="most GiB of a file, unless a tensor has more; two of them fit into memory (default 2)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be written, and write nothing"
    )
    parser.add_argument(
        "--densify",
        action="store_true",
        help="SRC's newest checkpoint is a window of several iterations: start the job, whose command line "
        "follows a --, so that it leaves the state of one iteration there, and convert that",
    )


def run(options: argparse.Namespace) -> int:
    """Convert, and print what was written."""
    if not 0 < options.shard_size < float("inf"):
        raise ConfigError(
            f"--shard-size={options.shard_size} must be a number of GiB greater than 0. The default is 2."
        )
    if options.for_ep is not None and options.for_ep < 1:
        raise ConfigError(
            f"--for-ep={options.for_ep} must be a number of ranks, at least 1. Leave it out for the run's."
        )
    if not options.destination.strip():
        raise ConfigError(
            f"DST='{options.destination}' is empty: an unset variable? Name a new folder or fsspec URL."
        )
    check_holds_no_secret("DST", options.destination)
    if options.of_training and not options.densify:
        raise ConfigError(
            f"-- {options.of_training[0]}: convert takes a command line only with --densify. Add it, or "
            "leave the command line out."
        )
    silence_dependencies()
    # Here, since this is the only command that needs torch.
    from moe_ft.convert.conversion import ConversionRequest, convert
    from moe_ft.convert.densify import densify

    keep_freed_memory()
    names = ("source", "destination", "to", "iteration", "what", "family", "dtype", "for_ep")
    given = {name: getattr(options, name) for name in names}
    request = ConversionRequest(**given, shard_bytes=max(1, int(options.shard_size * _GIB)))
    try:
        with reading(options.source, "SRC"):
            if options.densify and (
                code := densify(options.source, options.iteration, options.of_training)
            ):
                return code
            print(convert(request, is_dry_run=options.dry_run))
    except KeyboardInterrupt:
        print("interrupted: the same command continues where it was", file=sys.stderr)
        return _INTERRUPTED
    return 0


def keep_freed_memory() -> bool:
    """Have this process keep what it frees, for all threads; return whether the C library can do that.

    By default glibc gives large blocks back to the system as soon as they are freed, and fills the next one
    with zeros, page by page: more work than reading, converting and writing together. To be called before
    threads are started.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # As in <malloc.h>. Threads besides the first would have small arenas of their own.
    arena_max, trim_threshold, mmap_threshold, most = -8, -1, -3, (1 << 31) - 1
    settings = {arena_max: 1, trim_threshold: most, mmap_threshold: most}
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
