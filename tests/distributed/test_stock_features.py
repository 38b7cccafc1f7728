"""Features that users of Megatron expect: save and load, evaluation, TensorBoard, exit flags."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.demo_model import DEEPSEEK, event_flags, layout_flags, model_flags
from tests.harness import digests, events, run_training

LAYOUT = {"pp": 2, "ep": 2}
RANKS = 4


def losses(directory: Path, rank: int) -> dict[int, float]:
    return {line["iteration"]: line["loss"] for line in events(directory, rank, "iteration")}


@pytest.mark.rest
def test_saved_checkpoint_is_loaded_and_training_goes_on_with_the_same_bits(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    common = model_flags(train_iters=4, hidden_dropout=0.1) + layout_flags(LAYOUT) + dataset_flags
    whole, first, second = (tmp_path / name for name in ("whole", "first", "second"))
    run_training(common + event_flags(whole), RANKS, log_dir=whole).check()
    save = [
        "--save",
        str(tmp_path / "saved"),
        "--save-interval",
        "2",
        "--ckpt-format",
        "torch_dist",
    ]
    run_training(
        [*common, *event_flags(first), *save, "--exit-interval", "2"], RANKS, log_dir=first
    ).check()
    load = ["--load", str(tmp_path / "saved")]
    run_training(common + event_flags(second) + load, RANKS, log_dir=second).check()
    assert [line["reason"] for line in events(first, 0, "end")] == ["exit flag"]
    assert list(losses(second, 3)) == [3, 4]
    assert [end[0] for end in digests(second, RANKS)] == [end[0] for end in digests(whole, RANKS)]


@pytest.mark.rest
def test_evaluation_and_tensorboard_write_their_numbers(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    board = tmp_path / "tensorboard"
    flags = model_flags(eval_interval=2, eval_iters=1, tensorboard_dir=str(board))
    flags += ["--tensorboard-log-interval", "1", "--log-memory-to-tensorboard"]
    result = run_training(
        flags + layout_flags(LAYOUT) + dataset_flags + event_flags(tmp_path),
        RANKS,
        log_dir=tmp_path,
    ).check()
    assert "validation loss at iteration 2" in result.output(RANKS - 1)
    scalars = EventAccumulator(str(board)).Reload()
    assert len(scalars.Scalars("moe-ft/iteration_s")) == 4
    written = {point.step: point.value for point in scalars.Scalars("lm loss")}
    assert written == pytest.approx(losses(tmp_path, RANKS - 1))


# Without dropout a layout changes only the order of sums and, because rounding then differs, the expert of a
# few tokens.
PLAIN: dict[str, Any] = {"train_iters": 9, "lr": 2e-3, "make_vocab_size_divisible_by": 128}
# Plain gradient descent with large steps: Adam would hide gradients of a wrong size. The loss of further
# tokens is off: Megatron weights it by the tokens that one rank of the context has.
LATENT: dict[str, Any] = {
    **DEEPSEEK,
    "bf16": False,
    "optimizer": "sgd",
    "use_distributed_optimizer": False,
    "sgd_momentum": 0.0,
    "lr": 0.5,
    "clip_grad": 100.0,
    "train_iters": 5,
    "global_batch_size": 8,
    "mtp_num_layers": False,
    "make_vocab_size_divisible_by": 128,
    "moe_router_load_balancing_type": "none",
}
FP32 = PLAIN | {"bf16": False}
RECOMPUTE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn")
SEQUENCE = ("--sequence-parallel",)
CONTEXT, TENSOR = {"cp": 2, "ep": 2}, {"tp": 2, "etp": 1}
# The stage in the middle needs the embedding of the first stage.
MTP_IN_THE_MIDDLE = ("--pipeline-model-parallel-layout", "Ettt|tm|L")


@pytest.mark.rest
@pytest.mark.parametrize(
    ("model", "ranks", "layout", "tolerance", "extra"),
    [
        (PLAIN, 4, {"pp": 2, "ep": 2}, 0.02, ()),
        (FP32 | {"mtp_num_layers": 1}, 3, {"pp": 3}, 1e-4, MTP_IN_THE_MIDDLE),
        # The gradients of the norms also have to be summed over the tensor-parallel ranks.
        (FP32, 2, {"tp": 2, "etp": 2}, 1e-5, SEQUENCE),
        (LATENT, 2, CONTEXT, 1e-5, RECOMPUTE),
        (LATENT, 2, TENSOR, 1e-5, SEQUENCE),
        (LATENT | {"q_lora_rank": False}, 2, CONTEXT, 1e-5, RECOMPUTE),
        (LATENT | {"q_lora_rank": False}, 2, TENSOR, 1e-5, SEQUENCE),
    ],
)
def test_layout_follows_the_loss_curve_of_one_rank(
    model: dict[str, Any],
    ranks: int,
    layout: dict[str, int],
    tolerance: float,
    extra: Sequence[str],
    dataset_flags: list[str],
    tmp_path: Path,
) -> None:
    flags, saved = [*model_flags(**model), *dataset_flags], tmp_path / "saved"
    save = ["--save", str(saved), "--save-interval", "1", "--exit-interval", "1"]
    run_training(flags + save, 1, log_dir=tmp_path / "save").check()
    # The random first weights depend on the layout, so all layouts load the same checkpoint.
    flags += ["--load", str(saved), "--no-load-optim", "--no-load-rng", "--finetune"]
    jobs: list[tuple[int, Sequence[str]]] = [(1, ()), (ranks, (*layout_flags(layout), *extra))]
    curves = []
    for size, own in jobs:
        folder = tmp_path / f"ranks_{size}"
        run_training([*flags, *own, *event_flags(folder)], size, log_dir=folder).check()
        curves.append(losses(folder, size - 1))
    reference, curve = curves
    assert len(reference) == model["train_iters"]
    assert curve == pytest.approx(reference, rel=tolerance)
    assert max(reference.values()) > 1.1 * min(reference.values()), "a flat curve means nothing"


@pytest.mark.rest
def test_text_directory_is_prepared_once_and_trained_on(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(40):
        (texts / f"{number}.txt").write_text(f"Text number {number}. " * 200)
    (texts / "picture.bin").write_bytes(bytes(range(256)))
    cache = tmp_path / "cache"
    words = ["--text-dir", str(texts), "--data-cache-path", str(cache), "--split", "80,10,10"]
    for start in ("first", "second"):
        folder = tmp_path / start
        flags = model_flags(tokenizer_type=False, eval_interval=False) + words + event_flags(folder)
        run_training(flags, 2, log_dir=folder).check()
    assert digests(tmp_path / "first", 2) == digests(tmp_path / "second", 2)
    assert len(list((cache / "text").glob("*/text.bin"))) == 1
