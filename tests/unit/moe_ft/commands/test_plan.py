"""`plan` reads the command line of training, and keeps its numbers."""

import json
import re
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markupsafe import escape

from moe_ft.cli import main
from moe_ft.commands import plan
from moe_ft.commands.command_line import TrainingCommand, plan_job, planned_start, read_command
from moe_ft.commands.plan import compare
from moe_ft.commands.plan_advice import Proposal, word
from moe_ft.commands.plan_inputs import cluster_names, model_names
from moe_ft.errors import ConfigError
from moe_ft.planning.planned_job import MeasuredTimes, PlannedJob
from tests.shares import share_of
from tests.unit.moe_ft.commands.test_plan_inputs import write_log
from tests.unit.moe_ft.planning.described import LARGE, LARGE_OF_8, SMALL

ROOT = Path(__file__).parents[4]
PLANS = Path(__file__).parent / "plans"
TWO_NODES = ("torchrun", "--nnodes", "2", "--nproc-per-node", "8", "pretrain_gpt_moe.py")
SPEEDS = ("--iteration-s", "0.5", "--bandwidth", "2GB")
ON_GPUS = ("--iteration-s", "1", "--cluster", "dgx-h100")
# Jobs whose plans are on file, as the command said them when it had flags of its own for models.
SAME_PLANS = {
    "partial": (
        *("plan", "--", *TWO_NODES, *LARGE_OF_8, "--moe-ft-strategy", "partial"),
        *("--moe-ft-k-snapshot", "4", "--moe-ft-persist-interval", "1"),
    ),
    "sparse": (
        *("plan", *SPEEDS, "--network-bandwidth", "2GB", "--mtbf-s", "1800", "--", *TWO_NODES),
        *(*LARGE_OF_8, "--moe-ft-strategy", "sparse"),
    ),
    "dense": (
        *("plan", *SPEEDS, "--storage-bandwidth", "1GB", "--", *TWO_NODES, *LARGE_OF_8),
        *("--pipeline-model-parallel-size", "2", "--moe-ft-strategy", "dense"),
        *("--moe-ft-persist-dir", "/x"),
    ),
    "lost_node": (
        *("plan", *SPEEDS, "--world-size", "24", "--ranks-per-node", "2", "--", *LARGE),
        *("--expert-model-parallel-size", "2", "--pipeline-model-parallel-size", "4"),
        *("--micro-batch-size", "1", "--global-batch-size", "36", "--moe-ft-strategy", "dense"),
    ),
}


@pytest.mark.parametrize("name", SAME_PLANS)
def test_plan_of_a_command_line_is_the_one_on_file(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SAME_PLANS[name]) == 0
    assert capsys.readouterr().out == (PLANS / f"{name}.txt").read_text()


def test_example_in_the_documentation_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (ROOT / "docs" / "plan.md").read_text()
    (example,) = re.findall(
        r"python -m moe_ft (plan -- .*?strategy partial.*?\n\n(?:    [^\n]+\n)+)",
        page,
        re.DOTALL,
    )
    command, table = example.split("\n\n")
    assert main(shlex.split(command.replace("\\\n", ""))) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = [line.strip() for line in table.splitlines() if line]
    assert len(printed) == 5
    assert set(printed) <= set(lines)


@pytest.mark.parametrize("name", ["checkfreq", "gemini", "moc", "moevement", "symi", "lazarus"])
def test_presets_can_be_planned(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSIST_DIR", "/somewhere")
    preset = subprocess.run(
        [ROOT / "examples" / "presets" / f"{name}.sh"], capture_output=True, text=True, check=True
    )
    own = ("plan", "--world-size", "4", "--iteration-s", "1", "--bandwidth", "5e6", "--")
    assert main([*own, *SMALL, *preset.stdout.split()]) == 0
    assert "host memory" in capsys.readouterr().out


def test_preset_before_the_command_adds_its_flags(tmp_path: Path) -> None:
    # Of the shell's own words: the preset runs the command with its flags after it.
    preset = ROOT / "examples" / "presets" / "gemini.sh"
    flags = ("plan", "--world-size", "4", "--", *SMALL)
    found = subprocess.run(
        [preset, ROOT / ".venv" / "bin" / "python", "-m", "moe_ft", *flags],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert "each rank saves its slices" in found.stdout


def test_flags_without_an_effect_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    padded = ("--fp8-format", "hybrid", "--moe-router-padding-for-quantization")
    flags = (*SMALL, *padded, "--moe-ft-window", "3", "--moe-ft-strategy", "dense")
    assert main(["plan", "--world-size", "4", "--", *flags]) == 0
    text = capsys.readouterr().out
    assert "note: --fp8-format: " in text
    assert (
        "a start refuses this: --moe-ft-window=3 changes nothing without --moe-ft-strategy sparse"
        in text
    )


@pytest.mark.parametrize(
    ("cluster", "permission", "note"),
    [
        ((), (), "--moe-ft-repair=auto is refused on GPUs: .* --moe-ft-allow-untested repair"),
        ((), ("--moe-ft-allow-untested", "repair"), None),
        (ON_GPUS, (), "a start refuses this: --moe-ft-repair=auto is refused on GPUs: .* repair"),
        (ON_GPUS, ("--moe-ft-allow-untested", "repair"), None),
        (
            ON_GPUS,
            ("--moe-ft-allow-untested", "repair", "--skip-train"),
            "a start refuses this: --moe-ft-repair=auto does not work with --skip-train: not",
        ),
    ],
)
def test_settings_that_a_start_refuses_are_named(
    cluster: tuple[str, ...],
    permission: tuple[str, ...],
    note: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (*SMALL, "--moe-ft-strategy", "dense", "--moe-ft-repair", "auto", *permission)
    assert main(["plan", "--world-size", "4", *cluster, "--", *flags]) == 0
    text = capsys.readouterr().out
    assert "refuse" not in text if note is None else re.search(f"note: {note}", text)


def words_of(text: str) -> list[str]:
    """Return the words of a command as a shell reads it."""
    return shlex.split(text.replace("\\\n", ""))


def check_recommended(model: str, cluster: str, flags: Sequence[str] = ()) -> Proposal | None:
    """Run the rules of a start over the recommended command; None if the job does not fit the GPUs."""
    try:
        told = compare(["--model", model, "--cluster", cluster, "--", *flags])
    except ConfigError as error:
        assert "does not fit the layout" in str(error)
        return None
    assert told.advice.best is not None
    variable, *words = words_of(told.begin.text)
    assert variable == "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    command = read_command(words)
    assert command.launch.restarts and command.launch.backend == "c10d"
    assert command.config.strategy.is_on
    world_size = command.launch.world_size
    assert world_size == told.job.num_ranks
    start = planned_start(command, world_size=world_size, on_gpus=True)
    kept = "keep" in command.launcher
    start.check(command.config, told.begin.environment, is_kept=kept, is_watched=False)
    return told


@pytest.mark.parametrize("model", share_of(model_names(), "gpt-125m-8e", "lazarus-gpt-s"))
def test_recommended_command_of_each_preset_breaks_no_rule_of_a_start(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: dict[tuple[int, ...], tuple[PlannedJob, list[str]]] = {}

    def build(
        command: TrainingCommand, measured: MeasuredTimes, **ranks: int
    ) -> tuple[PlannedJob, list[str]]:
        if (key := (*ranks.values(),)) not in built:
            built[key] = plan_job(command, measured, **ranks)
        return built[key]

    monkeypatch.setattr(plan, "plan_job", build)  # whatever the cluster is
    found = [check_recommended(model, cluster) for cluster in cluster_names()]
    assert any(found)


def test_alternatives_that_a_start_refuses_are_shown_with_the_rule_and_what_lifts_it() -> None:
    told = check_recommended("lazarus-gpt-s", "dgx-h100")
    assert told is not None and told.advice.best is not None
    text = word(told).as_text()
    name = f"{told.advice.best.name}, repaired"
    assert re.search(rf"^{name}  +refused ", text, re.MULTILINE)
    lifted = ("--moe-ft-allow-untested", "repair")
    assert re.search(f"{name}: refused: .* it has never run on one. .* {' '.join(lifted)}", text)
    allowed = check_recommended("lazarus-gpt-s", "dgx-h100", lifted)
    assert allowed is not None and allowed.advice.best is not None
    assert "--moe-ft-repair=auto" in allowed.advice.best.flags and allowed.begin.is_kept
    # A rule of one strategy refuses that one alone.
    clipped = check_recommended("lazarus-gpt-s", "dgx-h100", ["--qk-clip"])
    assert clipped is not None
    refused = [each.name for each in clipped.advice.alternatives if each.refusal]
    assert sorted(refused) == sorted(["sparse at peers", name])


@pytest.mark.parametrize(
    ("racks", "found"),
    [
        ("n0 a\nn1 b\n", "any one node; any one failure domain\n"),
        (
            "n0 a\nn1 b\nn2 b\n",
            "any one failure domain, if its 2 nodes are in several (one domain has 2 ",
        ),
        ("n0 a\nn1 a\n", "any one node; no failure domain\n"),
        ("slurm", "any one node; any one failure domain, if SLURM gives it several\n"),
    ],
)
def test_plan_says_which_failures_memory_survives(
    racks: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "racks").write_text(racks)
    domains = "slurm" if racks == "slurm" else str(tmp_path / "racks")
    words = ("plan", "--world-size", "8", "--ranks-per-node", "4", "--", *SMALL)
    assert main([*words, "--moe-ft-strategy", "dense", "--moe-ft-failure-domain", domains]) == 0
    text = capsys.readouterr().out
    assert "memory survives the loss of any one node" in text
    assert found in text


@pytest.mark.parametrize("strategy", ["dense", "sparse"])
def test_strategy_that_does_not_fit_the_host_is_an_answer(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    window = ("--moe-ft-window", "2") if strategy == "sparse" else ()
    flags = [*SMALL, "--moe-ft-strategy", strategy, *window]
    assert main(["plan", "--world-size", "4", "--", *flags]) == 0
    fits = capsys.readouterr().out
    limit = ["--moe-ft-host-memory-limit", "1KB"]
    assert main(["plan", "--world-size", "4", "--", *flags, *limit]) == 0
    problem, _, rest = capsys.readouterr().out.partition("\n\n")
    assert problem == "does not fit: needs 0 GiB of host memory per node, and 0 GiB may be used"
    assert rest == fits


def test_world_size_that_is_given_wins(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--world-size", "8", "--ranks-per-node", "4", "--", "torchrun")
    launch = ("--nproc-per-node", "gpu", "pretrain_gpt_moe.py")
    assert main([*words, *launch, *SMALL, "--moe-ft-strategy", "dense"]) == 0
    text = capsys.readouterr().out
    assert "pp 2, dp 4, ep 2" in text
    assert "a node of 4" in text
    assert "replicas that it keeps (1)" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cluster x", "error: plan --cluster x has no command line of training, which must fol"),
        ("", "error: plan has no command .* must follow a --. Write it like moe_ft plan"),
        (
            "--iteration-s 1 --storage-bandwidth 1GB WORLD DENSE",
            "--storage-bandwidth=1GB needs checkpoints that go to storage. Add --moe-ft-persist-dir",
        ),
        ("--", "the number of ranks is not known: no launcher. Give --world-size N before"),
        ("-- SMALL", "the number of ranks is not known"),
        (
            "--world-size 4 -- SMALL",
            "--iteration-s, --bandwidth, --mtbf-s must be known to .* --cluster .* one --moe-ft-strategy",
        ),
        ("--model mixtral-8x", "--model=mixtral-8x must be one of .* Did you mean mixtral-8x7b"),
        ("--cluster h100 WORLD DENSE", "--cluster=h100 must be one of .* Did you mean dgx-h100"),
        ("--from-run /nowhere WORLD DENSE", "--from-run=/nowhere cannot be read: No such file"),
        ("--html /nowhere/x WORLD", "--html=/nowhere/x must be in a folder that exists. Make it"),
        ("--cluster dgx-h100 --mtbf-s 0 WORLD", "--mtbf-s=0.0 must be more than 0 seconds"),
        ("--save-minutes 0 WORLD", "--save-minutes=0 must be more than 0. Give the minutes"),
        (
            "--cluster gb200-nvl72 --ranks-per-node 8 --world-size 8 -- SMALL",
            "8 ranks of a node .* at most the 4 GPUs that --cluster=gb200-nvl72 has. Give fewer",
        ),
        (
            "--model mixtral-8x7b --cluster dgx-h100 --world-size 32 -- --pipeline-model-parallel-size 1 "
            "--num-layers 64",
            "--cluster=dgx-h100 does not fit the layout: .* take .* GB of the fullest GPU, and H100 SXM",
        ),
        (
            "--world-size 0 -- SMALL",
            "--world-size=0 must be a whole number, at least 1. Give a larger",
        ),
        (
            "--world-size 99999999 -- SMALL DENSE",
            r"99999999 ranks \(--world-size, or .* must be at most 1000000.* Give the numbers",
        ),
        ("--ranks-per-node 0 -- SMALL", "--ranks-per-node=0 must be a whole number, at least 1"),
        (
            "--iteration-s 1 --bandwidth fast WORLD DENSE",
            "--bandwidth=fast must be bytes .* like 25GB",
        ),
        (
            "--iteration-s 1 --network-bandwidth 0 WORLD DENSE",
            "--network-bandwidth=0 must be bytes per",
        ),
        ("WORLD DENSE --moe-ft-keep 0", "--moe-ft-keep=0 must be"),
        ("WORLD SPARSE --moe-ft-interval 2", "--moe-ft-interval=2 must be 1 with"),
        (
            "WORLD SPARSE --moe-ft-window 4 --train-iters 3",
            "--moe-ft-window=4 must be at most --train-i",
        ),
        (
            "WORLD PARTIAL --moe-ft-k-snapshot 9",
            "--moe-ft-k-snapshot=9 must be at most --num-experts=8",
        ),
        (
            "WORLD PARTIAL --moe-ft-k-snapshot 1 --moe-ft-k-persist 2",
            "--moe-ft-k-persist=2 must be at most",
        ),
    ],
)
def test_bad_input_is_refused_with_flag_value_rule_and_remedy(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, meaning in {
        "WORLD": "--world-size 4 -- SMALL",
        "DENSE": "--moe-ft-strategy dense",
        "PARTIAL": "--moe-ft-strategy partial",
        "SPARSE": "--moe-ft-strategy sparse",
        "SMALL": " ".join(SMALL),
    }.items():
        words = words.replace(name, meaning)
    assert main(["plan", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)


def test_option_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--modle", "x", "--", *LARGE])
    assert "unrecognized arguments: --modle x" in capsys.readouterr().err


def test_advice_on_a_preset_can_be_pasted_and_is_the_same_as_text_json_and_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "plan.html"
    words = ("plan", "--model", "lazarus-gpt-s", "--cluster", "azure-a100", "--html", f"{page}")
    assert main(words) == 0
    text = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    advice = json.loads(capsys.readouterr().out)
    assert advice["parameters"] == pytest.approx(521e6, rel=0.01)
    best = next(each for each in advice["alternatives"] if each["name"] == advice["recommended"])
    assert f"recommended: {best['name']}, > 99.99% of the time is training" in text
    assert f"\n\n{advice['gain']}\nthese are assumed, not measured: bandwidth, " in text
    assert escape(advice["gain"]) in page.read_text()
    pasted = words_of(text.split(advice["gain"])[1].split("\n\n")[1])
    assert pasted == words_of(advice["command"])
    assert pasted[-len(advice["flags"]) :] == advice["flags"]
    assert {each["name"] for each in advice["turns"]} >= {"--mtbf-s", "--bandwidth"}
    assert "MoEvement, section 5.1" in text
    root = ElementTree.fromstring(page.read_text().replace("<!DOCTYPE html>", ""))
    drawings = [each for each in root.iter() if each.tag == "svg"]
    assert [len(each.findall("rect")) > 4 for each in drawings] == [True]
    assert not re.search(r"<script|https?:|src=|@import|url\(", page.read_text())
    # What is recommended is a plan of its own, with the same ETTR.
    chosen = (*words[:5], "--json", "--", *advice["flags"])
    assert main(chosen) == 0
    (own,) = json.loads(capsys.readouterr().out)["alternatives"]
    assert (own["costs"], own["ettr"]) == (best["costs"], best["ettr"])
    assert main([each for each in chosen if each != "--json"]) == 0
    assert f"{best['ettr']:.4f} of the time is training (ETTR)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mtbf_s", "gain"),
    [
        # Of 3,600 s each failure takes 15 min of work, and the minute of a restart.
        (
            "3600",
            r"gain: 3\d\.\d h of a week \(1\d\d rank-hours\) over Megatron's --save every 30 min, ",
        ),
        ("1e12", r"gain: 0\.\d\d h of a week .* which loses 0\.\d\d h \(99\.\d\d% ETTR\)"),
    ],
)
def test_recommendation_says_what_it_gains_over_what_the_user_does_now(
    mtbf_s: str, gain: str
) -> None:
    links = ["--bandwidth=1GB", "--network-bandwidth=1GB", "--storage-bandwidth=1MB"]
    words = [*links, "--iteration-s=1", "--restart-s=60", f"--mtbf-s={mtbf_s}"]
    nodes = ["--world-size=4", "--ranks-per-node=2"]
    answer = word(compare([*words, *nodes, "--", *SMALL]))
    assert re.fullmatch(f"{gain}.*", answer.values["gain"])
    assert len(answer.values["alternatives"]) == 9  # with two rows of Megatron itself
    assert ("> 99.99% of the time" in answer.headline) == (mtbf_s == "1e12")


def test_flags_after_the_dashes_replace_those_of_a_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--num-layers", "2", "--moe-ft-strategy", "dense")
    launch = ("torchrun", "--nnodes", "1", "--nproc-per-node", "8", "pretrain_gpt_moe.py")
    assert main(["plan", "--model", "lazarus-gpt-s", "--", *launch, *flags]) == 0
    text = capsys.readouterr().out
    assert "8 experts of each of 2 MoE layers" in text
    assert "pp 1, dp 8, ep 8" in text


def test_measured_run_gives_the_times_of_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(tmp_path, 0, 1.0)
    own = ("plan", "--from-run", f"{tmp_path}", "--world-size", "4", "--bandwidth", "5e6", "--")
    assert main([*own, *SMALL, "--moe-ft-strategy", "dense"]) == 0
    text = capsys.readouterr().out
    # 10,436,352 bytes at what was given, and 2 s of an iteration as measured.
    assert "copy: 2.087 s, alongside 2.000 s of forward and backward" in text
    assert "a failure every 50 s" in text


@pytest.mark.parametrize(
    "strategy", ["dense", "partial --moe-ft-k-snapshot 1", "sparse --moe-ft-window 2"]
)
def test_breakpoint_takes_the_live_bytes_of_what_a_rank_saves(
    strategy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("plan", "--world-size", "8", "--", "torchrun", "--nproc-per-node", "4")
    own = []
    for flags in ((), ("--moe-ft-breakpoints",)):
        command = [*words, "pretrain_gpt_moe.py", *SMALL, "--moe-ft-strategy", *strategy.split()]
        assert main([*command, *flags]) == 0
        text = capsys.readouterr().out
        (line,) = [line for line in text.splitlines() if "bytes per parameter, own" in line]
        own.append([float(cell) for cell in line.split("|")[2:-1]])
    without, with_it = own
    assert all(
        after - before == pytest.approx(12, abs=0.11)
        for before, after in zip(without, with_it, strict=True)
    )
