"""Runs Megatron's pretrain on the same model and data with or without the seams, and digests the end.

The test of `strategy none` compares the two.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.training import get_args, training

import pretrain_gpt_moe as entry
from moe_ft.state.digest import digest_state


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


def train_and_digest(flags: list[str], with_seams: bool, output_dir: str) -> None:
    """Train on this rank and write the state digest, taken after `pretrain` has returned."""
    with remembering_what_is_built() as built:
        if with_seams:
            entry.main(flags)
        else:
            _train_without_seams(flags)
    args = get_args()
    counters = {"train": args.consumed_train_samples, "valid": args.consumed_valid_samples}
    digest = digest_state(*built["state"], counters)
    path = Path(output_dir) / f"digest_{args.rank}.json"
    path.write_text(json.dumps([digest.sha256, digest.sha256_all]))


def _train_without_seams(flags: list[str]) -> None:
    entry.prepare_environment()
    args, _ = entry.parse_arguments(flags)
    entry.pretrain(
        entry.build_config(args),
        entry.provide_datasets,
        entry.ModelType.encoder_or_decoder,
        entry.forward_step,
    )
