"""Runs of our program and of the stock one (stock_program.py) with the same command, for comparison.

Compared are every number that Megatron itself writes to TensorBoard, the digests of the final state, and the
digests of the copies of the embedding, which must be equal.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.training import get_args, get_tensorboard_writer, training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pretrain_gpt_moe
from moe_ft.state.digest import digest_state
from tests import stock_program
from tests.harness import run_ranks

_NOT_COMPARED = ("time", "throughput", "moe-ft/")


@dataclass(frozen=True, kw_only=True)
class Training:
    """Results of a job.

    Attributes:
        scalars: by name, (iteration, value) of each number that Megatron logged, without times.
        ends: ``[rank]`` the two digests of its state.
        embeddings: ``[rank]`` the digests of its copies of the embedding.
    """

    scalars: dict[str, list[tuple[int, float]]]
    ends: list[list[str]]
    embeddings: list[list[str]]


@contextmanager
def recorded_build() -> Iterator[dict[str, Any]]:
    """Yield a dictionary that gets `state`: the model chunks, optimizer and scheduler of a run."""
    built: dict[str, Any] = {}
    setup = training.setup_model_and_optimizer

    def remember(*args: Any, **kwargs: Any) -> Any:
        built["state"] = setup(*args, **kwargs)
        return built["state"]

    training.setup_model_and_optimizer = remember
    try:
        yield built
    finally:
        training.setup_model_and_optimizer = setup


def train_and_digest(flags: list[str], is_stock: bool, folder: str) -> None:
    """Train on this rank and write its digests, taken after `pretrain` has returned."""
    with recorded_build() as built:
        (stock_program.train if is_stock else pretrain_gpt_moe.main)(flags)
    if (writer := get_tensorboard_writer()) is not None:
        writer.flush()  # the rank ends without closing it
    args = get_args()
    counters = {"train": args.consumed_train_samples, "valid": args.consumed_valid_samples}
    model, optimizer, scheduler = built["state"]
    digest = digest_state(model, optimizer, scheduler, counters)
    is_tied = not args.untie_embeddings_and_output_weights
    copies = _embeddings(model, is_tied)
    path = Path(folder) / f"digests_{args.rank}.json"
    path.write_text(json.dumps([[digest.sha256, digest.sha256_all], copies]))


def run_program(flags: list[str], world_size: int, *, is_stock: bool, folder: Path) -> Training:
    """Train on all ranks of a new job and return what can be compared."""
    board = ["--tensorboard-dir", str(folder / "board"), "--tensorboard-log-interval", "1"]
    arguments = (flags + board, is_stock, str(folder))
    run_ranks(train_and_digest, world_size, *arguments, log_dir=folder).check()
    paths = (folder / f"digests_{rank}.json" for rank in range(world_size))
    ends, embeddings = zip(*(json.loads(path.read_text()) for path in paths), strict=True)
    return Training(
        scalars=scalars_of(folder / "board"), ends=list(ends), embeddings=list(embeddings)
    )


def _embeddings(model: Sequence[torch.nn.Module], is_tied: bool) -> list[str]:
    """Return a digest of the embedding of each model chunk, which may be its tied output layer."""
    suffixes = ["word_embeddings.weight", *(["output_layer.weight"] if is_tied else [])]
    found = []
    for chunk in model:
        parameters = dict(chunk.named_parameters())
        # A chunk that has both uses only the first.
        named = [name for suffix in suffixes for name in parameters if name.endswith(suffix)]
        weights = [parameters[name].detach().float().numpy() for name in named[:1]]
        found += [hashlib.sha256(weight.tobytes()).hexdigest() for weight in weights]
    return found


def scalars_of(board: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers that Megatron has written to TensorBoard, without times."""
    accumulator = EventAccumulator(str(board)).Reload()
    return {
        name: [(point.step, point.value) for point in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
        if not any(word in name for word in _NOT_COMPARED)
    }
