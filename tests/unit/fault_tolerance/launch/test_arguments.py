"""Flags of moe_ft join those of a script, and none of them is ignored in silence."""

import argparse
import inspect
import sys
from pathlib import Path

import pytest
from megatron.training import arguments as megatron_arguments
from megatron.training.config import TrainingConfig

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.launch import arguments
from megatron.fault_tolerance.launch.arguments import (
    add_arguments,
    parse_args,
    unread_flags,
)
from megatron.fault_tolerance.seams import elastic
from megatron.fault_tolerance.seams.flag_classes import script_settings
from megatron.fault_tolerance.seams.megatron_loop import megatron_parser
from moe_ft.command_lines import flags_of_moe_ft
from moe_ft.loop.refusing import EXIT_REFUSED
from tests.demo_model import model_flags

BATCH = ("--micro-batch-size", "2", "--global-batch-size", "16")
ON = ("--moe-ft-strategy", "dense", "--moe-ft-job-id", "job")


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process rank 0 of two, and leave it as it is."""
    monkeypatch.setattr(arguments, "prepare_environment", lambda: None)
    arguments._warn_once.cache_clear()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--temperature", type=float, default=0.5)
    parser.set_defaults(lr=0.25)
    return parser


def parse(
    monkeypatch: pytest.MonkeyPatch, *words: str, ignore_unknown_args: bool = False
) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    return parse_args(megatron_arguments.parse_args, own_flags, ignore_unknown_args)


def test_flags_of_megatron_of_the_script_and_of_moe_ft_are_read_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    args = parse(monkeypatch, "--corpus", "a", "--num-layers", "3", *ON)
    assert (args.corpus, args.temperature, args.num_layers) == ("a", 0.5, 3)
    assert (args.lr, args.moe_ft_strategy, args.world_size) == (0.25, "dense", 2)
    defaults = megatron_parser().parse_args([])
    assert script_settings(args, defaults).keys() == {"--corpus", "--temperature"}


@pytest.mark.versions
def test_parsers_of_a_process_that_is_prepared_read_no_sources_and_have_the_same_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep = megatron_arguments.add_megatron_arguments
    monkeypatch.setattr(megatron_arguments, "add_megatron_arguments", keep)
    arguments.prepare_parsers()
    monkeypatch.setattr(inspect, "getsource", lambda of: pytest.fail(f"the source of {of} is read"))
    parser = argparse.ArgumentParser(allow_abbrev=False)
    megatron_arguments.add_megatron_arguments(parser)
    (action,) = [each for each in parser._actions if each.dest == "train_iters"]
    source = Path(inspect.getfile(TrainingConfig)).read_text()
    assert action.help and action.help in " ".join(source.split())


@pytest.mark.versions
def test_parsers_that_were_made_before_have_the_defaults_of_their_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keep = megatron_arguments.add_megatron_arguments
    monkeypatch.setattr(megatron_arguments, "add_megatron_arguments", keep)
    arguments.prepare_parsers()
    monkeypatch.setenv("WORLD_SIZE", "3")
    known = []
    for _ in range(3):  # for the last one none is left
        parser = argparse.ArgumentParser(allow_abbrev=False)
        megatron_arguments.add_megatron_arguments(parser)
        parser.add_argument_group("others").add_argument("--of-script")
        known.append(parser.parse_args(["--of-script", "a"]))
    assert known[0] == known[1] == known[2]
    assert vars(known[0]).get("inprocess_active_world_size", 3) == 3


def test_arguments_of_a_script_are_those_of_the_ranks_that_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic, "_waiting", None)
    monkeypatch.setenv("WORLD_SIZE", "3")
    model = ("--num-experts", "4", "--expert-model-parallel-size", "4", *BATCH)
    args = parse(
        monkeypatch, "--corpus", "a", *model, *ON, "--moe-ft-layout=any", "--moe-ft-elastic"
    )
    assert (args.world_size, args.expert_model_parallel_size, args.corpus) == (2, 2, "a")
    assert elastic.waiting_ranks() == (2,)


@pytest.mark.parametrize("ignore", [False, True])
def test_misspelled_flag_is_refused_also_where_the_script_ignores_unknown_ones(
    ignore: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words: tuple[str, ...] = ("--corpus", "a", "--other", "--moe-ft-strateg=dense")
    if ignore:
        words = tuple(word for word in words if word != "--other")
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, *words, ignore_unknown_args=ignore)
    assert end.value.code == EXIT_REFUSED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train.py: error: unrecognized arguments: ")
    assert (
        "--moe-ft-strateg=dense. Did you mean --moe-ft-strategy? The flags are listed by --help."
        in line
    )


def test_help_of_a_script_ends_with_the_flags_that_most_jobs_give(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(monkeypatch, "--help")
    text = capsys.readouterr().out
    assert text.startswith("usage: train.py [FLAG [VALUE ...]] ...\n\n")
    _, flags, own = text.partition("\nmoe_ft: basic:\n")
    assert flags and "--num-layers " in text and "--moe-ft-window" not in text
    assert own.startswith("  --moe-ft-strategy {none,") and own.endswith(
        "show all flags of moe_ft, and end\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--moe-ft-window", "0", "--moe-ft-strategy", "sparse"), "--moe-ft-window=0 must be"),
        (("--pipeline-model-parallel-size", "3", *ON), "world size 2 must be a multiple of"),
        (("--inprocess-restart", *ON), "--inprocess-restart is not supported"),
        (("--yaml-cfg", "x", *ON), "--yaml-cfg=x is not supported"),
    ],
)
def test_flags_that_cannot_work_are_refused_as_soon_as_they_are_read(
    words: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, "--corpus", "a", *model_flags(), "--moe-ft-job-id", "job", *words)
    assert end.value.code == EXIT_REFUSED
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert line.startswith(f"train.py: error: {message}")


def test_without_flags_of_moe_ft_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(monkeypatch, "--corpus", "a", "--inprocess-restart", "--use-megatron-fsdp")
    assert args.moe_ft_strategy == "none"


# As recipes of DeepSeek-V3 have them, but for those of layers that tests run with.
LARGE = """--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --fp8-format e4m3
    --fp8-recipe blockwise --use-precision-aware-optimizer --exp-avg-dtype bf16
    --recompute-modules mla_up_proj core_attn mlp --moe-router-dtype fp32 --tokenizer-model /a --qk-l2-norm"""


def test_untested_flags_and_values_are_named_once_and_those_of_the_script_are_its_own_business(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: False)
    for _ in range(2):
        parse(monkeypatch, "--corpus", "a", *LARGE.split(), *ON)
    assert capsys.readouterr().err == (
        "WARNING moe_ft: no test of moe_ft runs with (docs/flags.md)\n"
        "  model: --attention-backend auto, --qk-l2-norm, --transformer-impl transformer_engine\n"
        "  experts: --moe-flex-dispatcher-backend hybridep, --moe-token-dispatcher-type flex\n"
        "  precision: --exp-avg-dtype bf16, --fp8-format e4m3, --fp8-recipe blockwise\n"
        "  activation memory: --recompute-modules mla_up_proj mlp\n"
        "  communication: --distributed-backend nccl\n"
        "  data: --tokenizer-model\n"
        "  optimizer: --use-precision-aware-optimizer\n"
    )


def test_help_lists_all_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(monkeypatch, "--help")
    assert not end.value.code
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--num-layers", "--corpus", "--moe-ft-strategy"))


def test_adding_the_flags_twice_adds_them_once() -> None:
    parser = argparse.ArgumentParser()
    assert add_arguments(add_arguments(parser)) is parser


def test_flag_that_no_parser_has_read_is_found() -> None:
    words = ["python", "train.py", "--moe-ft-strategy", "dense", "--lr", "1", "--moe-ft-keep=3"]
    assert flags_of_moe_ft(words) == ["--moe-ft-strategy", "--moe-ft-keep"]
    assert unread_flags(words, argparse.Namespace()) == ["--moe-ft-strategy", "--moe-ft-keep"]
    half = argparse.Namespace(moe_ft_strategy="dense", moe_ft_keep=2)
    assert unread_flags(words, half) == ["--moe-ft-keep"]
    changed = argparse.Namespace(moe_ft_strategy="sparse", moe_ft_keep=5)
    assert unread_flags(words, changed) == []
    assert unread_flags(["train.py", "--moe-ft-strategy", "none"], argparse.Namespace()) == []
