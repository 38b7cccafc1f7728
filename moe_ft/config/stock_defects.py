"""Defects of stock Megatron that the flags of a job show, and that cost it what it saves.

Names of flags in, lines for people out: no Megatron and no torch. moe_ft/convert/model.py finds the damage
in a checkpoint.
"""

import argparse
from collections.abc import Sequence

FLAG = "--dist-ckpt-optim-fully-reshardable"
_FLAG_NAME = "dist_ckpt_optim_fully_reshardable"
SHIFTED_MASTERS = (
    f"Megatron 0.19 saves the fp32 masters and the moments of later gradient buckets from shifted places "
    f"with {FLAG} and --overlap-grad-reduce"
)
SHIFTED_REMEDY = f"save without {FLAG} or without --overlap-grad-reduce"


def lines_on_defects(args: argparse.Namespace) -> list[str]:
    """Return one line for each defect that damages what a job saves with `--save`."""
    names = ("save", "use_distributed_optimizer", "overlap_grad_reduce", _FLAG_NAME)
    is_saved = args.ckpt_format == "torch_dist" and not args.no_save_optim
    if not is_saved or not all(getattr(args, name, None) for name in names):
        return []
    return [
        f"{FLAG} with --save={args.save}: {SHIFTED_MASTERS}, unless there is one bucket. Whoever loads such "
        f"a checkpoint trains on with wrong masters. Instead, {SHIFTED_REMEDY}. Checkpoints of moe_ft are "
        "not affected"
    ]


def read_saves(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments that `lines_on_defects` reads, of a command line that starts training."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--no-save-optim", FLAG, "--overlap-grad-reduce", "--use-distributed-optimizer"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--save", nargs="?")
    parser.add_argument("--ckpt-format", nargs="?", default="torch_dist")
    return parser.parse_known_args(list(words))[0]
