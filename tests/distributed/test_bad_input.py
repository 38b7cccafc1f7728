"""Wrong input ends every rank with code 2 and one line, before process groups are built."""

from pathlib import Path

import pytest

from tests.demo_model import model_flags
from tests.harness import run_training

MOCK = ["--mock-data"]
TERMINATED = -15  # by the launcher, because rank 0 has ended
# (ranks, flags, what the line must say)
CASES: dict[str, tuple[int, list[str], str]] = {
    "tp x pp x cp": (
        2,
        [*MOCK, "--pipeline-model-parallel-size", "3"],
        "world size 2 must be a multiple of --tensor-model-parallel-size=1 x "
        "--pipeline-model-parallel-size=3 x --context-parallel-size=1 = 3. Start another",
    ),
    "etp x ep x pp": (
        2,
        [*MOCK, "--tensor-model-parallel-size", "2", "--expert-model-parallel-size", "2"],
        "world size 2 must be a multiple of --expert-tensor-parallel-size=2 (default: the tensor "
        "parallel size) x --expert-model-parallel-size=2 x --pipeline-model-parallel-size=1 = 4",
    ),
    "experts and ep": (
        2,
        [*MOCK, "--expert-model-parallel-size", "2", "--num-experts", "5"],
        "--num-experts=5 must be a multiple of --expert-model-parallel-size=2",
    ),
    "size": (
        1,
        [*MOCK, "--tensor-model-parallel-size", "0"],
        "--tensor-model-parallel-size=0 must be at least 1",
    ),
    "experts without ep": (
        2,
        [*MOCK, "--expert-model-parallel-size", "2", "--num-experts"],
        "expected one argument",
    ),
    "unknown flag": (1, [*MOCK, "--nonsense"], "unrecognized arguments: --nonsense"),
    "strategy": (1, [*MOCK, "--moe-ft-strategy", "hope"], "invalid choice: 'hope'"),
    "ignored flag": (1, [*MOCK, "--sft"], "--sft is not supported by pretrain_gpt_moe.py"),
    "tokenizer": (
        1,
        ["--text-dir", "/nowhere"],
        "--tokenizer-type=NullTokenizer and --text-dir exclude each other",
    ),
    "top-k": (1, [*MOCK, "--moe-router-topk", "8"], "--moe-router-topk=8 must be at most"),
    "norm": (
        2,
        [*MOCK, "--tensor-model-parallel-size", "2", "--sequence-parallel", "--apply-layernorm-1p"],
        "--apply-layernorm-1p is not supported by the local implementation's norm",
    ),
    "no data": (1, [], "no training data: give --text-dir DIR"),
    "missing dataset": (
        1,
        ["--data-path", "/nowhere/data"],
        "--data-path /nowhere/data: /nowhere/data.idx does not exist",
    ),
    "two sources": (
        1,
        [*MOCK, "--text-dir", "/nowhere"],
        "--text-dir and --mock-data exclude each other",
    ),
    "fault kind": (
        1,
        [*MOCK, "--moe-ft-inject-fault", "explode:0@1"],
        "--moe-ft-inject-fault explode:0@1: kind 'explode' must be one of kill, exception, hang",
    ),
    "fault rank": (
        2,
        [*MOCK, "--moe-ft-inject-fault", "kill:2@1"],
        "rank 2 must be less than the world size 2",
    ),
    "value out of range": (
        1,
        [*MOCK, "--moe-ft-state-digest-interval", "-1"],
        "--moe-ft-state-digest-interval=-1 must be at least 0",
    ),
    "refused by Megatron": (
        1,
        [*MOCK, "--global-batch-size", "3"],
        "Megatron refuses these arguments: ",
    ),
    "refused by Megatron's model": (
        1,
        [*MOCK, "--recompute-granularity", "selective", "--recompute-modules", "nonsense"],
        "Megatron refuses these arguments: ",
    ),
    "transformer engine": (
        1,
        [*MOCK, "--transformer-impl", "transformer_engine"],
        "--transformer-impl=transformer_engine needs the package transformer-engine",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_ends_with_code_2_and_one_line(case: str, tmp_path: Path) -> None:
    world_size, flags, message = CASES[case]
    result = run_training(model_flags() + flags, world_size, log_dir=tmp_path)
    assert result.exit_codes[0] == 2
    assert set(result.exit_codes[1:]) <= {2, TERMINATED}
    lines = [line for line in result.output(0).splitlines() if "error: " in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert "initializing torch distributed" not in result.output(0)
    assert all("error: " not in result.output(rank) for rank in range(1, world_size))


def test_damaged_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_bytes(b"tokens")
    (tmp_path / "data.idx").write_bytes(b"no index")
    flags = [*model_flags(), "--data-path", str(tmp_path / "data")]
    result = run_training(flags, 1, log_dir=tmp_path)
    assert result.exit_codes == (2,)
    assert "data.idx" in result.output(0)


def test_text_directory_without_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "picture").write_bytes(b"\xff\xfe\x00")
    flags = [*model_flags(tokenizer_type=False), "--text-dir", str(tmp_path / "texts")]
    flags += ["--data-cache-path", str(tmp_path / "cache")]
    result = run_training(flags, 1, log_dir=tmp_path)
    assert result.exit_codes == (2,)
    assert "holds 1 files, none of them readable UTF-8 text" in result.output(0)


def test_empty_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.bin").touch()
    (tmp_path / "data.idx").touch()
    flags = [*model_flags(), "--data-path", str(tmp_path / "data")]
    result = run_training(flags, 1, log_dir=tmp_path)
    assert result.exit_codes == (2,)
    assert "data.bin is empty, a dataset must hold at least one token" in result.output(0)


def test_split_without_a_document_is_named_instead_of_hanging(
    dataset_flags: list[str], tmp_path: Path
) -> None:
    flags = [*model_flags(), *dataset_flags, "--split", "999999,1,1"]
    result = run_training(flags, 1, log_dir=tmp_path)
    assert result.exit_codes == (2,)
    assert "--split=999999,1,1 leaves the valid part of" in result.output(0)


def test_restart_under_a_shared_store_is_refused(tmp_path: Path) -> None:
    env = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    result = run_training([*model_flags(), *MOCK], 1, log_dir=tmp_path, env=env)
    assert result.exit_codes == (2,)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in result.output(0)


def test_unwritable_event_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flags = [*model_flags(), *MOCK, "--moe-ft-event-log", str(tmp_path / "file" / "events")]
    result = run_training(flags, 1, log_dir=tmp_path)
    assert result.exit_codes == (2,)
    assert "--moe-ft-event-log=" in result.output(0)
