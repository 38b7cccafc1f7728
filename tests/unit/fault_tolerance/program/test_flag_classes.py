"""Every flag of the installed Megatron is classified once, and what follows from its class holds."""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
from megatron.training import arguments as megatron_arguments
from megatron.training.argument_utils import core_transformer_config_from_args

from megatron.fault_tolerance.program import arguments
from megatron.fault_tolerance.program.flag_classes import (
    FlagClass,
    Kind,
    flag_classes,
    megatron_flags,
    names_of,
    untested_flags,
)
from megatron.fault_tolerance.program.refusals import REFUSALS, Refusal, check_refusals
from megatron.fault_tolerance.seams.loop_facts import fingerprint, replay_settings
from moe_ft.config.flag_table import FLAGS
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from tests.demo_model import model_flags
from tests.stock_program import CPU_FLAGS

TESTS = Path(__file__).parents[3]
RULES = {rule.flag: rule for rule in REFUSALS if rule.covers_flag}


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return megatron_arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args([])
    args.moe_ft_strategy = "none"
    return args


def test_every_flag_of_the_installed_parser_is_in_the_table(
    parser: argparse.ArgumentParser,
) -> None:
    flags = {action.dest for action in parser._actions}
    unclassified = sorted(flags - flag_classes().keys())
    assert not unclassified, "look at what these do, and put them into flag_table.py"
    gone = sorted(flag_classes().keys() - flags)
    assert not gone, "Megatron has these no more: take them out of flag_table.py"


def test_flag_that_decides_something_is_read_by_megatron() -> None:
    # What nothing reads is neutral, or refused because a user expects that something does.
    folder = Path(megatron_arguments.__file__).parents[1]
    words: set[str] = set()
    for path in (*folder.glob("core/**/*.py"), *folder.glob("training/**/*.py")):
        words.update(re.findall(r"[.\"'](\w+)", path.read_text(encoding="utf-8")))
    decides = (Kind.FINGERPRINT, Kind.REPLAY, Kind.RECORD, Kind.BEGINNING)
    read = [dest for dest, each in flag_classes().items() if each.kind in decides]
    assert [dest for dest in read if dest not in words] == []


def test_flag_that_is_in_the_table_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FLAGS, "a second time", {"neutral": "lr"})
    with pytest.raises(ValueError, match="flag lr is in the table twice"):
        flag_classes.__wrapped__()


def test_names_are_sorted_within_their_class() -> None:
    for subject, classes in FLAGS.items():
        for heading, names in classes.items():
            assert names.split() == sorted(names.split(), key=str.lower), (subject, heading)


def test_every_refused_flag_has_one_rule_and_every_rule_its_row() -> None:
    rules = Counter(rule.dest for rule in REFUSALS if rule.covers_flag)
    assert rules == Counter(names_of(Kind.REFUSED))
    for rule in REFUSALS:
        if not rule.covers_flag:
            assert flag_classes()[rule.dest].kind is not Kind.REFUSED, rule.flag


def test_every_refused_flag_is_in_the_documentation(parser: argparse.ArgumentParser) -> None:
    text = (TESTS.parent / "docs/flags.md").read_text()
    written = megatron_flags(parser)
    assert [rule.flag for rule in REFUSALS if f"`{written[rule.dest]}" not in text] == []


def used(rule: Refusal, parser: argparse.ArgumentParser) -> object:
    """Return a value of a flag that is not its default."""
    (action,) = [each for each in parser._actions if each.dest == rule.dest]
    if action.nargs == 0:
        return True
    return {int: 2, float: 0.5}.get(action.type, "given")  # type: ignore[call-overload]


@pytest.mark.parametrize("name", RULES)
def test_refused_flag_is_refused_with_its_reason_and_remedy(
    name: str, args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    rule = RULES[name]
    setattr(args, rule.dest, used(rule, parser))
    refused_with = ["none", *(kind.name for kind in registry.kinds())]
    if rule.strategies is not None:
        check_refusals(args)
        assert megatron_flags(parser)[rule.dest] in untested_flags(args, parser)
        refused_with = [kind.name for kind in registry.kinds() if rule.strategies(kind)]
    assert refused_with
    for strategy in refused_with:
        args.moe_ft_strategy = strategy
        with pytest.raises(ConfigError, match="is not supported") as refusal:
            check_refusals(args)
        assert str(refusal.value).startswith(rule.flag)
        remedy = rule.remedy.format(others="dense, partial or sparse")
        assert str(refusal.value).endswith(f"{rule.reason}. {remedy}.")


def test_defaults_are_neither_refused_nor_untested(
    args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    for strategy in registry.names():
        args.moe_ft_strategy = strategy
        check_refusals(args)
    assert untested_flags(args, parser) == []


def test_flag_of_a_megatron_that_the_table_does_not_know_is_untested() -> None:
    newer = argparse.ArgumentParser()
    newer.add_argument("--no-gravity", dest="gravity", action="store_false")
    newer.add_argument("--lr")
    given = newer.parse_args(["--no-gravity", "--lr", "1"])
    assert untested_flags(given, newer) == ["--no-gravity"]


@pytest.mark.parametrize("kind", [Kind.FINGERPRINT, Kind.REPLAY])
def test_captured_flag_that_is_not_called_untested_is_in_a_test(
    kind: Kind, parser: argparse.ArgumentParser
) -> None:
    paths = [*TESTS.glob("*.py"), *(TESTS / "distributed").glob("*.py")]
    words = set(re.findall(r"[\w-]+", " ".join(path.read_text() for path in paths)))
    ours = {**arguments._CPU_DEFAULTS, **arguments._UNFUSED_DEFAULTS}
    names = {
        dest: {
            dest,
            *(
                flag
                for each in parser._actions
                if each.dest == dest
                for flag in each.option_strings
            ),
        }
        for dest in names_of(kind)
    }
    missing = [
        dest
        for dest, each in flag_classes().items()
        if each.kind is kind and each.is_tested and dest not in ours and not names[dest] & words
    ]
    assert missing == []


@pytest.mark.parametrize(
    "name",
    [
        *("kv_lora_rank", "moe_router_score_function", "rotary_base", "rope_scaling_factor"),
        *("pipeline_model_parallel_layout", "data_args_path", "mtp_use_repeated_layer"),
        *("context_parallel_size", "world_size", "virtual_pipeline_model_parallel_size"),
    ],
)
def test_what_decides_the_meaning_of_state_is_in_the_fingerprint(
    name: str, args: argparse.Namespace
) -> None:
    args.world_size, args.virtual_pipeline_model_parallel_size = 1, None  # Megatron derives them
    assert f"--{name.replace('_', '-')}" in fingerprint(args)


@pytest.mark.parametrize(
    "name",
    [
        *("ddp_reduce_scatter_with_fp32_accumulation", "ddp_average_in_collective", "clip_grad"),
        *("fp8", "moe_z_loss_coeff", "bias_swiglu_fusion", "train_iters", "deterministic_mode"),
    ],
)
def test_what_an_iteration_computes_is_in_the_settings_of_a_replay(
    name: str, args: argparse.Namespace
) -> None:
    flag = f"--{name.replace('_', '-')}"
    before = replay_settings(args)
    setattr(args, name, 7)
    assert before[flag] != replay_settings(args)[flag] == 7
    assert flag not in fingerprint(args)


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
    args, _ = arguments.parse_arguments(given)
    config = core_transformer_config_from_args(args)
    for flag, value in replay_settings(args).items():
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
        found.append(fingerprint(args)["--decoupled-lr"])
    assert found == [False, True, True]


def test_setting_that_a_megatron_does_not_have_is_not_compared(args: argparse.Namespace) -> None:
    del args.rotary_base
    assert "--rotary-base" not in fingerprint(args)


@pytest.mark.parametrize("name", sorted({rule.dest for rule in REFUSALS}))
def test_flag_that_a_megatron_does_not_have_is_not_refused(
    name: str, args: argparse.Namespace
) -> None:
    delattr(args, name)
    check_refusals(args)


def test_data_may_be_moved_but_not_exchanged(args: argparse.Namespace, tmp_path: Path) -> None:
    lists = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for path, text in zip(
        lists,
        ("0.3 /here/one 0.7 /here/two\n", "0.3 /x/one 0.7 /x/two", "0.3 one 0.7 other"),
        strict=True,
    ):
        path.write_text(text)
    found = []
    for path, data in zip(lists, ("/here/data", "/there/data", "/there/other"), strict=True):
        args.data_args_path, args.data_path = str(path), [data]
        found.append(fingerprint(args))
    assert found[0] == found[1]
    assert found[1]["--data-path"] != found[2]["--data-path"]
    assert found[1]["--data-args-path"] != found[2]["--data-args-path"]


def test_data_lists_of_all_splits_are_read(args: argparse.Namespace, tmp_path: Path) -> None:
    path = tmp_path / "splits.json"
    path.write_text('{"train": ["1.0", "/data/a"], "valid": ["/data/b"]}')
    args.per_split_data_args_path = str(path)
    assert fingerprint(args)["--per-split-data-args-path"] == ["train", "1.0", "a", "valid", "b"]


def test_class_names_subject_and_mark() -> None:
    assert flag_classes()["fp8"] == FlagClass(
        subject="precision", kind=Kind.REPLAY, is_tested=False
    )
