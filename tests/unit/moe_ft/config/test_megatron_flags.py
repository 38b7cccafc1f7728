"""The flags that `plan` declares are Megatron's own, and no other flag is ignored without being known."""

import argparse
from typing import Any

import pytest
from megatron.training import arguments as megatron_arguments

from moe_ft.config import megatron_flags
from moe_ft.config.flag_table import FLAGS
from moe_ft.config.megatron_flags import (
    add_megatron_flags,
    moe_layer_pattern,
    select_flags,
    spellings,
)
from moe_ft.errors import ConfigError

# Megatron's own functions, which cannot be imported without torch.
SAME_TYPES: dict[Any, Any] = {moe_layer_pattern: megatron_arguments.moe_freq_type}


@pytest.fixture(scope="module")
def megatron() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    megatron_arguments.add_megatron_arguments(parser)
    return parser


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_megatron_flags(parser)
    return parser


def facts(action: argparse.Action) -> tuple[object, ...]:
    """Return everything that decides how a flag is read."""
    choices = None if action.choices is None else list(action.choices)
    kind = SAME_TYPES.get(action.type, action.type)
    return (
        *(type(action), action.option_strings, action.dest, kind, action.default),
        *(action.nargs, choices, action.const, action.required),
    )


def test_declared_flags_are_read_as_megatron_reads_them(
    parser: argparse.ArgumentParser, megatron: argparse.ArgumentParser
) -> None:
    own = {action.dest: facts(action) for action in parser._actions}
    theirs = {action.dest: facts(action) for action in megatron._actions if action.dest in own}
    assert own == theirs
    assert len(own) > 40


def test_every_spelling_of_every_flag_is_known(megatron: argparse.ArgumentParser) -> None:
    written = {word: action.dest for action in megatron._actions for word in action.option_strings}
    assert dict(spellings()) == written


def test_flags_of_each_list_are_in_the_table_and_in_one_list_only() -> None:
    classes = {
        name: heading.split()[0]
        for subject in FLAGS.values()
        for heading, names in subject.items()
        for name in names.split()
    }
    same = megatron_flags._SAME_SIZE.split()
    assert {classes[name] for name in same} == {"fingerprint"}
    lists = [*same, *megatron_flags._OTHER_SIZE.split(), *megatron_flags._NOTED]
    assert len(lists) == len(set(lists))
    assert set(lists) <= classes.keys()


@pytest.mark.parametrize("text", ["1", "3", "[0,1]*2", "([0]*1+[1]*3)*2", "[1]+([0,1])*4"])
def test_pattern_of_layers_is_that_of_megatron(text: str) -> None:
    assert moe_layer_pattern(text) == megatron_arguments.moe_freq_type(text)


@pytest.mark.parametrize("text", ["x", "[2]", "[0,1", "[0]*", "[a]", "[0]**9", "([0],[1])", "1.5"])
def test_pattern_that_is_no_list_of_layers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a list of layers|invalid literal"):
        moe_layer_pattern(text)


def test_read_flags_keep_their_values_and_others_vanish(parser: argparse.ArgumentParser) -> None:
    words = ["--lr", "1e-3", "--min-lr", "-1e-4", "--num-layers", "4", "--data-path", "a", "b"]
    words += ["--hidden-size=8", "--no-persist-layer-norm", "--swiglu"]
    read, notes = select_flags(words, parser)
    assert read == ["--num-layers", "4", "--hidden-size=8", "--swiglu"]
    assert notes == []


@pytest.mark.parametrize(
    ("flag", "note"),
    [
        ("--fp8-format", "scales"),
        ("--num-layers-per-virtual-pipeline-stage", "consecutive"),
        ("--moe-router-enable-expert-bias", "biases of routers"),
    ],
)
def test_flag_with_a_small_effect_is_named(
    flag: str, note: str, parser: argparse.ArgumentParser
) -> None:
    read, (line,) = select_flags([flag, "2"], parser)
    assert read == []
    assert line.startswith(f"{flag}: ")
    assert note in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mtp-use-repeated-layer"], "--mtp-use-repeated-layer cannot be planned: .* Leave it"),
        (["--mla-down-proj-fusion"], "--mla-down-proj-fusion cannot be planned: .* Leave it out"),
        (["--moe-latent-size=8"], "--moe-latent-size cannot be planned"),
        (["--spec", "a", "b"], "--spec cannot be planned"),
        (["--heterogeneous-layers-config-path", "x"], "--heterogeneous-layers-config-path cannot"),
        (["--tensor-parallel-num-weight-shards", "4"], "cannot be planned: training refuses it"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp cannot be planned: training refuses it"),
        (
            ["--num-layer", "4"],
            "--num-layer is neither .* Megatron nor of moe_ft. Is it --num-layers",
        ),
        (["--add-bias-linear"], "--add-bias-linear is neither a flag of Megatron nor of moe_ft"),
        (["--help"], "--help starts no training"),
        (["4", "--num-layers"], "'4' is no flag. Begin with a flag"),
    ],
)
def test_flag_that_is_unknown_or_not_counted_is_refused(
    words: list[str], message: str, parser: argparse.ArgumentParser
) -> None:
    with pytest.raises(ConfigError, match=message):
        select_flags(words, parser)


def test_no_flag_that_changes_the_fingerprint_is_ignored_unless_listed(
    parser: argparse.ArgumentParser,
) -> None:
    read = {action.dest for action in parser._actions}
    ignored = set()
    for flag, name in spellings().items():
        try:
            taken, notes = select_flags([flag], parser)
        except ConfigError:
            continue
        if not taken and not notes:
            ignored.add(name)
    assert not ignored & read
    sizes = {"mtp_num_layers", "kv_lora_rank", "softmax_type", "quick_geglu", "mtp_standalone"}
    sizes |= {"pipeline_model_parallel_layout", "use_tp_pp_dp_mapping"}
    assert not ignored & sizes
    assert {"lr", "seed", "rotary_base", "split", "save"} <= ignored
