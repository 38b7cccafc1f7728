"""Starts with other settings than those of the state that is there are refused in words of Bridge."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.training.config import GPTDatasetConfig

from megatron.fault_tolerance.program.text_dataset import TextSource, write_dataset
from tests.bridge.jobs import EP2, SCRIPT, RestartedJob, train_in_context, train_protected
from tests.jobs import refusal

KILL = ("--moe-ft-inject-fault", "kill:1@4:backward")
OF_BYTES = "tokenizer.vocab_size=257"


def train_with_another_activation(words: Sequence[str]) -> None:
    """Train with a script that names another function."""
    vars(torch.nn.functional)["silu"] = torch.nn.functional.gelu
    train_protected(words)


def train_on_text(words: Sequence[str]) -> None:
    """Train with a script whose data have a path, which its overrides give."""
    sys.path.insert(0, str(SCRIPT.parent))
    import tiny_job

    tiny_config = tiny_job.tiny_config

    def with_text() -> Any:
        config = tiny_config()
        given = vars(config.dataset) | {"split": "90,10,0"}
        names = GPTDatasetConfig.__dataclass_fields__.keys() - {"mock", "split_matrix"}
        names -= {"token_dtype_code", "sequence_length"}
        config.dataset = GPTDatasetConfig(**{name: given[name] for name in names & given.keys()})
        return config

    tiny_job.tiny_config = with_text
    train_in_context(words)


def text_at(folder: Path, module: Any = asyncio) -> str:
    write_dataset(TextSource(paths=(str(Path(module.__file__).parent),)), folder / "text")
    return str(folder / "text")


def test_start_with_other_data_or_another_activation_is_refused_and_nothing_is_lost(
    restarted: RestartedJob,
) -> None:
    restarted.set_model(2, EP2)
    restarted.run(*KILL)
    restarted.set_model(2, EP2, "dataset.random_seed=5", "model.softmax_scale=0.5")
    line = refusal(restarted.run(*KILL))
    assert "dataset.random_seed: 1234 there, 5 now; model.softmax_scale: None there" in line
    restarted.set_model(2, EP2)
    restarted.train = train_with_another_activation
    line = refusal(restarted.run(*KILL))
    assert "model.activation_func: torch.nn.functional.silu there, " in line
    restarted.set_model(2, EP2)
    restarted.resume(*KILL)
    assert restarted.digests() == restarted.reference()


def test_other_data_sets_are_refused_and_moved_ones_are_the_same(
    restarted: RestartedJob, tmp_path: Path
) -> None:
    def read(*paths: str) -> None:
        cache = f"dataset.path_to_cache={tmp_path / 'cache'}"
        blend = f"dataset.data_path=[{','.join(paths)}]"
        restarted.set_model(2, EP2, OF_BYTES, blend, cache)
        restarted.train = train_on_text

    first, moved = (text_at(tmp_path / name) for name in ("first", "moved"))
    other = text_at(tmp_path / "other", torch.utils)
    read(first)
    restarted.run(*KILL)
    for paths in ((other,), ("0.5", first, "0.5", other)):
        read(*paths)
        assert "dataset.blend" in refusal(restarted.run(*KILL))
    read(moved)
    restarted.resume(*KILL)
