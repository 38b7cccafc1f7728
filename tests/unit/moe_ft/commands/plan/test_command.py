"""What ``python -m moe_ft plan`` prints and refuses."""

import re
from pathlib import Path

import pytest

from moe_ft.cli import main

LARGE = ("--model", "gpt-350m-16e", "--dp", "8", "--ep", "8")
IN_FULL = (*LARGE, "--k-snapshot", "4", "--k-persist", "1", "--master-always-full")


# The model and layout of examples/quickstart.sh.
SMALL = (
    *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4"),
    *("--num-experts", "8", "--ffn-hidden-size", "256", "--swiglu", "--rmsnorm"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights", "--vocab-size", "256"),
    *("--max-position-embeddings", "0", "--dp", "2", "--ep", "2", "--pp", "2"),
)
MEASURED = ("--iteration-s", "1", "--bandwidth", "5e6")
TWO_NODES = ("--ranks-per-node", "2", "--network-bandwidth", "4.6e6")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> "Plan":
    return Plan(capsys, "partial")


@pytest.fixture
def sparse(capsys: pytest.CaptureFixture[str]) -> "Plan":
    return Plan(capsys, "sparse")


@pytest.fixture
def dense(capsys: pytest.CaptureFixture[str]) -> "Plan":
    return Plan(capsys, "dense")


class Plan:
    """Runs the command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], strategy: str) -> None:
        self._capsys, self._command = capsys, ["plan", "--strategy", strategy]

    def __call__(self, *flags: str) -> str:
        """Return what it prints."""
        assert main([*self._command, *flags]) == 0
        return self._capsys.readouterr().out

    def error(self, *flags: str) -> str:
        """Return what it prints when it refuses its flags."""
        assert main([*self._command, *flags]) == 2
        captured = self._capsys.readouterr()
        assert captured.out == ""
        return captured.err


def row(text: str, first: str) -> list[str]:
    """Return the cells of the table row that begins with a cell."""
    (line,) = re.findall(rf"^\| {re.escape(first)} +\|.*$", text, re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


REPLICATED = (*IN_FULL, "--no-distributed-optimizer")


def test_sizes_at_both_levels_stand_beside_full(plan: Plan) -> None:
    # 255.3e6 parameters are no experts', with 12 bytes; 1,611.6e6 are, with 4 and, of k in 16, 8.
    text = plan(*IN_FULL)
    assert "12 bytes of a parameter saved" in text
    assert row(text, "snapshot")[1:6] == ["4", "12,733.7", "56.8%", "1,591.7", "0"]
    assert row(text, "persist")[1:5] == ["1", "10,316.3", "46.0%", "1,323.1"]
    assert row(text, "persist")[6:] == ["1.03", "52.8%"]
    assert row(text, "full")[4:7] == ["2,800.4", "0", "1.00"]
    assert "sharding" not in text


def test_baseline_stands_beside_a_sharding_that_has_an_effect(plan: Plan) -> None:
    assert row(plan(*REPLICATED), "full, sharding none")[4] == "5,481.5"


def test_example_in_the_readme_is_what_the_command_prints(plan: Plan) -> None:
    readme = (Path(__file__).parents[5] / "README.md").read_text()
    (example,) = re.findall(r"plan --strategy partial (.*\n\n(?:    \|.*\n)+)", readme)
    flags, *table = example.split("\n")
    lines = plan(*flags.split()).splitlines()
    printed = [line.strip() for line in table if line]
    assert len(printed) == 5
    assert set(printed) <= set(lines)


def test_experts_that_are_not_selected_are_left_out(plan: Plan) -> None:
    assert row(plan(*LARGE, "--k-snapshot", "1"), "snapshot")[3] == "19.1%"


@pytest.mark.parametrize(
    ("covers", "share"),
    [("both", "19.1%"), ("optimizer", "46.0%"), ("weights", "73.0%")],  # 1/16 of 12, 8 or 4 bytes
)
def test_part_of_an_expert_that_is_not_covered_is_always_saved(
    plan: Plan, covers: str, share: str
) -> None:
    text = plan(*LARGE, "--k-snapshot", "1", "--partial-covers", covers)
    assert row(text, "snapshot")[3] == share


def test_adaptive_sharding_lightens_the_bottleneck_and_is_advised(plan: Plan) -> None:
    advice = "persist: --sharding adaptive makes the heaviest rank 2.5% lighter"
    text = plan(*REPLICATED, "--sharding", "adaptive")
    assert row(text, "persist")[4:7] == ["1,289.5", "1", "1.00"]
    assert advice not in text
    assert advice in plan(*REPLICATED)
    assert "snapshot: --sharding adaptive" not in plan(*REPLICATED)


def test_heaviest_rank_has_most_of_an_expert_that_many_share(plan: Plan) -> None:
    text = plan(*LARGE[:2], "--dp", "128", "--ep", "8", "--k-snapshot", "1")
    assert (
        row(text, "snapshot")[6] == "3.73"
    )  # (255.3e6 / 128 + 8.4e6) of (255.3e6 + 100.7e6) / 128
    even = plan(
        *(*LARGE[:2], "--dp", "128", "--ep", "8", "--k-snapshot", "1"),
        *("--overlap-grad-reduce", "--ddp-bucket-size", "1000000"),
    )
    assert float(row(even, "snapshot")[6]) < 1.1


def test_stages_are_planned_rank_by_rank(plan: Plan) -> None:
    text = plan(*IN_FULL, "--pp", "2")
    assert "pp 2, dp 8, ep 8" in text
    assert row(text, "15")
    # The first stage has the positions as well; both have the words.
    assert row(text, "0")[1] > row(text, "8")[1]


def test_every_rank_is_listed_where_they_are_few(plan: Plan) -> None:
    text = plan(*REPLICATED, "--sharding", "none")
    assert row(text, "0")[4] == "4,004.2"
    assert row(text, "7")[2] == "1,208.7"


def test_spread_over_ranks_is_printed_where_they_are_many(plan: Plan) -> None:
    text = plan(*IN_FULL[:2], "--dp", "32", "--ep", "8", "--k-snapshot", "1")
    least, mean, most = (
        float(row(text, name)[2].replace(",", "")) for name in ("least", "mean", "most")
    )
    assert least <= mean <= most
    assert float(row(text, "snapshot")[4].replace(",", "")) == most


def test_host_memory_of_partial_experts_has_slots_for_three_versions(plan: Plan) -> None:
    text = plan(*LARGE, "--k-snapshot", "1", "--storage", "--ranks-per-node", "4")
    # Per rank 31.9e6 parameters of no expert and 201.4e6 of 24 experts, whose slots have 12.375 bytes.
    # k 1: 24 + 2 * 12 slots, k auto: 3 * 24.
    assert row(text, "a rank's own, MB")[1:] == ["6,134.9", "8,627.9", "8,401.2"]
    assert row(text, "replicas that it keeps (1), MB")[1:] == ["5,751.9", "8,244.8", "5,600.8"]
    assert row(text, "a node of 4, at most, MB")[1:] == ["47,547.3", "67,490.8", "56,008.2"]
    assert row(text, "bytes per parameter, all")[1:] == ["50.9", "72.3", "60.0"]


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
    # Bottlenecks: k = 6 has 1,793.1 MB, k = 7 1,927.4 MB, more than 1.9 s; persist 1,323.1 MB, 13.2 s.
    assert "snapshot: 1.592 s, hidden behind 1.900 s of forward and backward; stall 0.000 s" in text
    assert "largest k-snapshot that stays hidden: 6" in text
    assert "auto takes" not in text
    assert (
        "persist: 13.231 s; smallest interval 7 iterations; the one planned, 5, is too short"
        in (text)
    )


def test_automatic_k_is_named_where_it_is_more_careful(plan: Plan) -> None:
    flags = (*LARGE[:2], "--dp", "16", "--ep", "8", "--k-snapshot", "1")
    text = plan(*flags, "--iteration-s", "0.5", "--bandwidth", "2GB")
    assert "largest k-snapshot that stays hidden: 10" in text
    assert "auto takes 5: it allows for one rank having every selected expert" in text


def test_snapshot_that_cannot_be_hidden_has_a_stall(plan: Plan) -> None:
    text = plan(*IN_FULL, "--iteration-s", "0.592", "--bandwidth", "1GB")
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
            (*IN_FULL, "--num-moe-layers", "0"),
            "--num-moe-layers=0 must be between 1 and .* without experts with --strategy sparse",
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
            (*IN_FULL, "--master-bytes", "0", "--moment-bytes", "0"),
            "--master-bytes=0 and --moment-bytes=0: .* at least one of them must be more than 0. Raise",
        ),
        (
            (*IN_FULL, "--weight-bytes", "2"),
            "--weight-bytes=2 does not go with --strategy=partial: .* not the weights of forward",
        ),
        (
            (*IN_FULL, "--sharding", "adaptive"),
            "--sharding=adaptive changes nothing with the distributed optimizer: .* Leave it out",
        ),
        (
            (*IN_FULL, "--partial-covers", "weights"),
            "--partial-covers=weights with --master-always-full leaves nothing .* Drop one",
        ),
        (
            (*IN_FULL, "--ddp-bucket-size", "9"),
            "--ddp-bucket-size=9 needs --overlap-grad-reduce: .* Give both or neither",
        ),
        ((*IN_FULL, "--pp", "5"), "--pp=5 must divide --num-layers=24. Change one"),
        (
            (*IN_FULL, "--window", "3"),
            "--window=3 does not go with --strategy=partial: .* Leave it",
        ),
        (
            (*IN_FULL, "--replication-factor", "1"),
            "--replication-factor=1 must be less than the 1 nodes that --dp=8 x --pp=1 ranks",
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


def test_dense_snapshots_are_planned_with_their_wait_and_their_memory(dense: Plan) -> None:
    text = dense(
        *(*LARGE, "--ranks-per-node", "4", "--iteration-s", "2", "--bandwidth", "1GB"),
        *("--interval", "4", "--storage-bandwidth", "100MB", "--persist-interval", "2"),
    )
    assert "snapshot: 22,403.3 MB in all, 2,800.4 MB of rank 0, which has the most" in text
    assert "copied in 2.800 s" in text
    assert "stall 0.800 s, 10.0% of the time with --interval 4" in text
    assert "persist: 28.004 s; smallest interval 15 iterations; the one planned, 8, is too" in text
    assert row(text, "bytes per parameter, own")[1] == "36.0"
    assert row(text, "bytes per parameter, all")[1] == "60.0"


def test_dense_snapshots_of_a_model_without_experts_are_planned(dense: Plan) -> None:
    text = dense(*SMALL[:-6], "--num-moe-layers", "0")
    assert "parameters, no experts" in text
    assert row(text, "bytes per parameter, all")[1] == "24.0"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--k-snapshot", "1"),
            "--k-snapshot=1 does not go with --strategy=dense: a snapshot holds",
        ),
        (("--window", "3"), "--window=3 does not go with --strategy=dense: a snapshot holds every"),
        (("--sharding", "none"), "--sharding=none changes nothing with the distributed optimizer"),
    ],
)
def test_bad_input_about_dense_snapshots_is_refused(
    dense: Plan, flags: tuple[str, ...], message: str
) -> None:
    assert message in dense.error(*LARGE, *flags)


def test_snapshots_of_a_given_window_stand_beside_a_dense_one(sparse: Plan) -> None:
    text = sparse(*SMALL, "--window", "3")
    assert "window 3, as given" in text
    # What the run logs: 3,705,472, 4,295,296 and 4,538,112 bytes. A rank has 869,696 parameters.
    assert row(text, "first")[1:] == ["3.7", "64.5%"]
    assert row(text, "largest")[1:] == ["4.5", "56.5%"]
    assert row(text, "mean")[1:] == ["4.2", "60.0%"]
    assert row(text, "2")[1:] == ["4.3", "58.8%"]
    assert row(text, "dense")[1:] == ["10.4", ""]


def test_window_of_more_snapshots_than_units_is_warned_of(sparse: Plan) -> None:
    warning = r"warning: --window=100000 is more than the (\d+) units .* Give at most \1, or auto\."
    found = re.search(warning, sparse(*SMALL, "--window", "100000"))
    assert found
    assert "warning" not in sparse(*SMALL, "--window", found[1])


def test_window_is_chosen_so_that_its_largest_snapshot_fits_an_iteration(sparse: Plan) -> None:
    text = sparse(*SMALL, *MEASURED)
    assert "window 3, the shortest whose snapshots fit" in text
    assert (
        "budget of a snapshot: 5.0 MB can be copied to the host in an iteration; the largest has 4.5 MB "
        "and fits" in text
    )
    assert "stall: 0.000 s per iteration, 0.000 s at most; expected overhead 0.00%" in text


def test_optimizer_step_leaves_less_of_the_iteration_for_copies(sparse: Plan) -> None:
    text = sparse(*SMALL, *MEASURED, "--update-s", "0.2")
    assert "window 4, the shortest whose snapshots fit" in text
    assert "4.0 MB can be copied to the host in an iteration" in text


def test_replication_can_be_what_limits_a_snapshot(sparse: Plan) -> None:
    text = sparse(*SMALL, *MEASURED, *TWO_NODES)
    assert "4.6 MB can be sent to 1 peer in an iteration; the largest has 4.5 MB and fits" in text
    assert "last snapshot are complete 1 iteration late: a window every 4 iterations" in text


def test_window_that_does_not_fit_has_a_stall_and_an_overhead(sparse: Plan) -> None:
    text = sparse(*SMALL, *MEASURED, "--max-window", "1")
    assert "window 1, the longest that is allowed: none fits" in text
    assert "the largest has 10.4 MB and does NOT fit" in text
    # 10,436,352 bytes at 5e6 a second, of which a second is hidden.
    assert "stall: 1.087 s per iteration, 1.087 s at most; expected overhead 108.73%" in text


def test_host_memory_is_that_of_own_windows_and_of_replicas(sparse: Plan) -> None:
    text = sparse(*SMALL, *TWO_NODES, "--window", "3", "--storage")
    # A window has 12,538,880 bytes, a tenth more is reserved; dense 10,436,352. Three regions and two.
    assert row(text, "a rank's own, MB")[1:] == ["37.6", "41.4", "31.3"]
    assert row(text, "replicas that it keeps (1), MB")[1:] == ["25.1", "27.6", "20.9"]
    assert row(text, "a rank, MB")[1:] == ["62.7", "69.0", "52.2"]
    assert row(text, "a node of 2, at most, MB")[1:] == ["125.4", "137.9", "104.4"]
    assert row(text, "bytes per parameter, own")[1:] == ["43.3", "47.6", "36.0"]
    assert row(text, "bytes per parameter, all")[1:] == ["72.1", "79.3", "60.0"]


def test_memory_is_reserved_for_the_longest_window_that_may_be_chosen(sparse: Plan) -> None:
    reserved = [
        row(sparse(*SMALL, *MEASURED, "--max-window", most), "a rank's own, MB")[2] for most in "38"
    ]
    assert reserved == ["27.6", "36.4"]


def test_recovery_is_listed_part_by_part(sparse: Plan) -> None:
    text = sparse(*SMALL, *MEASURED, "--restart-s", "20", "--mtbf-s", "600")
    assert row(text, "restart")[1:] == ["", "20.00"]
    assert row(text, "restore")[1:] == ["12.5 MB", "2.51"]
    assert row(text, "conversion")[1:] == ["2 replays", "2.00"]
    assert row(text, "work to redo")[1:] == ["2.5 iterations", "2.50"]
    assert row(text, "E[R]")[1:] == ["", "27.01"]
    assert "conversion included: 3 to 6, 4.5 on average" in text
    assert "a failure every 600 s: 0.9569 of the time is training (ETTR)" in text


def test_storage_takes_a_window_every_so_many(sparse: Plan) -> None:
    text = sparse(*SMALL, *MEASURED, "--storage-bandwidth", "1e6", "--persist-interval", "4")
    # 12.5 s for a window that takes 3 s.
    assert (
        "persist: 12.539 s; smallest interval 5 windows; the one planned, 4, is too short" in text
    )
    assert row(text, "a rank's own, MB")[1] == "37.6"  # three regions


def test_times_are_left_out_without_bandwidths(sparse: Plan) -> None:
    text = sparse(*SMALL, "--window", "3")
    assert "stall" not in text
    assert "E[R]" not in text


def test_model_without_experts_is_planned_layer_by_layer(sparse: Plan) -> None:
    text = sparse(*SMALL[:-6], "--num-moe-layers", "0", "--window", "3")
    assert "parameters, no experts" in text
    assert "orders of popularity" not in text


def test_orders_of_popularity_are_drawn_where_experts_have_several_owners(sparse: Plan) -> None:
    text = sparse(*SMALL, "--dp", "4", "--window", "3")
    assert "of 4 orders of popularity, drawn at random, the one with the largest snapshot" in text


def test_saving_of_frozen_experts_is_given_with_and_without_grouped_gemm(sparse: Plan) -> None:
    flags = (*SMALL, *MEASURED, "--window", "3")
    saving = r"save ([\d.]+) s of the conversion at best, ([\d.]+) s {} grouped GEMM"
    alone = re.search(saving.format("with"), sparse(*flags))
    text = sparse(*flags, "--moe-grouped-gemm")
    together = re.search(saving.format("without"), text)
    assert alone and together
    assert alone.groups() == together.groups()[::-1]
    assert 0 < float(together[1]) < float(together[2])
    assert "freeze together, so they are saved together" in text


def test_grouped_gemm_makes_no_difference_with_one_expert_on_a_rank(sparse: Plan) -> None:
    text = sparse(*SMALL, "--dp", "8", "--ep", "8", *MEASURED, "--ranks-per-node", "16")
    assert "of the conversion at best\n" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--window=auto needs --iteration-s and --bandwidth: .* or a number with --window"),
        (("--window", "0"), "--window=0 must be a whole number, at least 1, or auto. Give one"),
        (("--window", "-1"), "--window=-1 must be a whole number, at least 1, or auto"),
        (
            ("--window", "4", "--train-iters", "3"),
            "--window=4 must be at most --train-iters=3: .* Lower it, or use auto",
        ),
        ((*MEASURED, "--max-window", "0"), "--max-window=0 must be a whole number, at least 1"),
        ((*MEASURED, "--pp", "0"), "--pp=0 must be a whole number, at least 1"),
        ((*MEASURED, "--pp", "3"), "--pp=3 must divide --num-layers=4. Change one of them"),
        ((*MEASURED, "--ranks-per-node", "0"), "--ranks-per-node=0 must be a whole number"),
        ((*MEASURED, "--moe-router-topk", "0"), "--moe-router-topk=0 must be a whole number"),
        (
            (*MEASURED, "--moe-router-topk", "9"),
            "--moe-router-topk=9 must be at most --num-experts=8. Lower it",
        ),
        (
            (*MEASURED, "--replication-factor", "all"),
            "--replication-factor=all must be a whole number, at least 0, or auto. Give one",
        ),
        (
            (*MEASURED, "--replication-factor", "2", *TWO_NODES),
            "--replication-factor=2 must be less than the 2 nodes that --dp=2 x --pp=2 ranks are on "
            "with --ranks-per-node=2: .* Lower one",
        ),
        (
            (*MEASURED, "--ranks-per-node", "2"),
            "--replication-factor=auto, that is 1, needs --network-bandwidth: .*-factor 0",
        ),
        (
            (*MEASURED, "--network-bandwidth", "none"),
            "--network-bandwidth=none must be bytes per second, more than 0. Write it like 25GB",
        ),
        ((*MEASURED, "--mtbf-s", "0"), "--mtbf-s=0.0 must be more than 0 seconds. Give the mean"),
        ((*MEASURED, "--mtbf-s", "nan"), "--mtbf-s=nan must be more than 0 seconds"),
        (
            ("--window", "3", "--mtbf-s", "600"),
            "--mtbf-s=600.0 needs --iteration-s and --bandwidth: .* or leave --mtbf-s out",
        ),
        (
            (*MEASURED, "--restart-s", "-1"),
            "--restart-s=-1.0 must be at least 0 seconds. Give what",
        ),
        (
            (*MEASURED, "--weight-bytes", "14", "--master-bytes", "4"),
            "--weight-bytes=14 must be at most --master-bytes=4 plus --moment-bytes=8: .* Lower it",
        ),
        (
            (*MEASURED, "--k-snapshot", "1"),
            "--k-snapshot=1 does not go with --strategy=sparse: .* Leave it out",
        ),
        ((*MEASURED, "--k-persist", "1"), "--k-persist=1 does not go with --strategy=sparse"),
        ((*MEASURED, "--master-always-full"), "--master-always-full does not go with --strategy"),
        ((*MEASURED, "--interval", "2"), "--interval=2 does not go with --strategy=sparse: a wind"),
        ((*MEASURED, "--partial-covers", "weights"), "--partial-covers=weights does not go with"),
        ((*MEASURED, "--overlap-grad-reduce"), "--overlap-grad-reduce does not go with"),
        (
            (*MEASURED, "--sharding", "adaptive"),
            "--sharding=adaptive does not go with --strategy=sparse: .* Use equal",
        ),
        (
            (*MEASURED, "--num-moe-layers", "5"),
            "--num-moe-layers=5 must be between 0 and --num-layers=4. Lower it",
        ),
    ],
)
def test_bad_input_about_windows_is_refused_with_flag_value_rule_and_remedy(
    sparse: Plan, flags: tuple[str, ...], message: str
) -> None:
    assert re.search(message, sparse.error(*SMALL, *flags))


def test_strategy_that_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--strategy", "hopeful"])
    assert "argument --strategy: invalid choice: 'hopeful'" in capsys.readouterr().err
