"""Models with many flags that the small model of other tests does not set are recovered bit for bit.

Every flag that moe_ft/config/flag_table.py does not call untested is in some test; many only here.
"""

import pytest

from tests.checkpoint_job import NUM_RANKS, CheckpointJob
from tests.demo_model import event_flags
from tests.harness import digests, run_training

MODELS = {
    "grouped-query-attention": (
        *("--group-query-attention", "--num-query-groups", "2", "--kv-channels", "8"),
        *("--qk-layernorm", "--add-qkv-bias", "--norm-epsilon", "1e-6"),
        *("--rotary-base", "500000", "--rotary-percent", "0.5"),
        *("--moe-router-pre-softmax", "--moe-router-dtype", "fp32", "--moe-z-loss-coeff", "1e-3"),
        *("--moe-expert-capacity-factor", "1.0", "--moe-token-drop-policy", "position"),
        *("--attention-softmax-in-fp32", "--accumulate-allreduce-grads-in-fp32"),
        *("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss"),
        *("--adam-beta2", "0.95", "--weight-decay", "0.1", "--lr-decay-style", "cosine"),
        *("--dataloader-type", "cyclic", "--no-data-sharding"),
    ),
    "predicted-tokens-and-limited-groups": (
        *("--mtp-num-layers", "1", "--mtp-loss-scaling-factor", "0.3"),
        *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
        *("--moe-router-bias-update-rate", "0.01", "--moe-router-num-groups", "2"),
        *("--moe-router-group-topk", "1", "--moe-router-topk-scaling-factor", "2.5"),
        *("--moe-router-load-balancing-type", "seq_aux_loss", "--moe-layer-freq", "([0]+[1]*3)"),
        *("--overlap-grad-reduce", "--ddp-bucket-size", "20000"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_window_of_a_model_with_many_flags_is_replayed_bit_for_bit(
    name: str, job: CheckpointJob
) -> None:
    log = job.folder / "without"
    _have_data_listed_in_a_file_and_counted_in_samples(job)
    run_training([*job.base, *MODELS[name], *event_flags(log)], NUM_RANKS, log_dir=log).check()
    sparse = ("--moe-ft-strategy", "sparse", "--moe-ft-window", "2")
    job.run_with_faults("kill:1@5:backward", flags=[*MODELS[name], *sparse])
    (recovery,) = job.events("recovery")
    assert recovery["replayed_iterations"] == 1
    assert job.digests() == digests(log, NUM_RANKS)


def _have_data_listed_in_a_file_and_counted_in_samples(job: CheckpointJob) -> None:
    words, path = job.base, job.folder / "data.txt"
    data, length = words.index("--data-path"), words.index("--train-iters")
    path.write_text(words[data + 1])
    words[data : data + 2] = ["--data-args-path", str(path)]
    words[length : length + 2] = ["--train-samples", "96"]
