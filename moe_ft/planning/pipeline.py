"""Layers of pipeline stages, as Megatron's flags divide them.

The parameters of their units are model_size.py. Virtual stages of a rank are one stage here.
"""

import argparse
import re

from moe_ft.errors import ConfigError

Layers = list[list[int]]  # [stage]
_LETTERS = "EtmL"
_REPEATS = (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)")


def layers_of_stages(args: argparse.Namespace) -> Layers:
    """Return ``[stage]`` the layers of its decoder, from 0.

    Raises:
        ConfigError: if the flags do not fit the layers, or stages cannot be planned.
    """
    if args.pipeline_model_parallel_layout is not None:
        return _layers_of_layout(args)
    counts = _counts(args)
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return [list(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def notes(args: argparse.Namespace) -> list[str]:
    """Return a line on virtual stages in a layout, whose buffers are not planned apart."""
    layout = args.pipeline_model_parallel_layout
    if layout is None or len(parse_layout(layout)) == args.pipeline_model_parallel_size:
        return []
    return [
        "--pipeline-model-parallel-layout: each stage is planned as if its layers were one chunk"
    ]


def parse_layout(text: str) -> list[str]:
    """Return the letters of every stage, virtual ones included, in the order of the model.

    E is the embedding, t a layer, m a layer that predicts further tokens, L the loss.

    Args:
        text: value of --pipeline-model-parallel-layout, such as ``Ettt|(tt|)*29m|L``.

    Raises:
        ConfigError: if it has other letters.
    """
    text = text.replace(",", "")
    for pattern in _REPEATS:
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    if wrong := sorted(set(text) - {*_LETTERS, "|"}):
        raise ConfigError(
            f"--pipeline-model-parallel-layout has '{wrong[0]}', which is none of E, t, m, L and |. Write it "
            "like Ettt|(tt|)*29m|L."
        )
    return text.split("|")


def _layers_of_layout(args: argparse.Namespace) -> Layers:
    flag = f"--pipeline-model-parallel-layout={args.pipeline_model_parallel_layout}"
    num_stages = args.pipeline_model_parallel_size
    chunks = parse_layout(args.pipeline_model_parallel_layout)
    letters, num_mtp = "".join(chunks), args.mtp_num_layers or 0
    if len(chunks) % num_stages:
        raise ConfigError(
            f"{flag} has {len(chunks)} stages, which must be a multiple of --pipeline-model-parallel-size="
            f"{num_stages}. Change one of the two."
        )
    if (letters.count("t"), letters.count("m")) != (args.num_layers, num_mtp):
        raise ConfigError(
            f"{flag} has {letters.count('t')} t and {letters.count('m')} m, which must be "
            f"--num-layers={args.num_layers} and --mtp-num-layers={num_mtp}. Change one of them."
        )
    last = "".join(chunks[num_stages - 1 :: num_stages])
    if not letters.startswith("E") or not letters.endswith("L") or last.count("m") != num_mtp:
        raise ConfigError(
            f"{flag} cannot be planned: E must come first, L last, and every m must be on the last stage. "
            "Change it."
        )
    layers: Layers = [[] for _ in range(num_stages)]
    number = 0
    for index, chunk in enumerate(chunks):
        count = chunk.count("t")
        layers[index % num_stages] += range(number, number + count)
        number += count
    return layers


def _counts(args: argparse.Namespace) -> list[int]:
    """Return ``[stage]`` how many layers it has: those given, and equal parts of the others."""
    num_stages = args.pipeline_model_parallel_size
    given = {
        0: args.decoder_first_pipeline_num_layers,
        num_stages - 1: args.decoder_last_pipeline_num_layers,
    }
    given = {stage: count for stage, count in given.items() if count is not None}
    # The embedding and the loss may each take the place of a layer.
    places = {0: args.account_for_embedding_in_pipeline_split}
    places[num_stages - 1] = places.get(num_stages - 1, 0) + args.account_for_loss_in_pipeline_split
    rest = args.num_layers - sum(given.values()) + sum(places.values())
    num_equal = num_stages - len(given)
    if rest < 0 or (rest % num_equal if num_equal else rest):
        raise ConfigError(
            f"--pipeline-model-parallel-size={num_stages} must divide --num-layers={args.num_layers}"
            f"{_exceptions(args)}. Change one of them, or give the layers of each stage with "
            "--pipeline-model-parallel-layout."
        )
    return [
        given.get(stage, rest // max(1, num_equal)) - places.get(stage, 0)
        for stage in range(num_stages)
    ]


def _exceptions(args: argparse.Namespace) -> str:
    """Return the flags that make stages unequal, as part of a message."""
    names = (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    )
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name)]
    return f", as {' and '.join(given)} leave them" if given else ""
