"""Wrong input ends every rank with code 2 and one line, before process groups are built."""

from pathlib import Path

import pytest

from tests.demo_model import model_flags
from tests.harness import run_training

MOCK = ["--mock-data"]
TERMINATED = -15  # the launcher ended this rank because rank 0 had ended
# Rules on the command line alone are tested in tests/unit/fault_tolerance/program/test_arguments.py.
# (ranks, flags, words that the line must contain)
CASES: dict[str, tuple[int, list[str], str]] = {
    "command line": (
        2,
        [*MOCK, "--pipeline-model-parallel-size", "3"],
        "world size 2 must be a multiple of --tensor-model-parallel-size=1 x "
        "--pipeline-model-parallel-size=3 x --context-parallel-size=1 = 3. Start another",
    ),
    "refused by Megatron's model": (
        1,
        [*MOCK, "--recompute-granularity", "selective", "--recompute-modules", "nonsense"],
        "Megatron refuses these arguments: ",
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


def test_empty_dataset_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.bin").touch()
    (tmp_path / "data.idx").touch()
    flags = [*model_flags(), "--data-path", str(tmp_path / "data")]
    result = run_training(flags, 1, log_dir=tmp_path)
    assert result.exit_codes == (2,)
    assert "data.bin is empty, a dataset must hold at least one token" in result.output(0)
