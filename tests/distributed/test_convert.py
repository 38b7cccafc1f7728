"""Stock Megatron continues converted checkpoints, and ours continues what stock Megatron has saved.

Both run on in the state that the checkpoint has: at the same layout the end is bitwise that of the run which
wrote it, in another layout losses differ by rounding.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from megatron.core import dist_checkpointing

from moe_ft.convert.conversion import ConversionRequest, convert
from moe_ft.errors import CorruptStateError
from tests.demo_model import DEEPSEEK, layout_flags, model_flags
from tests.jobs import CheckpointJob
from tests.references import Place
from tests.stock import Training, run_program
from tests.unit.moe_ft.convert.huggingface.round_trip import check_is_equal

MIDDLE, END = 2, 4
LOSS = "lm loss"
SMALL: dict[str, Any] = {"num_layers": 2, "hidden_dropout": 0.1, "lr_decay_style": "cosine"}
PLAIN = {"use_distributed_optimizer": False}
BIASED_ROUTER = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0,
}
SEQUENCE = {"sequence_parallel": True}

# (ranks, layout, changes to the small model)
Case = tuple[int, dict[str, int], dict[str, Any]]
QUICK: Case = (2, {"tp": 2}, SMALL | BIASED_ROUTER | SEQUENCE)
OTHERS: dict[str, Case] = {
    "tp2 ep2 of DeepSeek's kind": (
        4,
        {"tp": 2, "ep": 2, "etp": 1},
        # Stock Megatron has no multi-latent attention without Transformer Engine.
        DEEPSEEK
        | SEQUENCE
        | {"hidden_dropout": 0.1, "multi_latent_attention": False, "qk_layernorm": False}
        | dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), False)
        | dict.fromkeys(("qk_head_dim", "qk_pos_emb_head_dim"), False),
    ),
    "virtual stages, tied, fp16": (
        2,
        {"pp": 2},
        SMALL
        | {"num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1}
        | {"untie_embeddings_and_output_weights": False, "bf16": False, "fp16": True}
        | {"initial_loss_scale": 4096},
    ),
    "ep2, plain optimizer": (2, {"ep": 2}, SMALL | PLAIN),
    "ep2, plain optimizer, fp32": (2, {"ep": 2}, SMALL | PLAIN | {"bf16": False}),
}
LAYOUTS: dict[str, Case] = {
    "stages": (2, {"pp": 2}, {}),
    "one rank": (1, {}, {}),
    "experts on two ranks, data parallel": (2, {"ep": 2}, {}),
}


# Flags of the model that Megatron's --use-checkpoint-args reads.
IN_ARGUMENTS = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length"),
    *("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function"),
    *("moe_router_enable_expert_bias", "max_position_embeddings", "position_embedding_type"),
    *("disable_bias_linear", "swiglu", "untie_embeddings_and_output_weights"),
    *("hidden_dropout", "attention_dropout", "tokenizer_type"),
)


class Runs:
    """Runs of one case: ours, which leaves checkpoints of its middle and its end, and stock ones."""

    def __init__(self, case: Case, place: Place) -> None:
        self.world_size, self.layout, self.changes = case
        self._place, self._folder = place, place.folder
        self.storage = place.folder / "storage"

    def ours(self, *flags: str) -> Training:
        """Run ours from the beginning, or from what the flags name, to the end."""
        places = [
            *("--moe-ft-strategy", "dense", "--moe-ft-interval", "1", "--moe-ft-job-id", "job"),
            *("--moe-ft-memory-dir", str(self._place.memory_dir), "--moe-ft-keep", "9"),
            *("--moe-ft-persist-dir", str(self.storage), "--moe-ft-persist-interval", str(MIDDLE)),
        ]
        return self._run([*places, *flags], is_stock=False)

    def stock(self, *flags: str, case: Case | None = None) -> Training:
        """Run stock Megatron, by default in the same layout."""
        return self._run([*flags], is_stock=True, case=case)

    def plain(self, *flags: str, case: Case) -> Training:
        """Run ours without a strategy."""
        return self._run([*flags], is_stock=False, case=case)

    def _run(self, flags: list[str], *, is_stock: bool, case: Case | None = None) -> Training:
        world_size, layout, changes = case or (self.world_size, self.layout, {})
        removed = {} if case is None else dict.fromkeys(SEQUENCE, False)
        model = model_flags(**{"train_iters": END, **self.changes, **removed, **changes})
        command = [*model, *layout_flags(layout), *self._place.dataset_flags, *flags]
        folder = self._folder / f"run_{len(list(self._folder.glob('run_*')))}"
        return run_program(command, world_size, is_stock=is_stock, folder=folder)

    def converted(
        self, for_ep: int | None = None, what: str = "all", iteration: int = MIDDLE
    ) -> Path:
        """Return where a converted checkpoint is, by default that of the middle."""
        folder = self._folder / f"converted_{for_ep}_{what}"
        convert(
            ConversionRequest(
                source=str(self.storage),
                destination=str(folder),
                to="torch_dist",
                iteration=iteration,
                for_ep=for_ep,
                what=what,
                shard_bytes=300_000,
            )
        )
        return folder


def second_half(training: Training) -> dict[str, list[tuple[int, float]]]:
    """Return the numbers that were logged after the middle."""
    return {
        name: [point for point in points if point[0] > MIDDLE]
        for name, points in training.scalars.items()
        if "vs samples" not in name
    }


def check_continues_bitwise(runs: Runs, *flags: str) -> Path:
    """Check that stock Megatron ends like our run from its middle; return the converted checkpoint."""
    ours = runs.ours(*flags)
    folder = runs.converted()
    stock = runs.stock("--load", str(folder))
    assert second_half(stock)[LOSS] == second_half(ours)[LOSS]
    assert len(second_half(stock)[LOSS]) == END - MIDDLE
    if "ep" in runs.layout:
        # Megatron saves the random numbers of the first data-parallel rank; those of experts differ.
        assert [state for state, _ in stock.ends] == [state for state, _ in ours.ends]
    else:
        assert stock.ends == ours.ends
    return folder


@pytest.mark.versions
def test_stock_megatron_continues_bitwise_in_the_same_layout(place: Place) -> None:
    runs = Runs(QUICK, place)
    check_continues_bitwise(runs)


@pytest.mark.rest
@pytest.mark.parametrize("name", OTHERS)
def test_stock_megatron_continues_other_models(name: str, place: Place) -> None:
    check_continues_bitwise(Runs(OTHERS[name], place))


@pytest.mark.rest
def test_stock_megatron_continues_what_slots_of_experts_have_trained(place: Place) -> None:
    # Each expert in one slot, and without clipping: nothing else rounds as in stock Megatron.
    case = (4, {"ep": 4}, SMALL | {"hidden_dropout": 0.0, "clip_grad": 0.0})
    runs = Runs(case, place)
    slots = ("--moe-ft-expert-slots", "1", "--moe-ft-rebalance-interval", "1")
    ours = second_half(runs.ours(*slots))[LOSS]
    stock = second_half(runs.stock("--load", str(runs.converted())))[LOSS]
    assert stock == ours and len(ours) == END - MIDDLE


@pytest.mark.rest
def test_masters_that_are_split_are_put_together(place: Place) -> None:
    runs = Runs((1, {}, SMALL), place)
    check_continues_bitwise(runs, "--moe-ft-state-dtype", "master=split")


@pytest.mark.rest
def test_stock_megatron_continues_in_other_layouts(place: Place) -> None:
    world_size, layout, changes = QUICK
    case = world_size, layout, {**changes, "hidden_dropout": 0.0}
    runs = Runs(case, place)
    folder = check_continues_bitwise(runs)
    expected = second_half(runs.stock("--load", str(folder)))[LOSS]
    for other in LAYOUTS.values():
        ep = other[1].get("ep")
        source = folder if ep is None else runs.converted(ep)
        found = second_half(runs.stock("--load", str(source), case=other))[LOSS]
        assert [iteration for iteration, _ in found] == [iteration for iteration, _ in expected]
        assert [value for _, value in found] == pytest.approx(
            [value for _, value in expected], rel=1e-4
        )


@pytest.mark.rest
def test_ours_continues_multi_latent_attention_in_another_layout(place: Place) -> None:
    case = (2, {"pp": 2}, DEEPSEEK | {"num_layers": 4, "moe_layer_freq": "([0]*1+[1]*3)"})
    runs = Runs(case, place)
    ours = second_half(runs.ours())[LOSS]
    load = ["--load", str(runs.converted())]
    found = second_half(runs.plain(*load, case=(1, {}, {})))[LOSS]
    assert [value for _, value in found] == pytest.approx([value for _, value in ours], rel=1e-4)


@pytest.mark.usefixtures("settled")
@pytest.mark.rest
def test_partial_checkpoint_continues_with_the_ages_of_its_experts(place: Place) -> None:
    case = (2, {"ep": 2}, SMALL | {"train_iters": 3 * MIDDLE, "normalization": "RMSNorm"})
    runs = Runs(case, place)
    runs.ours(
        *("--moe-ft-strategy", "partial", "--moe-ft-k-snapshot", "4", "--moe-ft-k-persist", "2")
    )
    folder = runs.converted(iteration=2 * MIDDLE)
    state = dist_checkpointing.load_common_state_dict(str(folder / f"iter_{2 * MIDDLE:07d}"))
    ages = state["moe_ft"]["unit_iterations"]
    assert {age for unit, age in ages.items() if ".expert." in unit} == {MIDDLE, 2 * MIDDLE}
    assert state["moe_ft"]["plt"] == 0
    logged = runs.stock("--load", str(folder)).scalars[LOSS]
    assert [iteration for iteration, _ in logged] == [2 * MIDDLE + 1, 3 * MIDDLE]
    both = [place.folder / name for name in ("hf_of_ours", "hf_of_megatrons")]
    for source, to in zip((runs.storage, folder), both, strict=True):
        options: dict[str, Any] = {"to": "hf", "dtype": "fp32", "iteration": 2 * MIDDLE}
        convert(ConversionRequest(source=str(source), destination=str(to), **options))
        index = json.loads((to / "model.safetensors.index.json").read_text())
        assert index["metadata"]["moe_ft"]["unit_iterations"].items() >= ages.items()
    check_is_equal(*both)


@pytest.mark.rest
def test_weights_alone_start_a_run(place: Place) -> None:
    runs = Runs(QUICK, place)
    ours = runs.ours()
    stock = runs.stock("--load", str(runs.converted(what="weights")))
    (first, _), (_, loss) = ours.scalars[LOSS][0], stock.scalars[LOSS][0]
    assert [iteration for iteration, _ in stock.scalars[LOSS]] == list(range(first, END + 1))
    assert loss < ours.scalars[LOSS][0][1]  # of the same batch, before anything was learned


@pytest.mark.rest
def test_stock_megatron_takes_the_model_from_the_arguments_of_the_checkpoint(place: Place) -> None:
    runs = Runs(QUICK, place)
    expected = second_half(runs.ours())
    case = (2, {"tp": 2}, SEQUENCE | dict.fromkeys(IN_ARGUMENTS, False))
    found = runs.stock("--load", str(runs.converted()), "--use-checkpoint-args", case=case)
    assert second_half(found)[LOSS] == expected[LOSS]


@pytest.mark.rest
def test_memory_of_a_killed_job_is_converted(job: CheckpointJob) -> None:
    job.run("--moe-ft-inject-fault", "kill:1@4:before-step")
    folder = job.folder / "converted"
    convert(
        ConversionRequest(source=str(job.memory_dir), destination=str(folder), to="safetensors")
    )
    facts = json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]["moe_ft"]
    assert facts["iteration"] in (3, 4)
    assert len([unit for unit in facts["unit_iterations"] if ".expert." in unit]) == 4 * 4


@pytest.mark.rest
def test_ours_continues_what_stock_megatron_has_saved(place: Place) -> None:
    runs = Runs(QUICK, place)
    saved = place.folder / "saved"
    stock = runs.stock("--save", str(saved), "--save-interval", str(MIDDLE))
    (saved / "latest_checkpointed_iteration.txt").write_text(str(MIDDLE))
    ours = runs.ours("--load", str(saved))
    assert second_half(ours)[LOSS] == second_half(stock)[LOSS]
    assert ours.ends == stock.ends


@pytest.mark.rest
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_masters_that_stock_megatron_has_shifted_are_refused(
    is_overlapped: bool, place: Place
) -> None:
    # Buckets that are not a multiple of 128 elements are padded, and what follows is shifted by that.
    case: Case = (2, {}, SMALL | {"hidden_size": 72, "normalization": "RMSNorm", "train_iters": 1})
    saved = place.folder / "saved"
    overlap = ["--overlap-grad-reduce", "--ddp-num-buckets", "4"]
    Runs(case, place).stock(
        *("--save", str(saved), "--save-interval", "1", "--dist-ckpt-optim-fully-reshardable"),
        *(overlap if is_overlapped else []),
    )
    options: dict[str, Any] = {"source": str(saved), "to": "safetensors"}
    line = convert(ConversionRequest(**options, destination=str(place.folder / "weights")))
    assert "verified" in line
    masters = ConversionRequest(**options, destination=str(place.folder / "masters"), dtype="fp32")
    if is_overlapped:
        wanted = (
            r"the fp32 master of .* is not its weight, in \d+ of \d+ elements .*fully-reshardable"
        )
        with pytest.raises(CorruptStateError, match=wanted):
            convert(masters)
        assert not list(place.folder.glob("masters*"))
    else:
        assert "verified" in convert(masters)
