"""Runs this project's program or the stock one on the same command, and keeps all that can be compared.

That is every number that Megatron itself writes to TensorBoard, and digests of the end.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.training import get_args, training
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import pretrain_gpt_moe
from moe_ft.state.digest import digest_state
from tests import stock_program
from tests.harness import run_ranks

Scalars = dict[str, list[tuple[int, float]]]
Ends = list[list[str]]
_TIMES = ("time", "throughput", "moe-ft/")


@contextmanager
def remembering_what_is_built() -> Iterator[dict[str, Any]]:
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
    """Train on this rank and write the state digest, taken after `pretrain` has returned."""
    with remembering_what_is_built() as built:
        (stock_program.train if is_stock else pretrain_gpt_moe.main)(flags)
    args = get_args()
    counters = {"train": args.consumed_train_samples, "valid": args.consumed_valid_samples}
    digest = digest_state(*built["state"], counters)
    path = Path(folder) / f"digest_{args.rank}.json"
    path.write_text(json.dumps([digest.sha256, digest.sha256_all]))


def run_program(
    flags: list[str], world_size: int, *, is_stock: bool, folder: Path
) -> tuple[Scalars, Ends]:
    """Train on all ranks of a new job; return what Megatron logged, by name, and every rank's digests."""
    board = ["--tensorboard-dir", str(folder / "board"), "--tensorboard-log-interval", "1"]
    arguments = (flags + board, is_stock, str(folder))
    run_ranks(train_and_digest, world_size, *arguments, log_dir=folder).check()
    paths = (folder / f"digest_{rank}.json" for rank in range(world_size))
    return _scalars(folder / "board"), [json.loads(path.read_text()) for path in paths]


def _scalars(board: Path) -> Scalars:
    accumulator = EventAccumulator(str(board)).Reload()
    names = accumulator.Tags()["scalars"]
    return {
        name: [(point.step, point.value) for point in accumulator.Scalars(name)]
        for name in names
        if not any(word in name for word in _TIMES)
    }
