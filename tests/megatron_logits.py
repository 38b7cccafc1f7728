"""Logits of Megatron's model in a checkpoint, which Megatron's own code loads with --load."""

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron

from megatron.fault_tolerance.launch.environment import prepare_environment
from megatron.fault_tolerance.program.arguments import parse_arguments
from megatron.fault_tolerance.program.model import build_config
from tests.harness import run_ranks

_PADDING = 16  # of the vocabulary
# Flags that a run needs besides those of its model.
RUN_FLAGS = (
    *("--micro-batch-size", "1", "--train-iters", "2", "--lr", "0.001", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer"),
    *("--distributed-timeout-minutes", "1", "--no-load-optim", "--no-load-rng"),
)


def megatron_logits(
    flags: Sequence[str] | str,
    checkpoint: Path,
    tokens: torch.Tensor,
    folder: Path,
    prepare: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return logits [batch, sequence, vocabulary with padding] from a new process with one rank.

    Args: as those of `all_logits`.
    """
    return all_logits(flags, checkpoint, tokens, folder, prepare)[0]


def all_logits(
    flags: Sequence[str] | str,
    checkpoint: Path,
    tokens: torch.Tensor,
    folder: Path,
    prepare: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Return logits [layer, batch, sequence, vocabulary with padding] from a new process with one rank.

    Layer 0 is the last of the decoder; those after it are of multi-token prediction.

    Args:
        flags: of the model, which has the type fp32.
        tokens: [batch, sequence].
        prepare: called in the new process first; a function of a module.
    """
    words = shlex.split(flags) if isinstance(flags, str) else list(flags)
    length = str(tokens.shape[1])
    padded = _PADDING * math.ceil(int(words[words.index("--vocab-size") + 1]) / _PADDING)
    words += [*RUN_FLAGS, "--seq-length", length, "--padded-vocab-size", str(padded)]
    words += ["--load", str(checkpoint)]
    words.append("--exit-on-missing-checkpoint")
    path = folder / "logits.pt"
    run_ranks(_write_logits, 1, words, tokens.tolist(), str(path), prepare, log_dir=folder).check()
    found: torch.Tensor = torch.load(path)
    return found


def _write_logits(
    flags: list[str], tokens: list[list[int]], path: str, prepare: Callable[[], None] | None
) -> None:
    if prepare is not None:
        prepare()
    prepare_environment()
    args, _ = parse_arguments(flags)
    config, _ = build_config(args)
    initialize_megatron()
    builder = config.get_builder_cls()(config)
    model = builder.build_model(ProcessGroupCollection.use_mpu_process_groups()).eval()
    load_checkpoint([model], None, None)
    batch = torch.tensor(tokens)
    length = batch.shape[1]
    later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    states: list[torch.Tensor] = []
    if model.mtp_process:
        model.mtp.register_forward_hook(lambda *call: states.append(call[-1]))
    with torch.no_grad():
        logits = [model(batch, torch.arange(length).expand_as(batch), later)]
        for state in states[0].split(length)[1:] if states else ():
            logits.append(model.output_layer(state)[0].transpose(0, 1))
    torch.save(torch.stack(logits), path)
