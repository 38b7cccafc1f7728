"""A log line or an evaluation that a death has broken off begins again as the loop had begun it."""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    RerunMode,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.timers import Timers
from megatron.training import global_vars, training

from megatron.fault_tolerance.repair.between import (
    BetweenIterations,
    SkippedEvaluations,
    can_evaluate_again,
    can_log_again,
)
from megatron.fault_tolerance.seams.data_sets import DataSets
from megatron.fault_tolerance.seams.stack import Layers
from moe_ft.cluster.member import Done, LoopPosition, round_of
from moe_ft.cluster.rounds import Entry
from moe_ft.errors import RepairError
from tests.unit.fault_tolerance.repair.members import Watched, position_at
from tests.unit.signed import member_of

PER_STEP = 10  # samples


class _Loader(list[int]):
    dataset, collate_fn = "validation", list


@pytest.fixture
def loop(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """Yield the arguments of a loop that is about to evaluate, alone in its world."""
    values = {"curr_iteration": 3, "consumed_train_samples": 32, "consumed_valid_samples": 20}
    for name, value in {**values, "dataloader_type": "single"}.items():
        setattr(loop_args, name, value)
    for name in ("log_params_norm", "perform_rl_step", "use_megatron_fsdp", "skip_train"):
        setattr(loop_args, name, False)
    loop_args.use_distributed_optimizer, loop_args.overlap_param_gather = True, False
    timers = Timers(2, "minmax")
    monkeypatch.setattr(global_vars, "_GLOBAL_TIMERS", timers)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timers("eval-time", log_level=0).start()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield loop_args
    dist.destroy_process_group()
    destroy_rerun_state_machine()


class _Evaluated:
    """Megatron's evaluation of two steps, which fails in the second one as often as it shall."""

    def __init__(self, loop: Namespace, num_failures: int) -> None:
        self._loop, self._num_failures = loop, num_failures
        self.seen: list[Any] = []

    def __call__(self, *args: Any) -> list[int]:
        _, iterator, (chunk,), _, config = args
        assert chunk.training
        chunk.eval()
        get_rerun_state_machine().set_mode(RerunMode.DISABLED)
        config.timers = None
        self.seen.append((self._loop.consumed_train_samples, self._loop.consumed_valid_samples))
        read = []
        for step in range(2):
            read.append(next(iterator))
            self._loop.consumed_valid_samples += PER_STEP
            if step == 1 and self._num_failures:
                self._num_failures -= 1
                raise RuntimeError("Connection closed by peer")
        return read


def evaluate(
    monkeypatch: pytest.MonkeyPatch, loop: Namespace, num_failures: int, *, deaths: int
) -> tuple[Any, list[Any], list[str]]:
    """Evaluate in training; return the result, the counters seen, and repairs."""
    megatrons, repairs = _Evaluated(loop, num_failures), list[str]()
    model, config = [torch.nn.Linear(1, 1)], Namespace(timers="before")
    result: list[Any] = []

    def load(data_set: str, num_consumed: int) -> list[int]:
        return list(range(num_consumed, 100, PER_STEP))

    def train() -> None:
        training.build_train_valid_test_data_loaders(None)
        iterator = RerunDataIterator(iter(load("validation", loop.consumed_valid_samples)))
        result.append(training.evaluate(None, iterator, model, None, config))

    def notice(error: BaseException) -> float:
        if len(repairs) == deaths:
            raise error
        return 0.0

    def repair(noticed_s: float) -> None:
        assert model[0].training and config.timers is not None
        assert get_rerun_state_machine().get_mode() is RerunMode.VALIDATE_RESULTS
        repairs.append("repair")
        loop.consumed_train_samples, loop.consumed_valid_samples = 8, 0  # as recovered
        training.get_timers()("eval-time").stop()

    monkeypatch.setattr(training, "train", train)
    monkeypatch.setattr(training, "evaluate", megatrons)
    monkeypatch.setattr(training, "build_pretraining_data_loader", load)
    monkeypatch.setattr(
        training, "build_train_valid_test_data_loaders", lambda _: (None, [_Loader()], None)
    )
    watched = Watched()
    data_sets = DataSets()
    with Layers() as layers:
        data_sets.install(layers)
        member = watched.member
        member.position = position_at(3)
        between = BetweenIterations(
            watched.watcher, member, watched.links, data_sets, dist.barrier, notice, repair
        )
        between.install(layers)
        training.train()
    return result[0], megatrons.seen, repairs


@pytest.mark.parametrize("deaths", [0, 2])
def test_evaluation_begins_again_with_its_samples_after_each_repair(
    deaths: int, loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, seen, repairs = evaluate(monkeypatch, loop, deaths, deaths=deaths)
    assert (result, seen, repairs) == ([20, 30], [(32, 20)] * (1 + deaths), ["repair"] * deaths)
    assert (loop.consumed_train_samples, loop.consumed_valid_samples) == (32, 40)
    training.get_timers()("eval-time").stop()  # asserts that it is running, as the loop does next


def test_evaluation_fails_as_ever_without_a_death_or_where_a_replacement_would_wait_for_others(
    loop: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        evaluate(monkeypatch, loop, 1, deaths=0)
    assert can_evaluate_again()
    member = member_of()
    member.position = position_at(3)
    assert can_log_again(member)
    loop.overlap_param_gather = True
    assert not can_log_again(member), "the others gather weights in the first iteration"
    member.position = position_at(3, gathers_weights=True)
    assert can_log_again(member)
    loop.log_params_norm, loop.overlap_param_gather = True, False
    assert not can_evaluate_again() and not can_log_again(member)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        evaluate(monkeypatch, loop, 1, deaths=1)


def log(
    monkeypatch: pytest.MonkeyPatch, loop: Namespace, where: str, other: LoopPosition
) -> tuple[list[float], dict[str, Any]]:
    """Log an iteration in which a rank dies; return the sums before each line, and those after all.

    Args:
        where: this rank is when it dies: in the line, or at its end, where it waits for the others; at the
            "device" a line goes on, and nothing is raised.
        other: position of a rank that lives.
    """
    totals: dict[str, Any] = {"loss": torch.tensor([2.0])}
    before: list[float] = []
    watched, places = Watched(), [where]
    member = watched.member
    member.position = position_at(3)
    timer = training.get_timers()("interval-time", log_level=0)
    timer.start()

    def die(place: str) -> None:
        if place in places:
            places.remove(place)
            raise RuntimeError("Connection closed by peer")

    def training_log(losses: Any, sums: dict[str, Any], is_first_iteration: bool) -> str:
        assert timer._started
        assert is_first_iteration == (not before), "a replacement logs it like any other"
        before.append(sums["loss"].item())
        sums["loss"] += losses["loss"]
        sums["advanced iterations"] = sums.get("advanced iterations", 0) + 1
        timer.stop()
        die("line")
        if where == "device" and len(before) == 1:
            watched.links.end(0)
        timer.start()
        return "whether memory is to be reported"

    def repair(noticed_s: float) -> None:
        assert member.position is not None
        facts = (member.position.facts(), other.facts())
        member._met = round_of(1, [Entry(rank=rank, facts=each) for rank, each in enumerate(facts)])
        loop.consumed_train_samples = 8  # as recovered
        watched.links.begin()

    monkeypatch.setattr(training, "training_log", training_log)
    with Layers() as layers:
        BetweenIterations(
            watched.watcher,
            member,
            watched.links,
            DataSets(),
            lambda: die("end"),
            lambda error: 0.0,
            repair,
        ).install(layers)
        result = training.training_log(
            {"loss": torch.tensor([1.0])}, totals, is_first_iteration=True
        )
    assert result == "whether memory is to be reported"
    assert (loop.consumed_train_samples, timer._started) == (32, True)
    return before, totals


@pytest.mark.parametrize(
    ("where", "other", "num_lines"),
    [
        pytest.param("line", position_at(3), 2, id="another one is still in the iteration"),
        pytest.param("line", position_at(3, done=Done.LOG), 2, id="another one has logged"),
        pytest.param("device", position_at(3, done=Done.LOG), 2, id="sums may be wrong"),
        pytest.param("end", position_at(3, done=Done.STEP), 2, id="another one has not"),
        pytest.param("end", position_at(3, done=Done.LOG), 1, id="all have"),
        pytest.param("end", position_at(4), 1, id="another one is in the next iteration"),
        pytest.param("end", position_at(3, done=Done.EVALUATING), 1, id="another one evaluates"),
    ],
)
def test_log_line_begins_again_with_its_sums_unless_all_had_logged(
    where: str,
    other: LoopPosition,
    num_lines: int,
    loop: Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, totals = log(monkeypatch, loop, where, other)
    assert before == [2.0] * num_lines
    assert totals == {"loss": torch.tensor([3.0]), "advanced iterations": 1}


def test_replacement_leaves_out_the_log_line_that_the_others_have_written(
    monkeypatch: pytest.MonkeyPatch, loop: Namespace
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(training, "training_log", lambda *args, **kwargs: calls.append(args[3]))
    watched = Watched()
    parts = (watched.watcher, watched.member, watched.links, DataSets(), dist.barrier)
    between = BetweenIterations(*parts, lambda error: 0.0, lambda noticed_s: None)
    between.follow(position_at(4, done=Done.LOG))
    with Layers() as layers:
        between.install(layers)
        first: tuple[Any, ...] = ({}, {}, 1e-3, 4, 1.0, "memory is to be reported", 0)
        assert training.training_log(*first, is_first_iteration=True) == "memory is to be reported"
        watched.member.position = position_at(5)
        training.training_log({}, {}, 1e-3, 5, 1.0, False, 0, is_first_iteration=False)
    assert calls == [5]


@pytest.fixture
def evaluations(loop_args: Namespace, monkeypatch: pytest.MonkeyPatch) -> SkippedEvaluations:
    loop_args.do_valid, loop_args.eval_interval, loop_args.eval_iters = True, 3, 2
    monkeypatch.setattr(training, "evaluate_and_print_results", lambda draw: draw())
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    return SkippedEvaluations()


def evaluate_and_print(evaluations: SkippedEvaluations, draws: bool) -> None:
    with Layers() as layers:
        evaluations.install(layers)
        training.evaluate_and_print_results(lambda: torch.rand(1) if draws else None)


def test_evaluation_is_counted_where_it_is_skipped_or_ends_the_repair_if_it_draws(
    evaluations: SkippedEvaluations, loop_args: Namespace
) -> None:
    evaluations.skip(loop_args, 3)
    assert loop_args.consumed_valid_samples == 2 * loop_args.eval_global_batch_size
    evaluate_and_print(evaluations, draws=True)
    evaluate_and_print(evaluations, draws=False)
    evaluations.skip(loop_args, 4)
    with pytest.raises(RepairError, match="before the evaluation of iteration 3 would run again"):
        evaluations.skip(loop_args, 3)
