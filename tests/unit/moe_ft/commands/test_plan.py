"""`plan` reads the command line of training, and keeps its numbers."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from moe_ft.cli import main
from tests.unit.moe_ft.planning.described import LARGE, LARGE_OF_8, SMALL

ROOT = Path(__file__).parents[4]
PLANS = Path(__file__).parent / "plans"
TWO_NODES = ("torchrun", "--nnodes", "2", "--nproc-per-node", "8", "pretrain_gpt_moe.py")
SPEEDS = ("--iteration-s", "0.5", "--bandwidth", "2GB")
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
}


@pytest.mark.parametrize("name", SAME_PLANS)
def test_plan_of_a_command_line_is_the_one_on_file(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(SAME_PLANS[name]) == 0
    assert capsys.readouterr().out == (PLANS / f"{name}.txt").read_text()


def test_example_in_the_readme_is_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(
        r"python -m moe_ft (plan -- .*?strategy partial.*?\n\n(?:    \|[^\n]*\n)+)",
        readme,
        re.DOTALL,
    )
    command, table = example.split("\n\n")
    assert main(shlex.split(command.replace("\\\n", ""))) == 0
    lines = capsys.readouterr().out.splitlines()
    printed = [line.strip() for line in table.splitlines() if line]
    assert len(printed) == 5
    assert set(printed) <= set(lines)


@pytest.mark.parametrize("name", ["checkfreq", "gemini", "moc", "moevement"])
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
    flags = (*SMALL, "--fp8-format", "hybrid", "--moe-ft-window", "3", "--moe-ft-strategy", "dense")
    assert main(["plan", "--world-size", "4", "--", *flags]) == 0
    text = capsys.readouterr().out
    assert "note: --fp8-format: " in text
    assert "note: --moe-ft-window changes nothing with --moe-ft-strategy=dense" in text


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
        (
            "--strategy sparse --num-layers 4",
            "must follow a --. Write it like python -m moe_ft plan",
        ),
        ("", "must follow a --. Write it like python -m moe_ft plan"),
        ("--", "the number of ranks is not known: no launcher. Give --world-size N before"),
        ("-- SMALL", "the number of ranks is not known"),
        (
            "--world-size 4 -- SMALL",
            "--moe-ft-strategy=none checkpoints nothing.* Add one of .* sparse",
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
        main(["plan", "--model", "x", "--", *LARGE])
    assert "unrecognized arguments: --model x" in capsys.readouterr().err


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
