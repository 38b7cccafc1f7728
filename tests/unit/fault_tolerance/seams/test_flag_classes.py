"""Every flag of the installed Megatron is classified once, and its class follows from what it does.

Settings of a run are compared by what they mean, not by how they are written.
"""

import argparse
import hashlib
import inspect
import re
import sys
from pathlib import Path

import pytest
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon
from megatron.training import arguments as megatron_arguments
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron.fault_tolerance.cpu.device import CPU_DEFAULTS, UNFUSED_DEFAULTS
from megatron.fault_tolerance.program.arguments import REFUSALS, parse_arguments
from megatron.fault_tolerance.seams.flag_classes import (
    SCRIPT_FLAGS,
    UNKNOWN,
    megatron_flags,
    names_in_value,
    script_settings,
    settings_as_used,
    untested_flags,
)
from megatron.fault_tolerance.seams.refusals import check_refusals
from megatron.fault_tolerance.seams.versions import RECOMMENDED, installed_version
from moe_ft.config.flag_table import FLAGS, TESTED_VALUES, Kind, flag_classes, names_in
from moe_ft.format.identity import digest_setting
from moe_ft.strategies import registry
from tests.demo_model import model_flags
from tests.stock_program import CPU_FLAGS

TESTS = Path(__file__).parents[3]
of_the_table = pytest.mark.skipif(
    installed_version() != RECOMMENDED, reason="the table lists the flags of another version"
)


@pytest.mark.versions
def test_flag_that_the_table_does_not_know_is_named_as_untested_and_another_is_not_missed(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    known = flag_classes().keys()
    new = [dest for dest in sorted(megatron_flags(parser)) if dest not in known]
    for dest in new:
        setattr(args, dest, "another value")
    args.moe_ft_strategy = "dense"
    check_refusals(args, REFUSALS)
    ours = sorted(flag for dest, flag in megatron_flags(parser).items() if dest in new)
    named = untested_flags(args, parser)
    assert [words.split()[0] for words in named.pop(UNKNOWN, [])] == ours
    assert not named


@of_the_table
def test_every_flag_of_the_installed_parser_is_in_the_table(
    parser: argparse.ArgumentParser,
) -> None:
    flags = {action.dest for action in parser._actions}
    unclassified = sorted(flags - flag_classes().keys())
    assert not unclassified, "look at what these do, and put them into flag_table.py"
    gone = sorted(flag_classes().keys() - flags)
    assert not gone, "Megatron has these no more: take them out of flag_table.py"


@of_the_table
def test_flag_that_decides_something_is_read_by_megatron() -> None:
    # A flag that nothing reads is neutral, or is refused because a user expects an effect.
    folder = Path(megatron_arguments.__file__).parents[1]
    words: set[str] = set()
    for path in (*folder.glob("core/**/*.py"), *folder.glob("training/**/*.py")):
        words.update(re.findall(r"[.\"'](\w+)", path.read_text(encoding="utf-8")))
    words.update(f"muon_{name}" for name in inspect.signature(TensorParallelMuon).parameters)
    decides = (Kind.FINGERPRINT, Kind.REPLAY, Kind.RECORD, Kind.BEGINNING)
    read = [dest for dest, each in flag_classes().items() if each.kind in decides]
    assert [dest for dest in read if dest not in words] == []


def test_no_flag_is_in_the_table_twice_and_no_class_has_another_mark() -> None:
    found = [(names, *each.split()) for of in FLAGS.values() for each, names in of.items()]
    assert sum(len(names_in(names)) for names, *_ in found) == len(flag_classes())
    assert {tuple(mark) for _, _, *mark in found} == {(), ("untested",)}


def test_defaults_are_neither_refused_nor_untested(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    for strategy in registry.names():
        args.moe_ft_strategy = strategy
        check_refusals(args, REFUSALS)
    assert untested_flags(args, parser) == {}


def test_flag_of_a_megatron_that_the_table_does_not_know_is_untested_and_that_of_a_script_is_not() -> (
    None
):
    newer = argparse.ArgumentParser()
    newer.add_argument("--no-gravity", dest="gravity", action="store_false")
    newer.add_argument("--corpus", required=True)
    newer.add_argument("--shares", type=float, default="0.5")
    given = newer.parse_args(["--no-gravity", "--corpus", "here"])
    assert untested_flags(given, newer) == {UNKNOWN: ["--corpus", "--no-gravity"]}
    assert untested_flags(given, newer, {"gravity"}) == {UNKNOWN: ["--corpus"]}


# Neither stock Megatron, for which a stand-in for Transformer Engine's optimizer trains, nor flags that run.
_NO_JOBS = {
    *("few_bits_adam.py", "test_few_bits.py", "test_bad_input.py"),
    *("test_repair_flex.py", "test_graphs.py", "test_slots_flex.py"),  # of stand-ins
}


@pytest.fixture(scope="module")
def jobs() -> str:
    """Return the text of the tests that run jobs, with flags written as attributes are."""
    paths = [*TESTS.glob("*.py"), *(TESTS / "distributed").glob("*.py")]
    texts = [path.read_text() for path in paths if path.name not in _NO_JOBS]
    return re.sub(r"--[a-z][\w-]*", lambda flag: flag[0][2:].replace("-", "_"), "".join(texts))


def forms(parser: argparse.ArgumentParser) -> dict[str, set[str]]:
    """Return the names of each flag: its attribute, and its spellings, written as attributes are."""
    return {
        each.dest: {each.dest, *(flag[2:].replace("-", "_") for flag in each.option_strings)}
        for each in parser._actions
    }


def test_captured_flag_that_is_not_called_untested_is_in_a_test(
    parser: argparse.ArgumentParser, jobs: str
) -> None:
    ours = {**CPU_DEFAULTS, **UNFUSED_DEFAULTS}
    words = set(re.findall(r"\w+", jobs))
    names = forms(parser)
    missing = [
        dest
        for dest, each in flag_classes().items()
        if each.kind in (Kind.FINGERPRINT, Kind.REPLAY) and each.is_tested
        if dest not in ours and not names.get(dest, {dest}) & words
    ]
    assert missing == []


@of_the_table
def test_tested_values_are_those_that_jobs_of_tests_have(
    parser: argparse.ArgumentParser, args: argparse.Namespace, jobs: str
) -> None:
    args.dataloader_type = "single"  # Megatron's validation fills it in
    captured = (Kind.FINGERPRINT, Kind.REPLAY, Kind.RECORD)
    actions = {each.dest: each for each in parser._actions}
    with_names = {
        dest
        for dest, each in flag_classes().items()
        if actions[dest].choices and each.is_tested and each.kind in captured
    }
    others = {"ckpt_format", "recompute_granularity", "recompute_method", "recompute_modules"}
    found = {}
    for dest in (with_names | others) - {"exit_signal"}:  # scripts of examples/ name another one
        given = re.findall(rf'"({"|".join(forms(parser)[dest])})"[:,] "([^"]+)"', jobs)
        values = {word for _, words in given for word in words.split()}
        values.update(names_in_value(vars(args)[dest]))
        found[dest] = values & {*names_in_value(list(actions[dest].choices or values))}
    assert found == TESTED_VALUES


PLACES = {
    Kind.FINGERPRINT: """kv_lora_rank moe_router_score_function rotary_base rope_scaling_factor
        pipeline_model_parallel_layout mtp_use_repeated_layer context_parallel_size
        world_size virtual_pipeline_model_parallel_size""",
    Kind.REPLAY: """ddp_reduce_scatter_with_fp32_accumulation ddp_average_in_collective
        clip_grad fp8 moe_z_loss_coeff bias_swiglu_fusion train_iters deterministic_mode""",
    Kind.RECORD: "lr lr_decay_style weight_decay loss_scale_window eval_interval",
}


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, names in PLACES.items() for name in names.split()]
)
def test_setting_is_where_its_meaning_belongs_and_nowhere_else(
    place: Kind, name: str, args: argparse.Namespace
) -> None:
    args.world_size, args.virtual_pipeline_model_parallel_size = 1, None  # Megatron derives them
    flag = f"--{name.replace('_', '-')}"
    assert [each for each in PLACES if flag in settings_as_used(args, each)] == [place]
    setattr(args, name, 7)
    assert settings_as_used(args, place)[flag] == 7


def test_when_a_run_ends_does_not_matter_for_an_iteration(args: argparse.Namespace) -> None:
    assert (
        not {"--exit-interval", "--exit-duration-in-mins"}
        & settings_as_used(args, Kind.RECORD).keys()
    )


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--moe-expert-capacity-factor -1 --cp-comm-type a2a",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    ],
)
def test_settings_of_a_replay_are_written_as_the_configuration_has_them(
    flags: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As earlier versions noted them: their windows are compared with those of this start.
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py"])
    monkeypatch.setattr(megatron_arguments, "set_global_variables", lambda args: None)
    given = [*CPU_FLAGS, *model_flags(num_layers=4), "--mock-data", *flags.split()]
    args, _ = parse_arguments(given)
    config = core_transformer_config_from_args(args)
    for flag, value in settings_as_used(args, Kind.REPLAY).items():
        name = flag.removeprefix("--").replace("-", "_")
        noted = getattr(config, name, value)
        if isinstance(noted, bool | int | float | str | None):
            assert value == noted, name


def test_rate_of_decoupled_parameters_may_change_but_not_whether_there_are_any(
    args: argparse.Namespace,
) -> None:
    found = []
    for rate in (None, 0.1, 0.2):
        args.decoupled_lr = rate
        found.append(settings_as_used(args, Kind.FINGERPRINT)["--decoupled-lr"])
    assert found == [False, True, True]


def test_setting_that_a_megatron_does_not_have_is_not_compared(args: argparse.Namespace) -> None:
    del args.rotary_base
    assert "--rotary-base" not in settings_as_used(args, Kind.FINGERPRINT)


def test_settings_of_a_script_are_its_own_flags_and_those_that_no_gpt_of_ours_reads(
    args: argparse.Namespace,
) -> None:
    defaults = argparse.Namespace(**vars(args))
    assert script_settings(args, defaults) == {}
    setattr(args, SCRIPT_FLAGS, ("corpus", "schedule"))
    args.corpus, args.schedule = ["a", "b"], object()
    args.fim_rate, args.sft, args.lr = 0.25, True, 1.0
    clear = {
        "--corpus": "['a', 'b']",
        "--schedule": "object",  # not where it lies in memory, which every start changes
        "--fim-rate": "0.25",
        "--sft": "True",
    }
    found = script_settings(args, defaults)
    assert found == {name: digest_setting(name, value) for name, value in clear.items()}
    assert found["--sft"] == "sha256:" + hashlib.sha256(b"--sft=True").hexdigest()[:16]
