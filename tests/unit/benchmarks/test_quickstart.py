"""The benchmarks' model of the quickstart is that of the script."""

from pathlib import Path

from benchmarks.quickstart import MODEL
from tests.demo_model import model_flags


def test_model_has_the_sizes_of_the_script() -> None:
    text = (Path(__file__).parents[3] / "examples" / "quickstart.sh").read_text()
    flags = model_flags(**MODEL)
    for name in (*MODEL, "num_layers", "num_attention_heads", "global_batch_size"):
        flag = f"--{name.replace('_', '-')}"
        assert f" {flag} {flags[flags.index(flag) + 1]} " in text.replace("\n", " "), flag
