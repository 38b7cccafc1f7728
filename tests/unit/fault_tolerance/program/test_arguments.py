"""Command lines that cannot work are refused as a whole; flags without effect are named in a warning.

Refused flags have one rule each, with reason and remedy.
"""

import argparse
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from megatron.training import arguments as megatron_arguments

from megatron.fault_tolerance.cpu import device as cpu_device
from megatron.fault_tolerance.program.arguments import (
    PROGRAM_REFUSALS,
    REFUSALS,
    check_program,
    parse_arguments,
)
from megatron.fault_tolerance.seams.flag_classes import megatron_flags, names_of, untested_flags
from megatron.fault_tolerance.seams.refusals import check_refusals
from moe_ft.config.flag_table import FLAGS, REFUSED_HERE, Kind, names_in
from moe_ft.config.rules import Rule
from moe_ft.errors import ConfigError
from moe_ft.strategies import registry
from tests.demo_model import model_flags
from tests.unit.fault_tolerance import parsing

WORLD_SIZE = 2
Parse = Callable[..., None]
# These name jobs and nodes, and this machine may have them.
NAMING = ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "MOE_FT_NODE_ID", "SLURMD_NODENAME")
NAME_RULE = (
    "becomes a directory's name: it must consist of letters, digits, '.', '_' and '-', at most 101 of them, "
    "and not begin with '.' or '-'. Give another one: "
)

# What follows the small model's flags, dense snapshots and a job's name, and what the refusal says.
# DIR is an empty directory.
REFUSED = {
    "--moe-ft-strategy foo": "--moe-ft-strategy=foo must be one of none, dense, "
    "partial, sparse, selective. Name one of them. The flags are listed by --help.",
    "--moe-ft-job-id ../x": f"--moe-ft-job-id='../x' {NAME_RULE}--moe-ft-job-id NAME.",
    "--moe-ft-job-id ''": "--moe-ft-job-id= is empty: an unset variable? Give a value, or leave the "
    "flag out.",
    "--moe-ft-interval 0": "--moe-ft-interval=0 must be a whole number, at least 1, or auto. Give one",
    "--moe-ft-interval 1.5": "--moe-ft-interval=1.5 must be a whole number, at least 1, or auto. Give one",
    "--moe-ft-interval auto --moe-ft-overhead-limit nan": "--moe-ft-overhead-limit=nan must be a fraction "
    "between 0 and 1. Write 0.03 for three percent.",
    "--moe-ft-replication-factor -1": "--moe-ft-replication-factor=-1 must be a whole number, at least 0, or "
    "auto. Give one of them.",
    "--moe-ft-host-memory-limit 10XB": "--moe-ft-host-memory-limit=10XB must be a size in bytes. Write it "
    "like 512GiB.",
    "--moe-ft-persist-dir memory://x": "--moe-ft-persist-dir=memory://x must be storage that outlives the "
    "process which writes it, and memory:// ends with that. Name a directory, or the URL",
    "--moe-ft-memory-dir DIR --moe-ft-persist-dir DIR": "--moe-ft-memory-dir=DIR and "
    "--moe-ft-persist-dir=DIR must not be the same directory or one in the other: the first is emptied when "
    "a job ends, the second is kept. Name directories that are apart.",
    "--moe-ft-persist-interval -1": "--moe-ft-persist-interval=-1 must be at least 0. Give a number of "
    "snapshots, or 0 to write none before the end.",
    "--moe-ft-keep 0": "--moe-ft-keep=0 must be at least 1: the newest checkpoint is never deleted. Give the",
    "--moe-ft-recover-from iter_abc": "--moe-ft-recover-from=iter_abc must be auto, load or iter_N. Write it "
    "like iter_120.",
    "--moe-ft-on-missing foo": "--moe-ft-on-missing=foo must be one of start, ",
    "--moe-ft-event-log DIR --moe-ft-inject-fault kill": "--moe-ft-inject-fault kill must have the form "
    "KIND:RANK@ITERATION[:PHASE]. Write it like kill:3@20:backward.",
    "--moe-ft-event-log DIR --moe-ft-inject-fault explode:0@1": "--moe-ft-inject-fault explode:0@1: kind "
    "'explode' must be one of kill, exception, hang, stop, lose-node, terminate, flip. Name one of them.",
    "--moe-ft-event-log DIR --moe-ft-inject-fault kill:5@3": "--moe-ft-inject-fault kill:5@3:forward: rank 5 "
    "must be less than the world size 2. Name one of the ranks 0 to 1.",
    "--moe-ft-event-log /proc/x": "--moe-ft-event-log=/proc/x cannot be written (No such file or directory): "
    "it must be a directory, or a path where one can be created. Name another one.",
    "--moe-ft-event-log DIR/file": "--moe-ft-event-log=DIR/file cannot be written (File exists): it must be",
    "--save DIR/file/x": "--save=DIR/file/x cannot be a folder of this job: DIR/file is a file. Name another",
    "--data-cache-path DIR/file": "--data-cache-path=DIR/file cannot be a folder of this job: DIR/file is a",
    "--load DIR/file": "--load=DIR/file cannot be a folder of this job: DIR/file is a file. Name",
    "--moe-ft-streams 0": "--moe-ft-streams=0 must be between 1 and 8. Give a number of connections",
    "--moe-ft-state-digest": "--moe-ft-state-digest changes nothing without --moe-ft-event-log. Add "
    "--moe-ft-event-log DIR, or leave --moe-ft-state-digest out.",
    "--moe-ft-strategy sparse --moe-ft-window 0": "--moe-ft-window=0 must be a whole number, at least 1, or "
    "auto. Give one of them.",
    "--moe-ft-strategy sparse --moe-ft-max-window 0": "--moe-ft-max-window=0 must be at least 1. Give a",
    "--moe-ft-strategy sparse --moe-ft-popularity-decay 2": "--moe-ft-popularity-decay=2.0 must be at least "
    "0 and less than 1. Write 0.9 to remember about ten iterations.",
    "--moe-ft-strategy partial --moe-ft-k-snapshot 100": "--moe-ft-k-snapshot=100 must be at most "
    "--num-experts=4. Lower it, or use --moe-ft-strategy dense",
    "--moe-ft-strategy partial --moe-ft-k-snapshot 0": "--moe-ft-k-snapshot=0 must be a whole number, at "
    "least 1, or auto. Give one of them.",
    "--moe-ft-strategy partial --moe-ft-plt-limit -1": "--moe-ft-plt-limit=-1.0 must be a fraction between 0 "
    "and 1. Write 0.0375 for 3.75 percent.",
    "--moe-ft-state-dtype foo=bar": "--moe-ft-state-dtype=foo=bar: 'foo=bar' must be PART=FORMAT, each part "
    "once; parts are master, exp_avg, exp_avg_sq, formats exact, ",
    "--moe-ft-state-dtype exp_avg=bf16": "--moe-ft-state-dtype=exp_avg=bf16 loses precision, and "
    "--moe-ft-strategy=dense promises recoveries that are exact. Add --moe-ft-allow-lossy",
    "--moe-ft-state-dtype exp_avg=bf16 --moe-ft-allow-lossy --moe-ft-staging-bytes 1": "--moe-ft-"
    "staging-bytes=1 must be at least 1MiB. Give more, or leave it out.",
    "--moe-ft-fault-report-grace-s nan": "--moe-ft-fault-report-grace-s=nan must be between 0 and 600: a "
    "launcher kills a slow rank after 30 seconds or so. Give a number of seconds.",
    "--moe-ft-allow-untested repair,gpus": "--moe-ft-allow-untested=repair,gpus must be some of megatron,"
    "repair,sharing,late-gradients,cuda-graphs. Name those that the refusal of a start names.",
    "--cuda-graph-impl local": "--cuda-graph-impl=local is not supported with --moe-ft-strategy=dense: none "
    "has been captured or replayed beside moe_ft on one. Use --cuda-graph-impl none, or take the risk with "
    "--moe-ft-allow-untested cuda-graphs (docs/gpus.md).",
    "--cuda-graph-impl full_iteration --moe-ft-allow-untested cuda-graphs --moe-ft-upstream-log "
    "--pipeline-model-parallel-size 2": "--cuda-graph-impl full_iteration is not supported with --moe-ft-"
    "upstream-log: a recovery runs iterations again",
    "--moe-ft-no-such-flag": "unrecognized arguments: --moe-ft-no-such-flag. The flags are listed by --help.",
    "--moe-ft-interv 5": "unrecognized arguments: --moe-ft-interv 5. Did you mean --moe-ft-interval? The ",
    "--pipeline-model-parallel-size 3": "world size 2 must be a multiple of --tensor-model-parallel-size=1 x "
    "--pipeline-model-parallel-size=3 x --context-parallel-size=1 = 3. Start another",
    "--tensor-model-parallel-size 2 --expert-model-parallel-size 2": "world size 2 must be a multiple of "
    "--expert-tensor-parallel-size=2 (default: the tensor parallel size) x --expert-model-parallel-size=2 x "
    "--pipeline-model-parallel-size=1 = 4",
    "--expert-model-parallel-size 4 --expert-tensor-parallel-size 2": "multiple of "
    "--expert-tensor-parallel-size=2 x --expert-model-parallel-size=4 x --pipeline-model-parallel-size=1 = 8",
    "--expert-model-parallel-size 2 --num-experts 5": "--num-experts=5 must be a multiple of "
    "--expert-model-parallel-size=2",
    "--expert-model-parallel-size 2 --num-experts": "argument --num-experts: expected one argument",
    "--tensor-model-parallel-size 0": "--tensor-model-parallel-size=0 must be at least 1",
    "--sft": "--sft is not supported: pretrain_gpt_moe.py would ignore it. Leave it out.",
    "--full-validation": "--full-validation without --multiple-validation-sets is not supported: Megatron "
    "0.19.2 fails in the first evaluation",
    "--yaml-cfg DIR/file": "--yaml-cfg=DIR/file is not supported: Megatron then reads no other flag, not "
    "even moe_ft's. Give the settings as flags.",
    "--moe-ft-strategy sparse --enable-cuda-graph": "--cuda-graph-impl=local is not supported with --moe-ft-"
    "strategy=sparse: none has been captured",
    "--moe-router-topk 8": "--moe-router-topk=8 must be at most",
    "--tensor-model-parallel-size 2 --sequence-parallel --apply-layernorm-1p": "--apply-layernorm-1p is not "
    "supported by the local implementation's norm",
    "--text-dir DIR": "--text-dir and --mock-data exclude each other",
    "--global-batch-size 3": "Megatron refuses these arguments: ",
    "--hidden-size 30": "Megatron refuses these arguments: assert args.hidden_size % "
    "args.num_attention_heads == 0 (arguments.py, line ",
    "--transformer-impl transformer_engine": "--transformer-impl=transformer_engine needs the package "
    "transformer-engine",
}
# The same for what follows the model's flags alone.
REFUSED_DATA = {
    "": "no training data: give --text-dir DIR (a directory of text), --data-path PREFIX",
    "--text-dir DIR": "--tokenizer-type=NullTokenizer and --text-dir exclude each other",
    "--data-path DIR/data": "--data-path DIR/data: DIR/data.idx does not exist",
}
# Flags whose consequences are named in a warning.
WARNED = {
    "--save DIR --save-interval 4 --dist-ckpt-optim-fully-reshardable --overlap-grad-reduce": (
        "--dist-ckpt-optim-fully-reshardable with --save=DIR: Megatron 0.19 saves the fp32 masters"
    ),
    "--moe-ft-window auto": "--moe-ft-window=auto changes nothing without --moe-ft-strategy sparse. Give",
    "--moe-ft-allow-untested megatron": "--moe-ft-allow-untested=megatron changes nothing: nothing is "
    "refused for a Megatron that does not fit",
    "--moe-ft-event-log DIR --moe-ft-inject-fault kill:0@999999": "--moe-ft-inject-fault "
    "kill:0@999999:forward never happens: training ends at iteration 4",
}


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parse:
    """Return a function that reads flags as rank 0 of two does, and leaves nothing in this process."""
    for name in NAMING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(WORLD_SIZE))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt_moe.py"])
    monkeypatch.setattr(megatron_arguments, "set_global_variables", lambda args: None)
    (tmp_path / "file").write_text("a file")

    def parse(flags: str, *others: str) -> None:
        """Read flags, in which DIR is the directory, after others."""
        words = shlex.split(flags.replace("DIR", str(tmp_path)))
        parse_arguments([*(others or CHECKPOINTING), *words])

    return parse


CHECKPOINTING = (
    *model_flags(),
    "--mock-data",
    *("--moe-ft-strategy", "dense", "--moe-ft-job-id", "job"),
)


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_cannot_work_are_refused_with_value_rule_and_remedy(
    flags: str, parse: Parse, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(flags)
    assert REFUSED[flags] in str(refusal.value).replace(str(tmp_path), "DIR")


@pytest.mark.parametrize("flags", REFUSED_DATA)
def test_data_that_are_not_there_are_named(flags: str, parse: Parse, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse(flags, *model_flags())
    assert REFUSED_DATA[flags] in str(refusal.value).replace(str(tmp_path), "DIR")


def test_job_without_a_name_is_refused(parse: Parse) -> None:
    with pytest.raises(ConfigError, match=r"--moe-ft-job-id is missing: .* Add --moe-ft-job-id"):
        parse("--moe-ft-strategy dense", *model_flags(), "--mock-data")


@pytest.mark.parametrize(
    ("variable", "name", "flag"),
    [
        ("SLURM_JOB_ID", "a/b", "--moe-ft-job-id"),
        ("MOE_FT_NODE_ID", "../../x", "--moe-ft-node-id"),
    ],
)
def test_name_from_the_environment_that_cannot_be_a_directory_is_refused_with_its_variable(
    variable: str, name: str, flag: str, parse: Parse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, name)
    job = () if flag == "--moe-ft-job-id" else ("--moe-ft-job-id", "job")
    with pytest.raises(ConfigError) as refusal:
        parse("--moe-ft-strategy dense", *model_flags(), "--mock-data", *job)
    assert str(refusal.value) == f"{variable}={name!r} {NAME_RULE}{flag} NAME."


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """Yield the mount point of a file system that nobody can write to."""
    folder = tmp_path / "read_only"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "ro,size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, check=False).returncode != 0:
        pytest.skip("mounting needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_event_log_on_a_read_only_file_system_is_refused(parse: Parse, read_only: Path) -> None:
    with pytest.raises(ConfigError, match=r"--moe-ft-event-log=.*/x cannot be written \(Read-only"):
        parse(f"--moe-ft-event-log {read_only}/x")


def test_flags_and_values_that_no_test_runs_with_are_named_by_subject(
    parse: Parse, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_device, "is_active", lambda: True)
    parse("--log-interval 3 --disable-bias-linear --lr-decay-style cosine")
    assert "no test of" not in capsys.readouterr().err
    parse("--rotary-interleaved --log-interval 3 --lr-decay-style WSD --lr-wsd-decay-iters 1")
    named = "  model: --rotary-interleaved\n  optimizer: --lr-decay-style WSD\n"
    assert f"no test of moe_ft runs with (docs/flags.md)\n{named}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", WARNED)
def test_flag_with_a_consequence_is_warned_about_by_rank_0_only(
    flags: str,
    parse: Parse,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    parse(flags)
    line = f"WARNING moe_ft: {WARNED[flags]}"
    assert line in capsys.readouterr().err.replace(str(tmp_path), "DIR")
    monkeypatch.setenv("RANK", "1")
    parse(flags)
    assert "WARNING" not in capsys.readouterr().err


ROOT = Path(__file__).parents[4]
# The table also has rules on settings of moe_ft, which are no flags of Megatron.
OF_MEGATRON = names_of(Kind.REFUSED)
RULES = {rule.flag: rule for rule in REFUSALS if rule.dest in OF_MEGATRON}


def test_every_refused_flag_has_one_rule() -> None:
    rules = Counter(rule.dest for rule in REFUSALS if rule.flag in RULES)
    assert rules == Counter(OF_MEGATRON)


def test_table_knows_the_flags_that_this_program_refuses_and_others_may_read() -> None:
    names = {name for each in FLAGS[REFUSED_HERE].values() for name in names_in(each)}
    assert names == {rule.dest for rule in PROGRAM_REFUSALS}


def test_every_refused_flag_is_in_the_documentation(parser: argparse.ArgumentParser) -> None:
    text = (ROOT / "docs/flags.md").read_text()
    written = megatron_flags(parser)
    flags = [rule for rule in REFUSALS if not rule.dest.startswith("moe_ft_")]
    assert [rule.flag for rule in flags if f"`{written[rule.dest]}" not in text] == []


def used(rule: Rule, parser: argparse.ArgumentParser) -> object:
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
        check_refusals(args, REFUSALS)
        (named,) = untested_flags(args, parser).values()
        assert named == [megatron_flags(parser)[rule.dest]]
        refused_with = [kind.name for kind in registry.kinds() if rule.strategies(kind)]
    assert refused_with
    for strategy in refused_with:
        args.moe_ft_strategy = strategy
        with pytest.raises(ConfigError, match="is not supported") as refusal:
            check_refusals(args, REFUSALS)
        assert str(refusal.value).startswith(rule.flag)
        remedy = rule.remedy.format(others="dense, partial, sparse or selective")
        assert str(refusal.value).endswith(f"{rule.reason}. {remedy}.")


@pytest.mark.parametrize(
    "name", sorted({each.dest for each in REFUSALS if not each.dest.startswith("moe_ft_")})
)
def test_flag_that_a_megatron_does_not_have_is_not_refused(
    name: str, args: argparse.Namespace
) -> None:
    delattr(args, name)
    check_refusals(args, REFUSALS)


@pytest.mark.parametrize("rule", PROGRAM_REFUSALS, ids=lambda rule: rule.flag)
def test_flag_that_only_this_program_refuses_is_left_to_a_script(
    rule: Rule, args: argparse.Namespace, parser: argparse.ArgumentParser
) -> None:
    setattr(args, rule.dest, used(rule, parser))
    args.moe_ft_strategy = "sparse"
    check_refusals(args)


def test_blend_of_weights_and_prefixes_is_checked_prefix_by_prefix() -> None:
    with pytest.raises(ConfigError, match="/nowhere/b: /nowhere/b.idx does not exist"):
        check_program(parsing.parse("--data-path", "0.3", "/nowhere/b"))


def test_local_experts_with_a_bias_and_fused_swiglu_are_refused() -> None:
    args = parsing.parse("--mock-data")
    args.add_bias_linear = args.swiglu = True
    args.bias_swiglu_fusion = False
    check_program(args)
    args.bias_swiglu_fusion = True
    with pytest.raises(ConfigError, match="--swiglu needs --disable-bias-linear or --no-bias-swi"):
        check_program(args)


def test_recomputing_layernorm_needs_transformer_engine() -> None:
    flags = ("--recompute-granularity", "selective", "--recompute-modules", "layernorm")
    with pytest.raises(ConfigError, match="--recompute-modules layernorm needs the package"):
        check_program(parsing.parse("--mock-data", *flags))
