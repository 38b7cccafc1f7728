"""What ``python -m moe_ft plan`` prints and refuses."""

import re

import pytest

from moe_ft.cli import main

LARGE = ("--model", "gpt-350m-16e", "--dp", "8", "--ep", "8")
IN_FULL = (*LARGE, "--k-snapshot", "4", "--k-persist", "1", "--master-always-full")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> "Plan":
    return Plan(capsys)


class Plan:
    """Runs the command."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *flags: str) -> str:
        """Return what it prints."""
        assert main(["plan", "--strategy", "partial", *flags]) == 0
        return self._capsys.readouterr().out

    def error(self, *flags: str) -> str:
        """Return what it prints when it refuses its flags."""
        assert main(["plan", "--strategy", "partial", *flags]) == 2
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err


def row(text: str, first: str) -> list[str]:
    """Return the cells of the table row that begins with a cell."""
    (line,) = re.findall(rf"^\| {re.escape(first)} +\|.*$", text, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_sizes_at_both_levels_stand_beside_full_and_baseline(plan: Plan) -> None:
    text = plan(*IN_FULL)
    assert row(text, "snapshot")[1:6] == ["4", "14,050.2", "53.8%", "1,756.3", "0"]
    assert row(text, "persist")[1:5] == ["1", "11,028.4", "42.2%", "1,420.5"]
    assert row(text, "persist")[6:] == ["61.8%", "56.5%"]
    assert row(text, "full")[4:7] == ["3,267.1", "0", "12.0%"]
    assert row(text, "full, sharding none")[4] == "3,714.0"


def test_equation_6_is_the_default_byte_model(plan: Plan) -> None:
    assert row(plan(*LARGE, "--k-snapshot", "1"), "snapshot")[3] == "19.1%"


def test_adaptive_sharding_lightens_the_bottleneck(plan: Plan) -> None:
    text = plan(*IN_FULL, "--sharding", "adaptive")
    assert row(text, "persist")[4] == "1,378.6"
    assert "--sharding adaptive evens that out" not in text


def test_imbalance_of_equal_sharding_is_pointed_out(plan: Plan) -> None:
    text = plan(*IN_FULL)
    assert "persist: 1 x 12 experts are not the same number for every rank" in text
    assert "snapshot: 4 x 12" not in text


def test_every_rank_is_listed_where_they_are_few(plan: Plan) -> None:
    text = plan(*IN_FULL, "--sharding", "none")
    assert row(text, "0")[4] == "1,867.4"
    assert row(text, "7")[2] == "1,692.4"


def test_spread_over_ranks_is_printed_where_they_are_many(plan: Plan) -> None:
    text = plan(*IN_FULL[:2], "--dp", "32", "--ep", "8", "--k-snapshot", "4", "--sharding", "none")
    least, mean, most = (
        float(row(text, name)[2].replace(",", "")) for name in ("least", "mean", "most")
    )
    assert least < mean < most
    assert float(row(text, "snapshot")[4].replace(",", "")) == most


def test_model_given_by_its_sizes_is_that_of_the_preset(plan: Plan) -> None:
    sizes = ("--num-layers", "24", "--hidden-size", "1024", "--num-experts", "16")
    flags = ("--num-moe-layers", "12", "--dp", "8", "--ep", "8", *IN_FULL[6:])
    assert plan(*sizes, *flags) == plan(*IN_FULL)


def test_flags_change_sizes_of_a_preset(plan: Plan) -> None:
    text = plan(*IN_FULL, "--num-layers", "12", "--untie-embeddings-and-output-weights")
    assert "16 experts of each of 6 MoE layers" in text


def test_llama_like_model_has_the_parameters_of_its_shape(plan: Plan) -> None:
    # Mixtral 8x7B: 46.70e9 parameters.
    text = plan(
        *("--num-layers", "32", "--hidden-size", "4096", "--num-experts", "8"),
        *("--ffn-hidden-size", "14336", "--num-attention-heads", "32", "--num-query-groups", "8"),
        *("--vocab-size", "32000", "--max-position-embeddings", "0", "--swiglu", "--rmsnorm"),
        *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--k-snapshot", "1"),
    )
    assert "46.703e9 parameters" in text


def test_bandwidths_give_what_stays_hidden_and_the_smallest_interval(plan: Plan) -> None:
    text = plan(
        *(*IN_FULL, "--iteration-s", "2.0", "--update-s", "0.1", "--bandwidth", "1GB"),
        *("--storage-bandwidth", "100e6", "--interval", "5"),
    )
    # Bottlenecks: k = 4 has 1,756.3 MB, k = 5 1,924 MB, more than 1.9 s; persist 1,420.5 MB, 14.2 s.
    assert "snapshot: 1.756 s, hidden behind 1.900 s of forward and backward; stall 0.000 s" in text
    assert "largest k-snapshot that stays hidden: 4" in text
    assert (
        "persist: 14.205 s; smallest interval 8 iterations; the one planned, 5, is too short"
        in (text)
    )


def test_snapshot_that_cannot_be_hidden_has_a_stall(plan: Plan) -> None:
    text = plan(*IN_FULL, "--iteration-s", "0.756", "--bandwidth", "1GB")
    assert "stall 1.000 s" in text
    assert "largest k-snapshot that stays hidden: none, not even 1" in text


def test_limits_are_left_out_without_an_iteration_time(plan: Plan) -> None:
    assert "hidden" not in plan(*IN_FULL)


def test_losses_of_a_fault_are_those_of_the_closed_form(plan: Plan) -> None:
    text = plan(
        *("--model", "gpt-125m-8e", "--k-snapshot", "4", "--k-persist", "2", "--interval", "16"),
        *("--persist-interval", "2", "--train-iters", "1280"),
    )
    assert row(text, "memory (no node lost)")[1:] == ["8.00", "0.6250%"]
    assert row(text, "storage (all nodes lost)")[1:] == ["48.00", "3.7500%"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--k-snapshot", "1", "--num-layers", "2"),
            "--hidden-size, --num-experts not given: without --model the size of the model must be. "
            "Give them, or --model gpt-125m-8e|gpt-350m-16e.",
        ),
        (LARGE, "--k-snapshot not given: .* Give 1 to 16."),
        (
            (*LARGE, "--k-snapshot", "1", "--k-persist", "2"),
            "--k-persist=2 and --k-snapshot=1 must satisfy .* num-experts=16: .* Lower --k-persist",
        ),
        ((*LARGE, "--k-snapshot", "17"), "--k-persist=17 and --k-snapshot=17 must satisfy"),
        ((*LARGE, "--k-snapshot", "0"), "--k-persist=0 and --k-snapshot=0 must satisfy"),
        ((*LARGE, "--k-snapshot", "1", "--dp", "12"), "--ep=8 must divide --dp=12. Change one"),
        (
            (*LARGE, "--k-snapshot", "1", "--dp", "32", "--ep", "32"),
            "--ep=32 must divide --num-experts=16. Change one",
        ),
        ((*IN_FULL, "--dp", "0"), "--dp=0 must be a whole number, at least 1. Give a larger"),
        ((*IN_FULL, "--ep", "0"), "--ep=0 must be a whole number, at least 1"),
        ((*IN_FULL, "--hidden-size", "0"), "--hidden-size=0 must be a whole number, at least 1"),
        ((*IN_FULL, "--vocab-size", "-1"), "--vocab-size=-1 must be a whole number, at least 0"),
        (
            (*IN_FULL, "--num-moe-layers", "25"),
            "--num-moe-layers=25 must be between 1 and --num-layers=24. Lower it",
        ),
        (
            (*IN_FULL, "--num-attention-heads", "7"),
            "--num-attention-heads=7 must divide --hidden-size=1024 .* Change one of them, or give",
        ),
        (
            (*IN_FULL, "--num-query-groups", "5"),
            "--num-query-groups=5 must divide --num-attention-heads=16. Change one",
        ),
        (
            (*IN_FULL, "--moment-bytes", "-8"),
            "--moment-bytes=-8 must be a whole number, at least 0",
        ),
        (
            (*IN_FULL, "--weight-bytes", "0", "--master-bytes", "0", "--moment-bytes", "0"),
            "at least one of them must be more than 0. Raise one",
        ),
        ((*IN_FULL, "--interval", "0"), "--interval=0 must be a whole number, at least 1"),
        ((*IN_FULL, "--persist-interval", "0"), "--persist-interval=0 must be"),
        ((*IN_FULL, "--train-iters", "0"), "--train-iters=0 must be a whole number"),
        ((*IN_FULL, "--iteration-s", "nan"), "--iteration-s=nan must be more than 0 seconds. Give"),
        (
            (*IN_FULL, "--iteration-s", "1", "--update-s", "1"),
            "--update-s=1.0 must be at least 0 and less than --iteration-s=1.0, .* Lower it",
        ),
        (
            (*IN_FULL, "--iteration-s", "1", "--bandwidth", "fast"),
            "--bandwidth=fast must be bytes per second, more than 0. Write it like 25GB or 25e9",
        ),
        (
            (*IN_FULL, "--iteration-s", "1", "--storage-bandwidth", "0"),
            "--storage-bandwidth=0 must be bytes per second, more than 0",
        ),
        (
            (*IN_FULL, "--storage-bandwidth", "1GB"),
            "--storage-bandwidth=1GB needs --iteration-s: .* or leave --storage-bandwidth out",
        ),
    ],
)
def test_bad_input_is_refused_with_flag_value_rule_and_remedy(
    plan: Plan, flags: tuple[str, ...], message: str
) -> None:
    assert re.search(message, plan.error(*flags))


def test_strategy_that_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--strategy", "hopeful"])
    assert "argument --strategy: invalid choice: 'hopeful'" in capsys.readouterr().err
