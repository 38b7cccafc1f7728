"""Calls of a loop: what comes back after a recovery, and what is refused with a sentence.

The loop is that of examples/custom_loop.py on one rank. Jobs that are killed are in
tests/distributed/test_custom_loop.py.
"""

import io
import json
import random
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.fault_tolerance.cpu import device as cpu_device
from moe_ft.errors import MoeFtError
from tests.example_loop import load_example
from tests.harness import run_ranks
from tests.ports import free_port
from tests.unit.source import ROOT

STATE = {"epoch": 1, "shards": ["a", "b"]}


class Loop:
    """The example's model and optimizer, with one Checkpointer after another."""

    def __init__(self, memory_dir: str) -> None:
        self.example = load_example()
        self.example.start_rank()
        self.model = self.example.build_model()
        self.optimizer, self.scheduler = self.example.build_optimizer(self.model, 9)
        self.loop = self.example.Loop(self.model)
        self.settings = {"strategy": "dense", "job_id": "test", "memory_dir": memory_dir}

    def checkpointer(self, *, run: Mapping[str, Any] = {}, **changes: Any) -> Any:
        """Return one that has not started, with changed arguments."""
        facts = {"train_iterations": 9, "samples_per_iteration": 4, "sequence_length": 32}
        settings = {**self.settings, **changes.pop("settings", {})}
        objects = {"model": [self.model], "optimizer": self.optimizer, "scheduler": self.scheduler}
        return self.example.Checkpointer(
            settings,
            **{**objects, **changes},
            run=self.example.RunFacts(settings={"seed": 1}, **{**facts, **run}),
            reports_sigterm=False,
        )

    def started(self, **changes: Any) -> Any:
        """Return one that has begun an iteration."""
        checkpointer = self.checkpointer(**changes)
        checkpointer.recover(replay=self.loop.run_forward_backward)
        return checkpointer

    def step(self, checkpointer: Any, position: Any, **ending: Any) -> Any:
        """Train an iteration."""
        self.loop.run_forward_backward(position, 1)
        checkpointer.before_step()
        self.optimizer.step()
        samples = position.consumed_samples + 4
        return checkpointer.end_iteration(
            position.iteration + 1, consumed_samples=samples, **ending
        )


def twice(call: Callable[[], Any]) -> None:
    call()
    call()


def step_twice(loop: Loop, checkpointer: Any) -> None:
    checkpointer.before_step()
    twice(loop.optimizer.step)


def finish_within(loop: Loop, checkpointer: Any) -> None:
    checkpointer.before_step()
    checkpointer.finish()


def end_after_finish(loop: Loop, checkpointer: Any) -> None:
    checkpointer.finish()
    checkpointer.end_iteration(1, consumed_samples=4)


def restore_late(loop: Loop, checkpointer: Any) -> None:
    checkpointer.end_iteration(1, consumed_samples=4)
    checkpointer.restore_random_numbers()


def end_iteration(*args: Any, **ending: Any) -> Callable[[Loop, Any], Any]:
    return lambda loop, checkpointer: checkpointer.end_iteration(*args, **ending)


# Calls on a Checkpointer that has started, each with a part of the answer.
WRONG_CALLS: dict[str, tuple[Callable[[Loop, Any], Any], str]] = {
    "recovers twice": (
        lambda loop, checkpointer: checkpointer.recover(),
        r"recover\(\) was called, and an iteration is running\. The order is recover, then",
    ),
    "steps unprepared": (
        lambda loop, checkpointer: loop.optimizer.step(),
        r"optimizer\.step\(\) was called, and an iteration is running\. Call before_step\(\) once",
    ),
    "prepares twice": (
        lambda loop, checkpointer: twice(checkpointer.before_step),
        r"before_step\(\) was called, and before_step\(\) was called and end_iteration\(\) was not",
    ),
    "steps twice": (step_twice, r"optimizer\.step\(\) was called, and it has stepped in this"),
    "passes the index": (
        end_iteration(0, consumed_samples=4),
        r"end_iteration\(0\) was called after iteration 0: .* so this is 1\. Pass the number of",
    ),
    "loses samples": (
        end_iteration(1, consumed_samples=-1),
        r"end_iteration\(consumed_samples=-1\) is less than 0, as of iteration 0",
    ),
    "gives objects": (
        end_iteration(1, consumed_samples=4, state={"reader": object()}),
        r"end_iteration\(state=...\) cannot be kept as JSON: Object of type object",
    ),
    "finishes within": (finish_within, r"finish\(\) was called, and before_step\(\) was called"),
    "continues": (
        end_after_finish,
        r"end_iteration\(\) was called, and finish\(\) was called\. The order",
    ),
    "restores late": (
        restore_late,
        r"restore_random_numbers\(\) was called after iteration 0: random numbers have moved on",
    ),
}

# Arguments of a Checkpointer, each with a part of the answer.
WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown setting": (
        {"settings": {"stratgy": "dense"}},
        r"there is no setting stratgy\. Did you",
    ),
    "no model": ({"model": []}, "model=nothing is not supported: wrap each chunk in"),
    "bare model": (
        {"model": [torch.nn.Linear(1, 1)]},
        "model=Linear is not supported: wrap each chunk in megatron.core.distributed",
    ),
    "no scheduler": ({"scheduler": None}, "scheduler=NoneType is not supported: pass a megatron"),
    "optimizer of torch": (
        {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])},
        "optimizer=SGD is not supported: pass the one that",
    ),
    "no iterations": (
        {"run": {"train_iterations": 0}},
        r"RunFacts\.train_iterations=0 must be a whole number, at least 1",
    ),
}


def message_of(call: Callable[[], Any]) -> str:
    """Return the sentence with which a call is refused, "" if it is not."""
    try:
        call()
    except MoeFtError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def collect(folder: str, memory_dir: str) -> None:
    """Write the answers to all wrong calls and arguments, and what a second start finds."""
    free = Namespace(settings={}, model=[], optimizer=None, scheduler=None)
    example = load_example()
    facts = example.RunFacts(
        settings={}, train_iterations=1, samples_per_iteration=1, sequence_length=1
    )
    answers = {"too early": message_of(lambda: example.Checkpointer(**vars(free), run=facts))}
    loop = Loop(memory_dir)
    for name, (changes, _) in WRONG_ARGUMENTS.items():
        answers[name] = message_of(lambda changes=changes: loop.checkpointer(**changes))
    answers["not recovered"] = message_of(loop.checkpointer().before_step)
    sparse = loop.checkpointer(settings={"strategy": "sparse"})
    answers["no replay"] = message_of(sparse.recover)
    for name, (call, _) in WRONG_CALLS.items():
        checkpointer = loop.started(settings={"strategy": "none"})
        answers[name] = message_of(lambda call=call, each=checkpointer: call(loop, each))
        checkpointer.close()
        checkpointer.close()
    found = start_again(loop)
    found["said"] = [said_by_a_new_one(loop, on_gpus=on_gpus) for on_gpus in (False, True)]
    Path(folder, "found.json").write_text(json.dumps({"answers": answers, **found}))


def said_by_a_new_one(loop: Loop, *, on_gpus: bool) -> str:
    """Return what a Checkpointer says at the start, on a device or where one is taken for it."""
    is_active = patch.object(cpu_device, "is_active", return_value=not on_gpus)
    with is_active, redirect_stderr(io.StringIO()) as said:
        loop.checkpointer()
    return said.getvalue()


def start_again(loop: Loop) -> dict[str, Any]:
    """Train an iteration; return what a start after a failure gets."""
    first = loop.checkpointer()
    loop.step(first, first.recover(), state=STATE)
    weight, drawn = loop.model.module.decoder.final_layernorm.weight, torch.rand(1)
    before, seed = weight.detach().clone(), random.random()
    first.close()
    weight.data.zero_()
    second = loop.checkpointer()
    recovered = second.recover()
    same = [torch.equal(torch.rand(1), drawn), random.random() == seed]
    second.restore_random_numbers()
    same += [torch.equal(torch.rand(1), drawn), torch.equal(weight, before)]
    second.close()
    unwrapped = "step_with_ready_grads" not in vars(loop.optimizer)
    at = (recovered.iteration, recovered.consumed_samples, dict(recovered.state))
    return {"at": at, "is_recovered": recovered.is_recovered, "same": [*same, unwrapped]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what one rank found, which made every call."""
    folder = tmp_path_factory.mktemp("checkpointer")
    env = {"MASTER_PORT": str(free_port())}
    run_ranks(collect, 1, str(folder), str(folder / "memory"), log_dir=folder, env=env).check()
    read: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return read


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_call_out_of_turn_is_refused(name: str, found: dict[str, Any]) -> None:
    assert re.search(WRONG_CALLS[name][1], found["answers"][name]), found["answers"][name]


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused(name: str, found: dict[str, Any]) -> None:
    assert re.search(WRONG_ARGUMENTS[name][1], found["answers"][name]), found["answers"][name]


def test_loop_without_process_groups_is_told_to_make_them(found: dict[str, Any]) -> None:
    assert "torch.distributed, which is not initialized. Call" in found["answers"]["too early"]


def test_loop_that_has_not_recovered_may_not_step(found: dict[str, Any]) -> None:
    expected = "CallOrderError: before_step() was called, and recover() has not been called."
    assert found["answers"]["not recovered"].startswith(expected)


def test_strategy_that_replays_needs_a_function_that_does(found: dict[str, Any]) -> None:
    expected = r"ConfigError: .*strategy=sparse runs iterations again .* use dense or partial"
    assert re.search(expected, found["answers"]["no replay"])


def test_start_after_a_failure_continues_where_the_loop_was(found: dict[str, Any]) -> None:
    assert found["at"] == [1, 4, STATE]
    assert found["is_recovered"]


def test_start_after_a_failure_has_weights_and_random_numbers_back(found: dict[str, Any]) -> None:
    assert found["same"] == [True] * 5


def test_start_on_gpus_says_what_has_been_seen_on_one(found: dict[str, Any]) -> None:
    on_cpus, on_gpus = found["said"]
    assert on_cpus == ""
    assert on_gpus.endswith(
        "rank 0 WARNING moe_ft: on GPUs, written and never seen on one: strategy dense (docs/gpus.md)\n"
    )


def test_checkpointer_imports_nothing_of_megatron_training() -> None:
    code = (
        "import sys, megatron.fault_tolerance.checkpointer;"
        "sys.exit(any(name.startswith('megatron.training') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
