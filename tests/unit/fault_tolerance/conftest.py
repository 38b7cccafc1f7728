"""Fixtures of the training loop: Megatron's parser and arguments, and an event log."""

import argparse
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from megatron.core import num_microbatches_calculator as calculators
from megatron.core import parallel_state
from megatron.training import arguments as megatron_arguments
from megatron.training import global_vars

from megatron.fault_tolerance.cpu.device import set_cpu_defaults
from moe_ft.config.flag_table import FLAGS, NEWER, names_in
from moe_ft.events import EventLog


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    """Return Megatron's parser on a CPU, with what the table names of newer versions."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    megatron: argparse.ArgumentParser = megatron_arguments.add_megatron_arguments(parser)
    for name in names_in(" ".join(FLAGS[NEWER].values())):
        if not any(each.dest == name for each in megatron._actions):
            megatron.add_argument("--" + name.replace("_", "-"), action="store_true")
    set_cpu_defaults(megatron)
    return megatron


@pytest.fixture
def args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the arguments that Megatron's parser gives without flags."""
    args = parser.parse_args([])
    args.moe_ft_strategy = "none"
    return args


@pytest.fixture
def loop_args(monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Yield Megatron's global arguments of a small GPT, of which 8 samples are an iteration."""
    args = Namespace(
        iteration=0,
        train_iters=10,
        world_size=1,
        seq_length=32,
        num_layers=2,
        hidden_size=16,
        num_experts=4,
        micro_batch_size=2,
        global_batch_size=8,
        eval_global_batch_size=8,
        data_parallel_size=2,
        gtp_weight_remat_size=1,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        num_floating_point_operations_so_far=0,
        do_train=True,
        do_valid=False,
        do_test=False,
        eval_interval=2,
        eval_iters=1,
        full_validation=False,
        start_eval_at_iter=None,
        save=None,
        save_interval=None,
        non_persistent_save_interval=None,
        exit_interval=None,
        phase_transition_iterations=None,
        distributed_timeout_minutes=10,
        distributed_timeout_seconds_after_init=None,
        log_interval=2,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=1,
        finetune=False,
        ckpt_step=None,
        load=None,
        pretrained_checkpoint=None,
    )
    calculators.init_num_microbatches_calculator(
        rank=1,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        decrease_batch_size_if_needed=False,
    )
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", 0)
    yield args
    calculators.destroy_num_microbatches_calculator()


@pytest.fixture
def event_log(tmp_path: Path) -> Iterator[EventLog]:
    """Yield the open event log of rank 3."""
    log = EventLog(tmp_path / "events", 3)
    log.start()
    yield log
    log.close()
