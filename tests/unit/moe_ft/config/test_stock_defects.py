"""A job is told what Megatron would write wrongly, or give it from `--load`, or fail with after a while."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from moe_ft.config import stock_defects
from moe_ft.config.stock_defects import (
    FLAG,
    check_schedule,
    lines_on_defects,
    lines_on_load,
    read_saves,
)
from moe_ft.errors import ConfigError

MET = ("--save", "out", FLAG, "--overlap-grad-reduce", "--use-distributed-optimizer")


def test_shifted_masters_are_warned_about_with_flag_and_remedy() -> None:
    (line,) = lines_on_defects(read_saves(["torchrun", "x.py", "--bf16", *MET]))
    assert f"{FLAG} with --save=out" in line
    assert f"save without {FLAG} or without --overlap-grad-reduce" in line


@pytest.mark.parametrize("left_out", MET[2:])
def test_job_without_one_of_the_flags_is_not_warned_about(left_out: str) -> None:
    assert lines_on_defects(read_saves([word for word in MET if word != left_out])) == []


@pytest.mark.parametrize("others", [("--no-save-optim",), ("--ckpt-format", "fsdp_dtensor")])
def test_job_that_saves_no_such_masters_is_not_warned_about(others: tuple[str, ...]) -> None:
    assert lines_on_defects(read_saves([*MET, *others])) == []
    assert lines_on_defects(read_saves(MET[2:])) == []


LOADS = ("torchrun", "x.py", "--load", "out", "--expert-model-parallel-size", "2")


def test_start_from_a_checkpoint_with_one_random_state_for_all_experts_is_told_so() -> None:
    (line,) = lines_on_load(read_saves(LOADS))
    assert line.startswith("--load=out: Megatron keeps one random state for all expert-parallel")
    for others in (
        LOADS[:-1],
        LOADS[:2] + LOADS[4:],
        (*LOADS, "--no-load-rng"),
        (*LOADS, "--finetune"),
    ):
        assert lines_on_load(read_saves(others)) == []


def test_save_of_soap_that_megatron_asserts_against_is_told_before_the_job_starts() -> None:
    (line,) = lines_on_defects(read_saves(["x.py", "--optimizer", "soap", "--save", "out"]))
    assert line.startswith("--optimizer=soap with --save=out: Megatron asserts")
    for others in (("--save", "out", "--no-save-optim"), ()):
        assert lines_on_defects(read_saves(["x.py", "--optimizer", "soap", *others])) == []


# PR 6920: `children` is where the chunks of the model are looked for, in the words of its description.
_CHAIN = """class ChainedOptimizer:
    def _unique_model_chunks(self):
        return {children}

    def quantize_and_sync_model_params_from_main_params(self):
        pass
"""


@pytest.mark.parametrize(
    ("children", "layer_wise", "flags", "count"),
    [
        ("self.chained_optimizers", "", "--optimizer muon --use-distributed-optimizer", 1),
        ("self.chained_optimizers", "", "--optimizer dist_muon", 1),
        ("self.chained_optimizers", "", "--optimizer muon", 0),
        ("self.chained_optimizers", "", "--use-distributed-optimizer", 0),
        ("self.model_chunks", "", "--optimizer dist_muon", 0),
        ("x", "def _unique_model_chunks(self):", "--optimizer dist_muon", 0),
        ("x", f"def {stock_defects._AFTER_LOADING}(self):", "--optimizer dist_muon", 0),
    ],
)
def test_load_after_which_layer_wise_weights_are_not_gathered_is_told(
    children: str,
    layer_wise: str,
    flags: str,
    count: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = read_saves(["x.py", "--load", "out", *flags.split()])
    assert lines_on_load(given) == []  # the installed release has no such function
    spec = ModuleSpec("megatron.core", None, origin=str(tmp_path / "core" / "__init__.py"))
    monkeypatch.setattr(stock_defects, "find_spec", lambda name: spec)
    folder = tmp_path / "core" / "optimizer"
    folder.mkdir(parents=True)
    (folder / "optimizer.py").write_text(_CHAIN.replace("{children}", children))
    (folder / "layer_wise_optimizer.py").write_text(layer_wise)
    lines = lines_on_load(given)
    assert len(lines) == count
    assert all("--load=out: Megatron of late August 2026 does not gather" in each for each in lines)


def test_megatron_that_keeps_the_random_state_of_every_rank_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = ModuleSpec("megatron.core", None, origin=str(tmp_path / "core" / "__init__.py"))
    monkeypatch.setattr(stock_defects, "find_spec", lambda name: spec)
    assert lines_on_load(read_saves(LOADS)) == []  # no training loop, so no checkpoint of its own
    text = tmp_path / "training" / "checkpointing.py"
    text.parent.mkdir()
    shape = "(pp_size, tp_size, ep_size),\n (pp_rank, tp_rank, ep_rank),\n replica_id=0"
    for own, count in ((shape, 0), (shape.replace(", ep_size", "").replace(", ep_rank", ""), 1)):
        text.write_text(f"def get_rng_state():\n ShardedObject('rng_state', {own})\nclass Other:\n")
        assert len(lines_on_load(read_saves(LOADS))) == count


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--train-iters 3 --lr-warmup-iters 4",
            "--lr-warmup-iters=4 must be less than --train-iters=3",
        ),
        ("--train-iters 9 --lr-decay-iters 4 --lr-warmup-iters 4", "less than --lr-decay-iters=4"),
        ("--train-samples 8 --lr-warmup-samples 9", "=9 must be less than --train-samples=8"),
        ("--train-iters 8 --lr-warmup-fraction 1", "--lr-warmup-fraction=1 must be less than 1"),
        ("--train-iters 8 --lr 1 --lr-warmup-init 2", "--lr-warmup-init=2 must be at most --lr=1"),
        ("--train-iters 8 --lr-decay-style WSD", "=WSD needs --lr-wsd-decay-iters. Add it"),
    ],
)
def test_schedule_that_megatron_would_only_assert_is_refused_in_words(
    words: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_schedule(read_saves(words.split()))


def test_schedule_that_fits_or_cannot_be_read_passes() -> None:
    for words in ("--train-iters 4 --lr-warmup-iters 3", "--train-iters x --lr-warmup-iters", ""):
        check_schedule(read_saves(words.split()))
