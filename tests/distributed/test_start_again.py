"""Checkpointing starts, ends and starts again in one process, and recovers what the start before has left."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.training import training

import pretrain_gpt_moe
from megatron.fault_tolerance.seams.megatron_loop import MegatronLoop
from moe_ft.config.config import MemoryConfig, MoeFtConfig, RecoveryConfig
from moe_ft.config.strategy import StrategyConfig
from moe_ft.errors import ConfigError
from moe_ft.recovery.checkpointing import Checkpointing
from moe_ft.recovery.start import start
from moe_ft.state.digest import digest_state
from moe_ft.state.record import IterationFacts
from tests.demo_model import layout_flags, model_flags
from tests.harness import run_ranks
from tests.shares import share_of

NUM_RANKS = 2
NUM_STARTS = 3
NUM_ITERATIONS = 4  # in each start
RATE = 0.0005  # of the last start
Built = tuple[Any, Any, Any]


class Process:
    """A process that trains without Megatron's loop: gradients are made up, everything else is real.

    Attributes:
        digests: of parameters and optimizer, by iteration.
    """

    def __init__(self, built: Built, config: MoeFtConfig) -> None:
        self._built, self._config = built, config
        self.digests: dict[int, str] = {}

    def start(self) -> Checkpointing:
        facts = MegatronLoop().job_facts("")
        return start(self._config, facts, self._built, lambda phase, iteration: None)

    def train(self, running: Checkpointing, iteration: int) -> None:
        """Run one iteration, and let the engine act on it."""
        model, optimizer, _ = self._built
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.main_grad.fill_(0.01 * (iteration + 1))
        running.engine.before_step()
        optimizer.step()
        iteration += 1
        self.digests[iteration] = self.digest()
        facts = IterationFacts(
            iteration=iteration,
            grad_norm=1.0,
            num_tokens=None,
            num_floating_point_operations=0.0,
            tokens_per_expert={},
            counters=MegatronLoop().counters(0),
        )
        running.engine.end_iteration(iteration, 0.1, lambda: running.capture(facts))

    def change_rate(self) -> None:
        """Have the rate that another --lr would give, which a start takes only if it is told to."""
        _, optimizer, scheduler = self._built
        scheduler.max_lr = RATE
        for group in optimizer.param_groups:
            group["max_lr"] = RATE
        with pytest.raises(ConfigError, match=f"--lr: 0.001 there, {RATE} now"):
            self.start()
        scheduler.override_opt_param_scheduler = True

    def rates(self) -> set[float]:
        """Return the rates of the next step."""
        return {group["lr"] for group in self._built[1].param_groups}

    def digest(self) -> str:
        return digest_state(*self._built, {}).sha256

    def scramble(self) -> None:
        """Overwrite all parameters, so that only a recovery can bring them back."""
        with torch.no_grad():
            for chunk in self._built[0]:
                for parameter in chunk.parameters():
                    parameter.fill_(7.0)


def start_again_and_again(flags: list[str], folder: Path, memory_dir: Path) -> None:
    """Start, train and end several times; note what each start has recovered. Runs on every rank."""
    setup = training.setup_model_and_optimizer
    config = MoeFtConfig(
        strategy=StrategyConfig(strategy="dense"),
        memory=MemoryConfig(memory_dir=str(memory_dir), job_id="again"),
        recovery=RecoveryConfig(),
    )

    def build_and_train(*args: Any, **kwargs: Any) -> None:
        process = Process(setup(*args, **kwargs), config)
        found = []
        for number in range(NUM_STARTS):
            if number == NUM_STARTS - 1:
                process.change_rate()
            running = process.start()
            first = running.outcome.iteration
            sources = {tier.name for tier in running.outcome.sources}
            is_same = first == 0 or process.digest() == process.digests[first]
            rates = sorted(process.rates())
            found.append((first, running.outcome.start, sorted(sources), is_same, rates))
            for iteration in range(first, first + NUM_ITERATIONS):
                process.train(running, iteration)
            running.close()
            process.scramble()
        (folder / f"found_{os.environ['RANK']}.json").write_text(json.dumps(found))
        dist.barrier()
        raise SystemExit(0)

    training.setup_model_and_optimizer = build_and_train
    pretrain_gpt_moe.main(flags)


@pytest.mark.parametrize("is_sharded", share_of([True, False], True))
def test_each_start_in_a_process_recovers_what_the_one_before_has_left(
    dataset_flags: list[str], tmp_path: Path, memory_dir: Path, is_sharded: bool
) -> None:
    model = model_flags(use_distributed_optimizer=is_sharded)
    flags = [*model, *layout_flags({"ep": 2}), *dataset_flags]
    run_ranks(
        start_again_and_again, NUM_RANKS, flags, tmp_path, memory_dir, log_dir=tmp_path / "logs"
    ).check()
    first, second = (
        json.loads((tmp_path / f"found_{rank}.json").read_text()) for rank in range(NUM_RANKS)
    )
    assert first == second
    assert first[0][:4] == [0, 0, [], True]
    assert first[-1][4] == [RATE], "the first step after a start has the new rate"
    for number, (before, after) in enumerate(zip(first, first[1:], strict=False), 1):
        iteration, start_number, sources, is_same, _ = after
        # The last snapshots may not have been complete on all ranks.
        assert before[0] + 1 <= iteration <= before[0] + NUM_ITERATIONS
        assert (start_number, sources, is_same) == (number, ["memory"], True)
